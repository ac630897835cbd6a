"""Warnings: things about a result that its reader should know, each a code, one sentence, and the number behind it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mainstem.analysis.attribution import Attribution, Scored
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.lens import Lens
from mainstem.analysis.unit_tokens import LEVEL, centred_logits, spread

SINK_SHARE = 0.5
CANCELLATION = 0.5
ONE_DIMENSION = 0.5
OUTLIER = 10.0
"""How many times the share of an ordinary direction one shared direction has when it is worth a warning."""
OVERSTATED = 10.0
"""How many times as much as a constant zero must raise the loss for a warning."""
EARLY = 3
EARLY_LAYERS = 1 / 3
"""The part of the layers whose units are compared with random directions."""


FEWEST = 5
"""From so many prompts on an interval over them is worth reading."""


@dataclass(frozen=True)
class Warning:
    """`code` for programs, `text` for people, `value` the number behind it."""

    code: str
    text: str
    value: float

    def as_dict(self) -> dict[str, Any]:
        """As it stands in a JSON document."""
        return asdict(self)


def sink_warnings(decomposition: Decomposition, values: Sequence[Scored], begins_with_bos: bool) -> list[Warning]:
    """Attention that goes to the first position: a sink, whose subvalues act as a bias; and what became the sink."""
    heads = [run for run in decomposition.moment.attention.values() if run.pattern.shape[1] > 1]
    if not heads or decomposition.position == 0:
        return []
    first = torch.cat([run.pattern[:, 0] for run in heads])
    share, mean = float((first > SINK_SHARE).double().mean()), float(first.mean())
    found = []
    if share > 0.2:
        shown = sum(1 for part in values if part.unit.source == 0)
        found.append(
            Warning(
                "sink",
                f"{share:.0%} of the heads give more than half of their attention to the first position; "
                f"its subvalues act as a bias ({shown} of those listed).",
                round(share, 4),
            )
        )
    if not begins_with_bos and mean > 0.2:
        found.append(
            Warning(
                "first-token",
                f"no beginning-of-sequence token was added, so the first word is the attention sink "
                f"(mean weight {mean:.2f}); what it means may be lost.",
                round(mean, 4),
            )
        )
    return found


def sink_heads_warning(looks_first: Sequence[float]) -> list[Warning]:
    """Heads that look at the first position whatever the text is, given the part of destinations at which each does."""
    share = sum(part > SINK_SHARE for part in looks_first) / max(len(looks_first), 1)
    if share <= 0.2:
        return []
    return [
        Warning(
            "sink",
            f"{share:.0%} of the heads look most at the first position from more than half of the destinations; scores "
            "and ranks with that attention left out stand beside the others.",
            round(share, 4),
        )
    ]


def tied_warning(decomposition: Decomposition) -> list[Warning]:
    """Tied embeddings: a token's own embedding reads as that token."""
    if not decomposition.moment.anatomy.tied:
        return []
    return [
        Warning(
            "tied",
            "embedding and unembedding are the same matrix, so the embedding and early layers score high for their "
            "own token.",
            1.0,
        )
    ]


def cancel_warning(attribution: Attribution) -> list[Warning]:
    """Positive and negative parts that cancel: single parts say little about the sum."""
    positives, net = attribution.positives, attribution.net
    if positives <= 0 or net / positives > CANCELLATION:
        return []
    return [
        Warning(
            "cancel",
            f"positive parts sum to {positives:.1f} but all parts to {net:.1f}: most of what is written cancels.",
            round(net / positives, 4),
        )
    ]


def lens_warning(lens: Lens) -> list[Warning]:
    """Early states are near uniform under the frozen norm, or peaked under a recomputed one."""
    if len(lens.units) <= EARLY:
        return []
    entropy = lens.entropy()[:EARLY].double()
    uniform = float(torch.log(torch.tensor(float(lens.logits.shape[-1]))))
    relative = float(entropy.mean()) / uniform
    if lens.norm == "frozen" and relative > 0.95:
        text = f"under the frozen norm early states are near uniform ({relative:.0%} of the largest entropy)."
    elif lens.norm == "recompute" and relative < 0.3:
        text = f"under a recomputed norm early states are peaked: {relative:.0%} of the largest entropy."
    else:
        return []
    return [Warning("early-lens", text, round(relative, 4))]


def null_warning(decomposition: Decomposition, values: Sequence[Scored], seed: int = 0) -> list[Warning]:
    """Listed units of the early layers whose tokens are no larger than those of random directions of their norm."""
    anatomy = decomposition.moment.anatomy
    early = [v for v in values if v.unit.layer is not None and v.unit.layer < EARLY_LAYERS * anatomy.sizes.n_layers]
    if not early or anatomy.readout.opaque is not None:
        return []
    vectors = torch.stack([value.vector() for value in early])
    largest = centred_logits(decomposition, vectors).abs().amax(-1).tolist()
    null, sizes = spread(decomposition, seed=seed), vectors.norm(dim=-1).tolist()
    within = sum(logit <= null.threshold(size) for logit, size in zip(largest, sizes, strict=True))
    if not within:
        return []
    return [
        Warning(
            "null",
            f"of the {len(early)} listed units of the first third of the layers, {within} promote and suppress no "
            f"token more than {LEVEL:.0%} of random directions of their norm do (`mainstem lens --unit` shows them).",
            round(within / len(early), 4),
        )
    ]


def unchanged_warning() -> list[Warning]:
    """Edits that did not move a single log-probability of what was written."""
    return [
        Warning(
            "unchanged",
            "the edits changed nothing at all: every written token has the same probability, to the bit; what is "
            "edited may be nothing there, or no run had the positions.",
            0.0,
        )
    ]


def missed_warning(edit: str, places: Sequence[int]) -> list[Warning]:
    """An edit that names positions that no run had."""
    if not places:
        return []
    where = f"position{'s' if len(places) > 1 else ''} {', '.join(map(str, places))}"
    return [Warning("missed", f"the edit `{edit}` changed nothing at {where}: no run was that long.", float(places[0]))]


def window_warning(text: str, layers: int) -> list[Warning]:
    """Windows of layers overlap."""
    return [Warning("window", text, float(layers))]


def not_clean_warning(weak: int, pairs: int) -> list[Warning]:
    """Pairs whose clean prompt has no more of the answer than the corrupted one."""
    if not weak:
        return []
    return [
        Warning(
            "not-clean",
            f"the metric is no higher on the clean prompt than on the corrupted one in {weak} of {pairs} pairs: "
            "effects are in units of a difference that is not the one meant.",
            float(weak),
        )
    ]


def few_prompts_warning(prompts: int) -> list[Warning]:
    """Intervals over a handful of prompts: what is resampled is hardly more than the prompts themselves."""
    if not 1 < prompts < FEWEST:
        return []
    return [
        Warning(
            "few-prompts",
            f"intervals are bootstrapped over {prompts} prompts: with fewer than {FEWEST} they say next to nothing "
            "about others.",
            float(prompts),
        )
    ]


def chat_warning(has_template: bool, used: bool) -> list[Warning]:
    """An instruction-tuned model given a raw prompt."""
    if not has_template or used:
        return []
    return [
        Warning(
            "chat",
            "this model has a chat template and was given raw text; use --chat to ask as it was trained to be asked.",
            1.0,
        )
    ]


def head_sink_warning(share: float) -> list[Warning]:
    """A head that mostly looks at the first position, whatever its circuits between tokens say."""
    if share <= SINK_SHARE:
        return []
    text = (
        f"on a real text this head gives {share:.0%} of its attention to the first position: what its tables say of "
        "other sources is seldom acted upon."
    )
    return [Warning("sink", text, round(share, 4))]


def one_dimension_warning(what: str, share: float) -> list[Warning]:
    """A table that is mostly a product of one number per row and one per column."""
    if share <= ONE_DIMENSION:
        return []
    text = (
        f"{share:.0%} of the square of the {what} circuit is in one direction: its strongest entries are those of the "
        "tokens that are largest there."
    )
    return [Warning("one-dimension", text, round(share, 4))]


def tied_tables_warning(tied: bool) -> list[Warning]:
    """Tied embeddings: a head that passes on anything looks like one that copies."""
    if not tied:
        return []
    text = (
        "embedding and unembedding are the same matrix, so every head that passes on what it reads scores as copying."
    )
    return [Warning("tied", text, 1.0)]


def shared_direction_warning(kind: str, weight: float, dimension: int, entry: float) -> list[Warning]:
    """A direction of the stream with much more than its share of what is read and written, in compositions of a kind.

    Args:
        kind: of composition.
        weight: how many times the share of a direction like any other it has.
        dimension: the dimension of the stream that it leans on most.
        entry: its entry there.
    """
    if weight <= OUTLIER:
        return []
    text = (
        f"{kind}-composition: one direction, which leans on dimension {dimension} (entry {entry:.2f}), has "
        f"{weight:.0f} times its share of what is read and written; compare the numbers without it."
    )
    return [Warning("one-dimension", text, round(weight, 2))]


def zero_warning(zeroed: float, constant: float) -> list[Warning]:
    """Zero as an ablation that breaks what a constant leaves whole (Sun et al. 2024).

    Args:
        zeroed: how much zeroing raises the loss, in nats.
        constant: how much the mean in the same place does.
    """
    if zeroed <= OVERSTATED * max(constant, 0.0):
        return []
    text = (
        f"zeroing raises the loss by {zeroed:.2f} nats, the mean in the same place by {constant:.2f}: the model needs "
        "that these dimensions are large more than what varies in them."
    )
    return [Warning("zero-ablation", text, round(zeroed, 4))]


def size_warning(zeroed: float, control: float) -> list[Warning]:
    """Dimensions that do no more than their size does elsewhere.

    Args:
        zeroed: how much zeroing them raises the loss, in nats.
        control: the same for the worst draw of random dimensions of which as much is subtracted.
    """
    if zeroed > control:
        return []
    text = (
        f"subtracting as much from random dimensions raises the loss by up to {control:.2f} nats, zeroing these by "
        f"{zeroed:.2f}: how large they are may count, and not which they are."
    )
    return [Warning("size-alone", text, round(control, 4))]


def overflow_warning(dtype: str, unit: str, largest: float) -> list[Warning]:
    """A stream that leaves the range of a dtype, and who wrote what it cannot hold."""
    text = f"in {dtype} the stream overflows with what {unit} writes: a coordinate becomes {largest:.3g}."
    return [Warning("overflow", text, largest)]
