"""A section of the basis report as plain data: what quantisers do to the model's linear layers and to its predictions.

A quantiser is named as `mainstem.analysis.quantizers.QUANTISERS` names it, a basis by what was done to the model
before: "as it is", or such as "rotated".
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mainstem.results.reading import numbers

FULL = "full precision"


@dataclass(frozen=True)
class QuantiserRow:
    """One run of one text, against the model as it is in full precision.

    Attributes:
        text: the name of the text; basis: of the model that ran; quantiser: its name, or "full precision".
        tokens: how many were predicted.
        perplexity: exp of the mean loss.
        change: of the loss, nats a token; low, high: its paired bootstrap interval of 95 %.
        kl: the mean KL(full precision || this run), nats a token; kl_low, kl_high: its interval.
        flips: the share of tokens whose likeliest prediction is another.
    """

    text: str
    basis: str
    quantiser: str
    tokens: int
    perplexity: float
    change: float
    low: float
    high: float
    kl: float
    kl_low: float
    kl_high: float
    flips: float


@dataclass(frozen=True)
class CloserRow:
    """Two runs of one text compared token by token: KL to full precision of the first less that of the second.

    Attributes:
        first, second: such as "llm.int8" and "vector-wise", or "llm.int8, rotated" and "llm.int8".
        difference: nats a token, negative where the first is closer; low, high: its bootstrap interval of 95 %.
    """

    text: str
    first: str
    second: str
    difference: float
    low: float
    high: float

    @property
    def closer(self) -> str | None:
        """Which of the two is closer to full precision; None where the interval holds zero."""
        return self.first if self.high < 0 else self.second if self.low > 0 else None


@dataclass(frozen=True)
class LayerErrorRow:
    """One linear layer under one quantiser, on the inputs that it gets in full precision.

    Attributes:
        layer: its sublayer and what it is for, such as "L5.mlp up".
        relative_error: ||quantised - full|| / ||full|| of its product.
        kept: the share of its input dimensions that stay in the float dtype.
    """

    basis: str
    quantiser: str
    layer: str
    relative_error: float
    kept: float

    @property
    def role(self) -> str:
        """What the layer is for, without the number of its block."""
        sublayer, _, role = self.layer.partition(" ")
        return f"{sublayer.rpartition('.')[2]} {role}"


@dataclass(frozen=True)
class QuantiserSection:
    """What quantisers do.

    Attributes:
        texts: what was predicted: `name`, `source`, `tokens`, `window`, `stride`, `windows` of each.
        quantisers: of each its `name`, `weights`, `inputs`, `threshold` and `smoothing`.
        rows: every run; closer: pairs of runs; layers: every layer's error, on the first window of the first text.
        layer_tokens: how many tokens these are.
        parameters: how many numbers the quantised matrices hold, out of `matrices`, all that are no embedding.
        left: the matrices that were left in the float dtype, embeddings and unembedding aside.
    """

    texts: list[dict[str, Any]]
    quantisers: list[dict[str, Any]]
    rows: list[QuantiserRow]
    closer: list[CloserRow]
    layers: list[LayerErrorRow]
    layer_tokens: int
    parameters: int
    matrices: int
    left: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The section of the document."""
        made = asdict(self)
        made["closer"] = [asdict(row) | {"closer": row.closer} for row in self.closer]
        return made

    def cells(self) -> Iterator[tuple[str, str, float]]:
        """(place, quantity, value) of every number of its tables."""
        for row in self.rows:
            yield from numbers(f"{named(row.quantiser, row.basis)} on {row.text}", row)
        for pair in self.closer:
            yield from numbers(f"{pair.first} against {pair.second} on {pair.text}", pair)
        for layer in self.layers:
            yield from numbers(f"{layer.layer} under {named(layer.quantiser, layer.basis)}", layer)


AS_IT_IS = "as it is"


def named(quantiser: str, basis: str) -> str:
    """A quantiser with the basis in which it was used."""
    return quantiser if basis == AS_IT_IS else f"{quantiser}, {basis}"
