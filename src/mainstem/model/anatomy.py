"""What an anatomy is: the writes, reads, blocks and readout of one model, as immutable data.

`discover` (in `mainstem.model.discovery`) makes one from a single recorded forward pass; runs, decompositions and
certificates only read it. Weights in it are the model's own tensors, never copies, and nothing is folded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mainstem.errors import LevelRefusedError
from mainstem.model.activation import Activation
from mainstem.model.graph import StreamGraph
from mainstem.model.hooks import Site
from mainstem.model.layouts import PositionAxis
from mainstem.model.norms import Norm
from mainstem.model.program import Program
from mainstem.units import Unit


@dataclass(frozen=True, eq=False)
class Projection:
    """A product of matrices [out, in] and per-row factors [out], applied first to last: how something is carried."""

    factors: tuple[Tensor, ...]

    def __call__(self, z: Tensor) -> Tensor:
        """[..., in] -> [..., out], in z's dtype."""
        for factor in self.factors:
            z = z @ factor.to(z).T if factor.dim() == 2 else z * factor.to(z)
        return z

    def columns(self, index: Tensor | slice) -> Tensor:
        """[out, chosen]: what single input channels write."""
        first, *rest = self.factors
        assert first.dim() == 2
        columns = first[:, index]
        for factor in rest:
            columns = factor.to(columns) @ columns if factor.dim() == 2 else columns * factor.to(columns)[:, None]
        return columns

    @property
    def n_in(self) -> int:
        """The number of input channels."""
        return self.factors[0].shape[1]


@dataclass(frozen=True, eq=False)
class PreStep:
    """What happens elementwise between attention's result and what W_O reads, in the channels of W_O's input.

    One of: `factor`, a constant [width]; a gate, the run's value at `gate_site` whose positions are on `gate_axis` and
    whose entries are read at `columns` [width]; an RMS norm (`eps`, `factor` as its gain) over the channels that share
    a number in `groups` [width].
    """

    factor: Tensor | None = None
    gate_site: Site | None = None
    gate_axis: PositionAxis | None = None
    columns: Tensor | None = None
    groups: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, eq=False)
class AttentionCore:
    """The product of a pattern with values, and how it reaches W_O.

    Attributes:
        site: the call; its arguments are seen there.
        fused: whether the call computes the pattern itself (scaled dot-product attention) from query and key.
        slots: which argument is "query", "key", "value", "mask", or "pattern" and "value".
        layouts: einops patterns of those arguments' axes.
        channels: [n_heads, d_head] where each coordinate of each head is in W_O's input.
        n_keys, n_key_value_heads: how many distinct heads the keys and the values have; where an argument has more,
            neighbours are copies.
        value_groups: how many neighbouring heads of the values were copies of one in the recorded run.
        scaling: the fused call's scale; None for 1 / sqrt(d_head of the keys).
        overwritten: the arguments that the model changes in place later, by their names among `slots`.
    """

    site: Site
    fused: bool
    slots: dict[str, int]
    layouts: dict[str, str]
    sizes: dict[str, int]
    channels: Tensor
    n_key_value_heads: int
    n_keys: int
    value_groups: int
    causal: bool
    scaling: float | None
    steps: tuple[PreStep, ...]
    overwritten: frozenset[str] = frozenset()

    @property
    def n_heads(self) -> int:
        """The number of query heads."""
        return self.channels.shape[0]

    @property
    def result_site(self) -> Site:
        """Where the result of the call can be seen."""
        return replace(self.site, where="result", slot=0)

    def argument_site(self, name: str) -> Site:
        """Where one of its arguments, by its name among `slots`, can be seen."""
        return replace(self.site, slot=self.slots[name], overwritten=name in self.overwritten)


@dataclass(frozen=True)
class ExpertSite:
    """A module call to record locally, and the value in it that is a sum over experts.

    The value is output `slot` of the call, or, with slot None, the result of `function` number `ordinal` inside it.
    """

    path: str
    call: int
    slot: int | None
    function: str = ""
    ordinal: int = 0


@dataclass(frozen=True, eq=False)
class Write:
    """One addition to the stream.

    Attributes:
        unit: the sublayer or embedding that it belongs to.
        site: where its value can be seen, [batch, positions, d_model] in any arrangement.
        module: the module that made it.
        source: site of what its last matrix product reads, or None if it is no product.
        input_site: where that product alone receives it.
        projection: the matrices from there to the write.
        bias: the constant part of the write, [d_model] or None.
        attention: the attention behind `source`, if that is what it is.
        neurons: whether `source` holds neurons' activations.
        experts: what to record locally where the write is a sum over experts, chosen token by token.
        activation: how the neurons come from what reads the stream.
        n_experts: how many experts that sum chooses from; 0 where it is none.
        expert_width: how many neurons each of them has.
        refusals: for each level that cannot be had, the reason.
    """

    unit: Unit
    site: Site
    module: str
    dtype: torch.dtype
    source: Site | None = None
    input_site: Site | None = None
    projection: Projection | None = None
    bias: Tensor | None = None
    attention: AttentionCore | None = None
    neurons: bool = False
    shared_expert: int | None = None
    first_neuron: int = 0
    experts: ExpertSite | None = None
    activation: Activation | None = None
    n_experts: int = 0
    expert_width: int = 0
    refusals: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Read:
    """One matrix that reads the stream.

    `node` of the stream graph is what it reads, after its norm; `roles` say what for (query, key, value, gate, up,
    router, output_gate, input); `input_site` is where this product alone receives it, `site` where the result can be
    seen, and `norm` the norm it is read through.
    `head_norm` is the norm of queries or keys between the matrix and attention, over as many of its rows as its gain
    has entries in the last axis; a gain of two axes is each head's own. `axis` is where the result has its positions,
    if not in front.
    """

    unit: Unit
    roles: tuple[str, ...]
    node: int
    stream_node: int
    norm: Norm | None
    weight: Tensor
    bias: Tensor | None
    module: str
    site: Site
    dtype: torch.dtype
    input_site: Site
    head_norm: Norm | None = None
    axis: PositionAxis | None = None


@dataclass(frozen=True, eq=False)
class ExpertRead:
    """What the experts of a sublayer read, in the module call that `site` records.

    `node` of the stream graph is what they read, after its `norm`, and `stream_node` the stream before it.
    `received` is where a module call receives it that the experts are in, and nothing of another sublayer, or None if
    there is no such call; the reads numbered in `beside`, such as the router's, read in that call what is made of the
    same value.
    """

    unit: Unit
    site: ExpertSite
    node: int
    stream_node: int
    norm: Norm | None = None
    received: Site | None = None
    beside: tuple[int, ...] = ()

    @property
    def input_site(self) -> Site:
        """Where the experts alone, with what reads beside them, receive it.

        Raises:
            LevelRefusedError: if that is not seen.
        """
        if self.received is None:
            raise LevelRefusedError(
                f"No input of {self.unit}", None, "no module call receives what its experts alone read"
            )
        return self.received


@dataclass(frozen=True, eq=False)
class Block:
    """One block in the order of execution: its module, which call of it, and the stream value that enters."""

    layer: int
    path: str
    call: int
    writes: tuple[int, ...]
    input_node: int
    input_site: Site


@dataclass(frozen=True, eq=False)
class Readout:
    """From the stream to the logits: norm, unembedding [d_vocab, d_model], bias, scale and softcap.

    u = scale * W_U norm(x) + bias; the logits are u, or cap * tanh(u / cap) with a softcap. Where the path is not of
    that form `opaque` says why, and `program` maps stream values of `program_shape` to logits.
    """

    norm: Norm | None
    unembedding: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    input_site: Site
    stream_site: Site
    recorded_positions: int
    before: Projection | None = None
    opaque: str | None = None
    program: Program | None = None
    program_shape: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Sizes:
    """Sizes by the field's names; None where the model has no such thing, a tuple where layers differ."""

    n_layers: int
    d_model: int
    d_vocab: int
    n_heads: int | tuple[int, ...] | None
    n_key_value_heads: int | tuple[int, ...] | None
    d_head: int | tuple[int, ...] | None
    d_mlp: int | tuple[int, ...] | None
    n_experts: int | None = None


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The structure of one model's residual stream."""

    writes: tuple[Write, ...]
    reads: tuple[Read, ...]
    blocks: tuple[Block, ...]
    graph: StreamGraph
    write_nodes: tuple[int, ...]
    spine: tuple[int, ...]
    spine_sites: tuple[Site, ...]
    owners: tuple[Unit | None, ...]
    readout: Readout
    sizes: Sizes
    tied: bool
    causal: bool
    positions: str
    dtype: torch.dtype
    notes: tuple[str, ...] = ()
    expert_reads: tuple[ExpertRead, ...] = ()

    def sublayers(self) -> list[Unit]:
        """Embeddings and sublayers in the order in which they write."""
        return list(dict.fromkeys(write.unit for write in self.writes))

    def writes_of(self, unit: Unit) -> list[int]:
        """The writes that belong to a sublayer."""
        return [i for i, write in enumerate(self.writes) if write.unit == unit]

    def readings(self, unit: Unit) -> list[Read | ExpertRead]:
        """By what a sublayer reads the stream, each once: its experts, and the matrices that do not read beside them.

        Raises:
            LevelRefusedError: if it has experts, and what they read was not found.
        """
        experts = {read.site: read for read in self.expert_reads if read.unit == unit}
        if any(self.writes[i].experts not in {None, *experts} for i in self.writes_of(unit)):
            raise LevelRefusedError(f"No input of {unit}", None, "what its experts read of the stream was not found")
        beside = {i for read in experts.values() for i in read.beside}
        once = {read.input_site: read for read in experts.values()}
        return [*once.values(), *(read for i, read in enumerate(self.reads) if read.unit == unit and i not in beside)]

    def refusals(self, level: str) -> dict[Unit, str]:
        """The sublayers that cannot be split to `level`, each with the reason."""
        return {w.unit: w.refusals[level] for w in self.writes if level in w.refusals}


def merged(values: Sequence[Any]) -> Any:
    """One value if all are equal, the tuple otherwise, None for none: sizes that may differ between layers."""
    distinct = list(dict.fromkeys(values))
    return None if not distinct else distinct[0] if len(distinct) == 1 else tuple(values)
