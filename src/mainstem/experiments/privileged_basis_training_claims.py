"""What the training experiment on the privileged basis claims, and its tables and figures, from what was recorded."""

from collections.abc import Sequence
from statistics import fmean

from mainstem.analysis.intervals import Interval
from mainstem.experiments.outcome import Claim, Curves, Experiment, ExperimentTable, Figure, finding
from mainstem.experiments.privileged_basis_training_rules import (
    PLACES,
    SAME,
    TARGET,
    Excesses,
    Runs,
    above,
    excess,
    heavy,
    near,
    passing,
    reached,
    rotations_of,
    spread,
    values,
)
from mainstem.experiments.settings import Settings
from mainstem.experiments.spreads import span

PAPER = "Elhage, Lasenby, Olah, Privileged Bases, 2023"
BASELINE, SINGLE, SHARED, INDEPENDENT = (
    "adam",
    "adam, single gain",
    "adam, shared rotation",
    "adam, independent rotations",
)
SGD_SINGLE, SGD, ORTHO_SINGLE, LOW_RATE = (
    "sgd, single gain",
    "sgd",
    "ortho_adam, single gain",
    "adam, single gain, low rate",
)


RMSPROP, MUON = "rmsprop, single gain", "muon, single gain"


def assemble(settings: Settings, seeds: list[int], runs: Runs, corpus: str) -> Experiment:
    """The result."""
    claims = [tails(runs), not_the_norm(runs), shared(runs), independent(runs), losses(runs), the_optimiser(runs)]
    claims += [the_gain(runs)] if runs.has(SGD) else []
    claims += [the_rate(runs)] if runs.has(LOW_RATE) else []
    claims += [others(runs)] if runs.has(RMSPROP, MUON) else []
    return Experiment(
        name="privileged-basis-training",
        title="What makes a basis privileged: norms, rotations and optimisers",
        question="Which part of training makes coordinates of the stream heavy-tailed?",
        provenance=settings.provenance(seeds),
        model={"name": f"decoders of three blocks, width {runs.width}, trained on {corpus}"},
        claims=claims,
        tables=[table(runs)],
        figures=[bars(runs, "stream"), bars(runs, "computation"), curves(runs, seeds)],
        notes=[
            f"Arms are compared where their held-out loss first passes {TARGET} nats a token, by interpolation.",
            *missing(runs),
            *settings.notes(),
        ],
    )


def tails(runs: Runs) -> Claim:
    """Whether the baseline has a privileged basis."""
    found = runs.at_target(BASELINE, "stream")
    return Claim(
        "Trained as usual, the stream is heavy-tailed.",
        PAPER,
        "wildly non-Gaussian (a figure)",
        f"excess kurtosis {spread(found)}",
        rotations_of(found),
        finding(heavy(found)),
        {"excess": values(found)},
    )


def not_the_norm(runs: Runs) -> Claim:
    """Whether tails remain without a gain for each dimension."""
    with_gains, single = (runs.at_target(name, "stream") for name in (BASELINE, SINGLE))
    return Claim(
        "It is not LayerNorm: with RMSNorm of a single gain the tails are no lighter.",
        PAPER,
        "if anything more heavy-tailed",
        f"excess {spread(single)}; with LayerNorm {spread(with_gains)}",
        rotations_of(single),
        finding(
            heavy(single) and reached(with_gains) and fmean(values(single)) >= fmean(values(with_gains)), heavy(single)
        ),
        {"single gain": values(single), "LayerNorm": values(with_gains)},
    )


def shared(runs: Runs) -> Claim:
    """Whether a shared rotation moves the tails out of the stream and leaves the computation's."""
    stream, computation = (runs.at_target(SHARED, where) for where in PLACES)
    holds = near(stream) and heavy(computation)
    return Claim(
        "With one rotation at every read and write the stream has no tails, what is computed has them as before.",
        PAPER,
        "stream about 3; before the MLP as heavy-tailed as the baseline",
        f"excess of the stream {spread(stream)}, before the MLPs {spread(computation)}",
        f"{rotations_of(computation)}; baseline before the MLPs {spread(runs.at_target(BASELINE, 'computation'))}; by "
        "construction it computes what the baseline does, with the stream in one other basis",
        finding(holds, near(stream) or heavy(computation)),
        {"stream": values(stream), "computation": values(computation)},
    )


def independent(runs: Runs) -> Claim:
    """Whether independent rotations leave no tails at all."""
    stream, computation = (runs.at_target(INDEPENDENT, where) for where in PLACES)
    baseline = runs.at_target(BASELINE, "computation")
    return Claim(
        "With another rotation at each read and write there are no tails in either basis.",
        PAPER,
        "both about 3, small tails in early layers",
        f"excess of the stream {spread(stream)}, before the MLPs {spread(computation)}",
        f"baseline before the MLPs {spread(baseline)}",
        finding(near(stream) and near(computation) and heavy(baseline), near(stream) and above(baseline, computation)),
        {"stream": values(stream), "computation": values(computation)},
    )


def losses(runs: Runs) -> Claim:
    """Whether models with independent rotations are as good as the baseline, seed by seed."""
    ends = {name: runs.ends(name) for name in (BASELINE, SHARED, INDEPENDENT)}
    more = [own - theirs for own, theirs in zip(ends[INDEPENDENT], ends[BASELINE], strict=True)]
    width = max(ends[BASELINE]) - min(ends[BASELINE])
    holds, within = fmean(more) <= min(width, SAME), fmean(more) <= SAME  # both false if one diverged
    several = len(more) > 1
    return Claim(
        "Independently rotated models reach the loss of the baseline.",
        PAPER,
        "the same within a billion tokens",
        "at the end " + ", ".join(f"{name} {fmean(found):.3f}" for name, found in ends.items()) + " nats: with "
        f"independent rotations {span(more, '+.3f')} more than the baseline of the same seed",
        f"seeds of the baseline are {width:.3f} apart" if several else "one seed: no spread to compare with",
        finding(holds, within) if several else "measured",
        ends,
    )


def the_optimiser(runs: Runs) -> Claim:
    """The paper's open question: whether Adam's division by coordinates is the cause."""
    names = [name for name in (SINGLE, SGD_SINGLE, ORTHO_SINGLE) if runs.has(name)]
    adam, *others = (runs.at_target(name, "stream") for name in names)
    clean = [near(other) and above(adam, other) for other in others]
    words = ", ".join(f"{name} {spread(runs.at_target(name, 'stream'))}" for name in names)
    do_not = "SGD and Adam in another basis do not" if ORTHO_SINGLE in names else "SGD does not"
    return Claim(
        f"It is Adam: where only the optimiser has a basis, Adam makes tails, and {do_not}.",
        f"{PAPER}, an open question",
        "suspected, not tested",
        f"excess of the stream at the same loss: {words}",
        "SGD with a single gain commutes with every rotation",
        finding(heavy(adam) and all(clean), heavy(adam) and any(clean)),
        {name: values(runs.at_target(name, "stream")) for name in names},
    )


def the_gain(runs: Runs) -> Claim:
    """What a gain for each dimension does by itself, under an optimiser without a basis."""
    gains, single = (runs.at_target(name, "stream") for name in (SGD, SGD_SINGLE))
    return Claim(
        "Under SGD, a gain for each dimension makes tails of its own.",
        "not published; the control of the arm above",
        "not published",
        f"excess {spread(gains)} with LayerNorm",
        f"{spread(single)} with a single gain",
        "measured",
        {"LayerNorm": values(gains), "single gain": values(single)},
    )


def the_rate(runs: Runs) -> Claim:
    """Whether Adam's tails grow with its learning rate."""
    high, low = (runs.at_target(name, "stream") for name in (SINGLE, LOW_RATE))
    return Claim(
        "Adam's tails grow with the learning rate.",
        "He et al., Understanding and Minimising Outlier Features, 2024",
        "larger rates make larger tails (figures)",
        f"excess {spread(high)} at the rate of the other arms",
        f"{spread(low)} at a sixth of it",
        finding(heavy(high) and above(high, low)),
        {"high": values(high), "low": values(low)},
    )


def others(runs: Runs) -> Claim:
    """What other optimisers do: one that divides by coordinates, and one that does so outside its matrices only."""
    rmsprop, muon, sgd = (runs.at_target(name, "stream") for name in (RMSPROP, MUON, SGD_SINGLE))
    return Claim(
        "RMSProp, which divides by coordinates as Adam does, makes tails, too.",
        "Kaul et al., From Attention to Activation, 2025",
        "larger kurtosis under Adam and RMSProp than under SGD",
        f"excess {spread(rmsprop)}; Muon, with AdamW for embeddings and gains, {spread(muon)}",
        f"SGD {spread(sgd)}",
        finding(heavy(rmsprop) and above(rmsprop, sgd), above(rmsprop, sgd)),
        {name: values(runs.at_target(name, "stream")) for name in (RMSPROP, MUON, SGD_SINGLE)},
    )


def missing(runs: Runs) -> list[str]:
    """Arms that stopped early, or did not reach the loss of the comparison."""
    said = []
    for (name, width), records in runs.found.items():
        late = sum(passing(record["rows"], TARGET) is None for record in records)
        if late:
            said.append(f"{name}, width {width}: {late} of {len(records)} seeds did not reach the loss.")
        said += [f"{name}, width {width}: {record['diverged']}." for record in records if record["diverged"]]
    return said


def table(runs: Runs) -> ExperimentTable:
    """One row for each arm and width."""
    rows = []
    for (name, width), records in runs.found.items():
        at = [row for record in records if (row := passing(record["rows"], TARGET))]
        steps = round(sum(row["step"] for row in at) / len(at)) if at else ""
        columns = [interval(runs.at_target(name, where, width)) for where in PLACES]
        last = [record["rows"][-1] for record in records]
        ends = [interval([excess(row, where) for row in last]) for where in PLACES]
        loss = [row["loss"] for row in last]
        rows.append([name, width, steps, *columns, Interval(sum(loss) / len(loss), min(loss), max(loss)), *ends])
    return ExperimentTable(
        "Arms",
        "means over seeds with the least and the largest; excess kurtosis over ten rotations",
        ["arm", "width", "steps", "stream", "before MLPs", "loss at the end", "stream then", "before MLPs then"],
        rows,
    )


def interval(found: Excesses) -> Interval | str:
    """Mean, least and largest of the seeds that reached the loss."""
    known = values(found)
    return Interval(fmean(known), min(known), max(known)) if known else ""


def bars(runs: Runs, where: str) -> Figure:
    """Excess at the same loss, arm by arm."""
    shown = {
        f"{name}, {width}" if width != runs.width else name: made
        for name, width in runs.found
        if isinstance(made := interval(runs.at_target(name, where, width)), Interval)
    }
    title = {"stream": "Excess kurtosis of the stream", "computation": "Excess kurtosis before the MLPs"}[where]
    caption = f"at a held-out loss of {TARGET}: mean over seeds, the least and the largest"
    return Figure(title, list(shown), list(shown.values()), caption=caption)


def curves(runs: Runs, seeds: Sequence[int]) -> Curves:
    """Excess of the stream along the training, over the loss."""
    return Curves(
        "Excess kurtosis of the stream along the training",
        "each line one model, from its first steps on the right to its end on the left",
        "held-out loss, nats a token",
        "excess kurtosis",
        {
            f"{name}, seed {seed}": [(row["loss"], excess(row, "stream").value) for row in record["rows"]]
            for (name, width), records in runs.found.items()
            if width == runs.width
            for seed, record in zip(seeds, records, strict=True)
        },
    )
