"""A command on many prompts in words: what its tables for the terminal and its page both say."""

from mainstem.report.text import NOTHING, compact, count, halves_text, plural, shortened, visible, visible_or
from mainstem.results.prompt_set import Mean, MeanRow, PromptRow, PromptSetReading

TITLES = {
    "explain": "Who writes the answers, on average",
    "lens": "How the answers rise along the stream, on average",
    "steer": "What the edits do to the answers, on average",
}
MOST_ROWS = 200


def quantities(rows: list[MeanRow]) -> list[str]:
    """The names of the rows' quantities, in order."""
    return list(dict.fromkeys(name for row in rows for name in row.means))


def quantity_text(name: str) -> str:
    """A quantity's name as a heading."""
    return name.replace("_", " ")


def interval_text(mean: Mean | None) -> str:
    """The ends of an interval; a dash where there is none."""
    if mean is None or mean.low is None or mean.high is None:
        return NOTHING
    return f"{compact(mean.low)} … {compact(mean.high)}"


def mean_text(mean: Mean | None) -> str:
    """The mean alone."""
    return NOTHING if mean is None else compact(mean.mean)


def counted_text(r: PromptSetReading) -> str:
    """How many prompts the means are over, and how many have a certificate that does not hold."""
    said = plural(r.counted, "prompt")
    if r.failed:
        said += f" of {len(r.prompts)}; a certificate does not hold on {len(r.failed)}"
    return said


def options_text(r: PromptSetReading) -> str:
    """What was asked of each prompt."""
    return "; ".join(f"{name} {_value(value)}" for name, value in r.options.items())


def _value(value: object) -> str:
    return visible_or(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def listed_text(row: MeanRow, r: PromptSetReading) -> str:
    """On how many prompts a unit is in the top k."""
    return "" if row.listed is None else f"{row.listed} of {r.counted}"


def sources_text(row: MeanRow) -> str:
    """The source positions that a head's subvalues were listed with."""
    return shortened(", ".join(map(str, row.sources or ())), 24)


def elsewhere_text(r: PromptSetReading) -> str:
    """What can be said of units that are not in the table."""
    if r.elsewhere is None:
        return ""
    side = "below" if r.options.get("negative") else "above"
    return (
        f"no unit that is missing here has a mean {side} {compact(r.elsewhere)}: rows beyond it are in their true place"
    )


def stability_text(r: PromptSetReading) -> str:
    """How far other prompts would give the same picture."""
    return halves_text(r.stability, "prompts", "rows")


def verdicts_text(r: PromptSetReading) -> str:
    """How many prompts have each verdict."""
    return "; ".join(f"{verdict}: {count} of {r.counted}" for verdict, count in r.verdicts.items())


def answers_text(row: PromptRow) -> str:
    """Right answers, and wrong ones behind them."""
    right, wrong = (" ".join(visible(token) for token in side[:6]) for side in (row.answers, row.wrong_answers))
    return right + (f" against {wrong}" if wrong else "")


def own_text(row: PromptRow) -> str:
    """A prompt's own numbers in a line."""
    if row.failed is not None:
        return f"✗ {row.failed}"
    numbers = [f"{quantity_text(name)} {_number(value)}" for name, value in row.found.items() if _is_number(value)]
    numbers += [
        f"{name} {compact(both['plain'])} → {compact(both['edited'])}"
        for name, both in row.found.get("probabilities", {}).items()
    ]
    verdict = row.found.get("verdict")
    return visible_or("; ".join([*numbers, *([verdict] if verdict else [])]))


def _number(value: float) -> str:
    return count(value) if isinstance(value, int) else compact(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
