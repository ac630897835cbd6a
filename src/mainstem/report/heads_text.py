"""What heads do, in words: what its tables for the terminal and its page both say."""

from mainstem.report.text import count, plain, plural, signed, visible
from mainstem.results.heads import AblationRow, BehaviourReading, HeadRow, HeadsReading

TITLES = {
    "prefix": "Prefix matching",
    "legacy": "Prefix matching, legacy offset",
    "duplicate": "Duplicate token",
    "previous": "Previous token",
    "first": "First-token sink",
    "copying": "Copying",
    "copying-alone": "Copying, the token alone",
}
"""Behaviours as headings."""

MEANINGS = {
    "prefix": "attention to the token after earlier copies of the present one (an induction head looks there)",
    "legacy": "attention to the token before earlier copies, as the published wording has it",
    "duplicate": "attention to earlier copies of the present token",
    "previous": "attention to the token before",
    "first": "attention to the first position",
    "copying": "of what is raised among 25 random tokens, the part for the token looked at most; −1 none, 1 all",
    "copying-alone": "the same for what the head writes from each token alone, whatever it looks at",
}

TEXTS = {"random": "random repeated tokens", "text": "text"}
LISTED = 8
FEWEST = 3
"""Rows of a behaviour that no head was found for."""


def title(one: BehaviourReading) -> str:
    """A behaviour and what it was measured on."""
    return f"{TITLES[one.name]} on {TEXTS[one.data]}"


def summary(one: BehaviourReading) -> str:
    """How many heads were found, and beside what."""
    found = plural(len(one.found()), "head")
    null = one.null
    over = "more than the control " if one.heads[0].control is not None else ""
    return (
        f"{found} found: at least {plain(one.threshold)} {over}and above the null at a false discovery rate of 5 %; "
        f"null of {count(int(null['count']))} measures at other places: 95 % below {plain(null['q95'])}, "
        f"the largest {plain(null['largest'])}"
    )


def rows(r: HeadsReading, one: BehaviourReading) -> list[HeadRow]:
    """The rows to show: the first of all heads, or all of those asked for."""
    if len(r.heads) < r.count:
        return [row for row in one.heads if row.head in r.heads]
    return one.heads[: max(FEWEST, min(LISTED, len(one.found())))]


def random_text(r: HeadsReading) -> str:
    """The random tokens and the loss on them."""
    t = r.tokens
    first = "a random token first" if t["first"] is None else f"{visible(t['first'])} first"
    return (
        f"{plural(t['examples'], 'text')} of {t['period']} random tokens, {t['repeats']} times, {first}; loss "
        f"{plain(r.loss['first'])} nats on the first copy, {plain(r.loss['repeated'])} on later ones"
    )


def in_context_text(r: HeadsReading) -> str:
    """The in-context-learning score with its indices."""
    made = r.in_context
    if made is None:
        return "not measured: there is no text, or the model's context is too short"
    said = (
        f"{signed(made.mean)} nats [{signed(made.low)}, {signed(made.high)}]: loss of the same {made.tokens} tokens "
        f"after about {made.late} tokens minus after about {made.early} (500 and 50 of 512, scaled to {made.context})"
    )
    return said if made.without is None else f"{said}; {signed(made.without)} without the induction heads"


def sinks_text(r: HeadsReading) -> str:
    """How many heads look at the first position, by text."""
    parts = [
        f"{sum(share > 0.5 for share in shares.values()) / len(shares):.0%} on {TEXTS[data]}"
        for data, shares in r.looks_first.items()
    ]
    return f"heads that look most at the first position from more than half of the destinations: {', '.join(parts)}"


def ablation_text(row: AblationRow) -> str:
    """What an ablation says of its heads."""
    if row.ratio is None:
        return "random heads change nothing at all"
    return f"{row.ratio:.1f} × the mean of random heads of the same layers"
