"""A section of the basis report as plain data: dimensions taken out where matrices read them, beside controls."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mainstem.results.reading import numbers


@dataclass(frozen=True)
class DimensionRow:
    """One dimension that is taken out.

    Attributes:
        dimension: which.
        share: of the mean square of what attention reads, a mean over layers; one of d_model on average.
        change: of the loss on the control tokens when it alone is zeroed at attention's inputs; None: not measured.
    """

    dimension: int
    share: float
    change: float | None


@dataclass(frozen=True)
class AblationRow:
    """The model with the dimensions, or a control's, taken out; states go on from layer to layer.

    Attributes:
        where: "attention" (the inputs of query, key and value matrices), "everywhere" (all matrices that read the
            stream), or "nowhere" for the model as it is.
        what: "none", "zero", "mean", "mean_by_place" (first positions of windows have a mean of their own), or a
            control, zeroed: "random" dimensions, "nearest" in size, or "same_norm": random ones, of which as much is
            subtracted as the dimensions themselves have at each token.
        draws: how many draws the control has; 1 otherwise.
        tokens: how many predicted tokens.
        change: of the loss, in nats a token, on the same tokens; a mean over draws.
        low, high: its bootstrap interval over tokens; for a control the least and the largest draw.
        perplexity: exp of loss and change; ratio: exp of the change.
        kl: KL(model || this run), a mean over tokens.
        flips: the share of tokens whose likeliest prediction changed.
        output_top: the top-1 mass of the *output* softmax: the mean probability of the likeliest token.
    """

    where: str
    what: str
    draws: int
    tokens: int
    change: float
    low: float
    high: float
    perplexity: float
    ratio: float
    kl: float
    flips: float
    output_top: float


@dataclass(frozen=True)
class PatternRow:
    """The *attention* softmax, each layer by itself, with the regular values sent on to the next.

    Attributes:
        what: as in `AblationRow`.
        top: the top-1 mass, a mean over layers, heads and destinations; low, high: over draws, else `top` itself.
        first: the weight of the window's first position.
        moved: how much weight is elsewhere than in the regular pattern, from 0 to 1.
    """

    what: str
    draws: int
    top: float
    low: float
    high: float
    first: float
    moved: float


@dataclass(frozen=True)
class LayerRow:
    """One layer's top-1 mass of attention: as it is, with the dimensions zeroed, with random ones zeroed."""

    layer: str
    top: float
    zeroed: float
    random: float


@dataclass(frozen=True)
class HeadRow:
    """One head's pattern as it is and with the dimensions zeroed where its layer reads."""

    head: str
    top: float
    top_zeroed: float
    first: float
    first_zeroed: float
    moved: float


@dataclass(frozen=True)
class TokenRow:
    """One token of the text: its place, what stands before it, its loss as it is and with the dimensions zeroed."""

    place: int
    before: str
    token: str
    nats: float
    nats_zeroed: float


@dataclass(frozen=True)
class GroupRow:
    """A kind of tokens: how many, their loss, and its change with the dimensions zeroed."""

    group: str
    tokens: int
    nats: float
    change: float


@dataclass(frozen=True)
class ControlVerdict:
    """The dimensions against one control, zero against zero on the same tokens.

    Attributes:
        where: "attention" or "everywhere".
        control: "random", "nearest" or "same_norm".
        times: how many times as much they raise the perplexity as the control's mean draw; None where one of the
            two does not raise it.
        beats: whether they raise the loss more than every draw.
    """

    where: str
    control: str
    times: float | None
    beats: bool


@dataclass(frozen=True)
class AblationSection:
    """What dimensions of the stream do.

    Attributes:
        chosen_by: "given", "outliers" (the published criterion), or "variance" (the highest at attention's inputs).
        dimensions: those taken out.
        tokens, control_tokens, pattern_tokens: how many tokens dimensions, controls and patterns are measured on.
        runs: perplexities; patterns: attention's softmax; layers: the same by layer.
        heads: all heads by falling `moved`; moved_tokens: the tokens whose loss rises most; groups: kinds of tokens.
        verdicts: against each control.
        top: how many heads and tokens a table or a page shows.
    """

    chosen_by: str
    dimensions: list[DimensionRow]
    tokens: int
    control_tokens: int
    pattern_tokens: int
    runs: list[AblationRow]
    patterns: list[PatternRow]
    layers: list[LayerRow]
    heads: list[HeadRow]
    moved_tokens: list[TokenRow]
    groups: list[GroupRow]
    verdicts: list[ControlVerdict]
    top: int

    def as_dict(self) -> dict[str, Any]:
        """The section of the document."""
        return asdict(self)

    def cells(self) -> Iterator[tuple[str, str, float]]:
        """(place, quantity, value) of every number of its tables."""
        for run in self.runs:
            yield from numbers(f"{run.where} {run.what}, {run.tokens} tokens", run)
        for pattern in self.patterns:
            yield from numbers(f"attention softmax {pattern.what}", pattern)
        for row in (*self.layers, *self.heads):
            yield from numbers(row.layer if isinstance(row, LayerRow) else row.head, row)
