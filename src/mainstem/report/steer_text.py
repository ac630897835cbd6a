"""A comparison in words: what its table for the terminal and its page both say."""

import math

from mainstem.report.text import plain, plural, scientific
from mainstem.results.generation import Compared, Generated, Likelihood


def how_written(made: Generated) -> str:
    """Whether a cache was used, and what the check without one found."""
    way = "with a cache" if made.cached else "without a cache"
    if made.difference is None:
        return f"{way}; not checked, for the model attends both ways"
    return f"{way}; one pass without: {scientific(made.difference)} nats apart"


def ending(made: Generated) -> str:
    """How a text ended."""
    written = plural(len(made.ids), "token")
    return f"{written}, ended by the model" if made.stopped else written


def mean_text(made: Generated) -> str:
    """How likely its tokens were on average."""
    return f"mean log p {plain(sum(made.log_probabilities) / max(len(made.log_probabilities), 1))}"


def ratio(row: Likelihood) -> float:
    """By what the edits multiply a text's probability."""
    return math.exp(min(row.edited - row.plain, 700.0))


def ratio_text(row: Likelihood) -> str:
    """The same to the digits that matter."""
    value = ratio(row)
    return f"× {value:.3g}" if math.isfinite(value) else "–"


def divergence(c: Compared) -> str:
    """Where the two texts part, in one sentence."""
    if c.plain.ids == c.edited.ids:
        return "both texts are the same"
    return "they differ from the first token on" if c.same == 0 else f"they differ after {plural(c.same, 'token')}"


def choosing(c: Compared) -> str:
    """How tokens were chosen."""
    return "the likeliest token each time" if c.temperature == 0 else f"drawn at temperature {c.temperature:g}"
