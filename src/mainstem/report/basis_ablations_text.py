"""Dimensions taken out, in words: what the tables for the terminal and the page both say."""

from mainstem.experiments.outcome import ExperimentTable
from mainstem.report.text import NOTHING, compact, count, plain, plural, probability, shortened, signed
from mainstem.results.basis_ablations import AblationRow, AblationSection, ControlVerdict, PatternRow, TokenRow

TITLE = "Dimensions taken out"
CHOSEN = {
    "given": "as asked",
    "outliers": "outliers by the published criterion",
    "variance": "of the highest variance at attention’s inputs",
}
WHAT = {
    "none": "as it is",
    "zero": "zero",
    "mean": "mean",
    "mean_by_place": "mean, first position apart",
    "random": "random dimensions",
    "nearest": "nearest in size",
    "same_norm": "random, same norm",
}
"""What stands in the dimensions' place, and controls, in words."""

CONTROLS = ("random", "nearest", "same_norm")

CAPTION = (
    "in what matrices read, after the norm; random dimensions and those nearest in size are zeroed, and of random ones "
    "as much is subtracted, token by token, as the dimensions have there (same norm)"
)
RUNS_CAPTION = (
    "altered states go on from layer to layer; change of the loss in nats a token on the same tokens, with its "
    "bootstrap interval, or the least and the largest draw; top-1 p is the mass of the output softmax"
)
PATTERNS_CAPTION = (
    "each layer by itself, regular values go on; top-1 is the largest weight of the attention softmax, a mean over "
    "heads and destinations but the first; first is the weight of the window’s first position; moved is how much "
    "weight is elsewhere"
)


def chosen(section: AblationSection) -> str:
    """Which dimensions, and how they were chosen."""
    named = ", ".join(str(row.dimension) for row in section.dimensions)
    return f"{named} ({CHOSEN[section.chosen_by]})"


def found(section: AblationSection) -> str:
    """The sentence that the numbers come to, at attention's inputs."""
    runs = {run.what: run for run in section.runs if run.where == "attention" and run.tokens == section.tokens}
    zero, mean = runs["zero"], runs["mean_by_place"]
    verdicts = [verdict for verdict in section.verdicts if verdict.where == "attention"]
    beaten = " / ".join(WHAT[verdict.control] for verdict in verdicts if verdict.beats)
    unbeaten = " / ".join(WHAT[verdict.control] for verdict in verdicts if not verdict.beats)
    return (
        f"zeroed at attention’s inputs: perplexity {percent(zero.ratio)}; their means there, first positions apart: "
        f"{percent(mean.ratio)}; more than every draw of: {beaten or 'no control'}"
        + (f"; not more than every draw of: {unbeaten}" if unbeaten else "")
    )


def percent(ratio: float) -> str:
    """A ratio as a change: +897%, −0.3%."""
    change = 100 * (ratio - 1)
    number = signed(change, 0 if abs(change) >= 10 else 1) if abs(change) < 1e5 else f"+{compact(change)}"
    return f"{number}%"


def tables(section: AblationSection) -> list[ExperimentTable]:
    """All tables, in their order."""
    return [
        _dimensions(section),
        _runs(section),
        _verdicts(section),
        _patterns(section),
        _heads(section),
        _groups(section),
        _tokens(section),
    ]


def _dimensions(section: AblationSection) -> ExperimentTable:
    rows = [[str(row.dimension), f"{row.share:.1%}", signed(row.change)] for row in section.dimensions]
    caption = "share of the mean square of what attention reads; change of the loss when it alone is zeroed there"
    return ExperimentTable("Dimensions", caption, ["dimension", "share", "alone"], rows)


def _runs(section: AblationSection) -> ExperimentTable:
    heads = ["where", "in their place", "draws", "tokens", "perplexity", "", "change", "from", "to", "KL", "flips"]
    rows = [_run(run) for run in section.runs]
    return ExperimentTable("Perplexity without them", RUNS_CAPTION, [*heads, "top-1 p"], rows)


def _run(run: AblationRow) -> list[str]:
    size = [count(run.draws), count(run.tokens), compact(run.perplexity)]
    top = probability(run.output_top)
    if run.what == "none":
        return [NOTHING, WHAT["none"], *size, *[NOTHING] * 6, top]
    change = [signed(number, 3) for number in (run.change, run.low, run.high)]
    numbers = [percent(run.ratio), *change, compact(run.kl), f"{run.flips:.1%}", top]
    return [run.where, WHAT[run.what], *size, *numbers]


def _verdicts(section: AblationSection) -> ExperimentTable:
    caption = (
        f"on {plural(section.control_tokens, 'token')}: how many times as much the dimensions raise the perplexity as "
        "a control does on average, and whether they raise the loss more than every draw"
    )
    rows = [_verdict(verdict) for verdict in section.verdicts]
    return ExperimentTable("Against controls", caption, ["where", "control", "times", "more than every draw"], rows)


def _verdict(verdict: ControlVerdict) -> list[str]:
    times = NOTHING if verdict.times is None else compact(verdict.times)
    return [verdict.where, WHAT[verdict.control], times, "yes" if verdict.beats else "no"]


def _patterns(section: AblationSection) -> ExperimentTable:
    heads = ["in their place", "draws", "top-1", "from", "to", "first", "moved"]
    rows = [_pattern(row) for row in section.patterns]
    return ExperimentTable("The attention softmax without them", PATTERNS_CAPTION, heads, rows)


def _pattern(row: PatternRow) -> list[str]:
    ends = [f"{end:.1%}" if row.draws > 1 else NOTHING for end in (row.low, row.high)]
    return [WHAT[row.what], count(row.draws), f"{row.top:.1%}", *ends, f"{row.first:.1%}", f"{row.moved:.1%}"]


def _heads(section: AblationSection) -> ExperimentTable:
    rows = [
        [row.head, *(f"{x:.1%}" for x in (row.moved, row.top, row.top_zeroed, row.first, row.first_zeroed))]
        for row in section.heads[: section.top]
    ]
    return ExperimentTable(
        "Heads that depend on them",
        "the most moved first; the attention softmax as it is and with the dimensions zeroed where its layer reads",
        ["head", "moved", "top-1", "zeroed", "first", "zeroed"],
        rows,
    )


def _groups(section: AblationSection) -> ExperimentTable:
    rows = [[row.group, count(row.tokens), plain(row.nats), signed(row.change)] for row in section.groups]
    caption = "loss in nats, and its change with the dimensions zeroed at attention’s inputs"
    return ExperimentTable("Kinds of tokens", caption, ["tokens", "how many", "loss", "change"], rows)


def _tokens(section: AblationSection) -> ExperimentTable:
    rows = [_token(row) for row in section.moved_tokens[: section.top]]
    caption = "those whose loss rises most with the dimensions zeroed at attention’s inputs; losses in nats"
    return ExperimentTable("Tokens that depend on them", caption, ["place", "after", "token", "loss", "zeroed"], rows)


def _token(row: TokenRow) -> list[str]:
    return [count(row.place), shortened(row.before, 28), row.token, plain(row.nats), plain(row.nats_zeroed)]
