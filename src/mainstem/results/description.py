"""The results of `anatomy` and `lens` as plain data, as `explanation` is that of `explain`.

The keys of `as_dict` are contracts (schemas `mainstem/anatomy/1` and `mainstem/lens/1`): keys may be added, never
renamed. Nothing here imports torch, so reports can be made, read and tested without a model.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from mainstem.results.reading import CheckSummary, Reading
from mainstem.results.unit import UnitReading

# --- anatomy ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormRow:
    """A norm: `kind` is "rms" or "layer"; `gain` is the least and the largest entry, None for a gain of one."""

    kind: str
    eps: float
    gain: list[float] | None
    bias: bool


@dataclass(frozen=True)
class StepRow:
    """One step of a tail: a norm, a factor, or a gate, which is a factor that the run itself computes.

    Attributes:
        kind: "norm", "factor" or "gate".
        norm: the norm.
        factor: a number; for a factor per dimension and for a gate the constant that stands beside it.
        dimensions: the least and the largest entry of a factor that each dimension has of its own.
        gate: where the run computes the factor.
    """

    kind: str
    norm: NormRow | None = None
    factor: float | None = None
    dimensions: list[float] | None = None
    gate: str | None = None


@dataclass(frozen=True)
class HeadsRow:
    """Attention behind a write; `scaling` None is 1 / sqrt(d_head). `fused`: the kernel forms the pattern itself."""

    n_heads: int
    n_key_value_heads: int
    d_head: int
    scaling: float | None
    fused: bool


@dataclass(frozen=True)
class WriteRow:
    """One addition to the stream.

    Attributes:
        unit: the sublayer or embedding that it belongs to.
        layer: its block, None for embeddings.
        module: the module that made it.
        matrix: [d_model, d_in] of the last product, None if it is no product.
        coefficient: the product of the tail's plain numbers.
        tail: what lies between the write and the stream, in order.
        bias: whether a constant is added with it.
        heads: the attention behind it.
        neurons: how many neurons it sums over.
        shared_expert: which shared expert it is.
        experts: whether it is a sum over routed experts.
        refused: for each level that cannot be had, the reason.
    """

    unit: str
    layer: int | None
    module: str
    dtype: str
    matrix: list[int] | None
    coefficient: float
    tail: list[StepRow]
    bias: bool
    heads: HeadsRow | None
    neurons: int | None
    shared_expert: int | None
    experts: bool
    refused: dict[str, str]


@dataclass(frozen=True)
class ReadRow:
    """One matrix that reads the stream.

    `after` names what the stream last received before it was read; `norm` and `factors` stand between the stream and
    the matrix; `head_norm` is the norm of queries or keys, head by head.
    """

    unit: str
    layer: int | None
    roles: list[str]
    module: str
    matrix: list[int]
    bias: bool
    after: str | None
    norm: NormRow | None
    factors: list[StepRow]
    head_norm: NormRow | None
    dtype: str


@dataclass(frozen=True)
class BlockRow:
    """One block in the order of execution: its module, which call of it, and its sublayers."""

    layer: int
    module: str
    call: int
    sublayers: list[str]
    after: str | None


@dataclass(frozen=True)
class StreamRow:
    """What happens to the stream itself, other than a plain addition, when `unit` writes."""

    unit: str
    step: StepRow


@dataclass(frozen=True)
class FinalRow:
    """From the stream to the logits; `opaque` says why they are no linear function of the normed stream."""

    norm: NormRow | None
    before: list[int] | None
    unembedding: list[int]
    bias: bool
    scale: float
    softcap: float | None
    opaque: str | None


@dataclass(frozen=True)
class RefusalRow:
    """A sublayer that cannot be split to a level, and why."""

    unit: str
    reason: str


@dataclass(frozen=True)
class LevelRow:
    """A level of decomposition: its units, and what was refused.

    `units` counts for subvalues those of one source position, and for neurons those of all experts, chosen or not.
    """

    level: str
    units: int
    per_source: bool
    refused: list[RefusalRow]


@dataclass(frozen=True)
class ShapeRow:
    """One tensor of a real run.

    Attributes:
        layer: the block, None before and after the blocks.
        unit: the sublayer.
        tensor: what it is: "stream", "q", "pattern", "W_O", ...
        how: how it is made from what is above it.
        axes: the names of its axes.
        shape: their sizes.
        matrix: whether it is a matrix of weights, not an activation.
        module: the module that it was seen at, where there is one.
    """

    layer: int | None
    unit: str | None
    tensor: str
    how: str
    axes: list[str]
    shape: list[int]
    matrix: bool
    module: str | None = None


@dataclass(frozen=True)
class AnatomyDescription(Reading):
    """The structure of one model's stream; a size is None where there is no such thing, a list where layers differ."""

    SCHEMA: ClassVar = "mainstem/anatomy/1"
    COMMAND: ClassVar = "anatomy"

    sizes: dict[str, Any]
    tied: bool
    causal: bool
    positions: str
    blocks: list[BlockRow]
    writes: list[WriteRow]
    reads: list[ReadRow]
    stream: list[StreamRow]
    final: FinalRow
    levels: list[LevelRow]
    labels: CheckSummary
    prompt: dict[str, Any] | None = None
    shapes: list[ShapeRow] | None = None
    notes: list[str] = field(default_factory=list)


# --- lens -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedToken:
    """A token and its id."""

    token: str
    id: int


@dataclass(frozen=True)
class LikelyToken:
    """One of the likeliest tokens of a state."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True)
class CourseRow:
    """A chosen token at one state.

    `before_softmax` is its value under the frozen norm, where contributions add up; `logit`, `log_probability`,
    `probability` and `rank` (from 1) are under the norm convention of the reading.
    """

    token: str
    id: int
    before_softmax: float | None
    logit: float
    log_probability: float
    rank: int
    probability: float = 0.0


@dataclass(frozen=True)
class StateRow:
    """The stream after `unit` wrote: the entropy of its lens in nats, the likeliest tokens, the chosen ones."""

    unit: str
    entropy: float
    top: list[LikelyToken]
    course: list[CourseRow]


@dataclass(frozen=True)
class LensCertificate:
    """The sum certificate, and the largest difference of the last state's log-probabilities from the model's own."""

    relative_error: float
    tolerance: float
    holds: bool
    parts: int
    last_state: float


@dataclass(frozen=True)
class LensReading(Reading):
    """The logit lens at one destination, after every addition to the stream."""

    SCHEMA: ClassVar = "mainstem/lens/1"
    COMMAND: ClassVar = "lens"

    prompt: dict[str, Any]
    position: int
    norm: str
    tokens: list[NamedToken]
    certificate: LensCertificate
    states: list[StateRow]
    notes: list[str] = field(default_factory=list)
    units: list[UnitReading] = field(default_factory=list)
