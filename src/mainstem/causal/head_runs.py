"""All heads of one run: what they look at and what they copy, measured while the model runs.

A pattern is computed from what attention received, one head at a time, and dropped when it was measured: memory holds
one pattern of positions x positions, however many heads there are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.attending import Probe, copied_share, looks_first
from mainstem.analysis.readout import expected_rows, token_direction, token_rows
from mainstem.causal.changes import Pass, copied_by_token
from mainstem.causal.head_changes import received
from mainstem.causal.recorded import logits_of
from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Anatomy, AttentionCore, Write
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.run.inputs import Inputs
from mainstem.units import Unit


@dataclass(eq=False)
class HeadRun:
    """What was measured of one run.

    Attributes:
        measures: by probe, for each head its measures.
        sinks: by probe, for each head its attention to the first position over the same destinations.
        looks_first: for each head the part of destinations that look most at the first position.
        copying: for each head its copying score and that of other tokens, where it was asked for.
        copying_alone: the same for what the head would write if it looked at the attended token alone; not where
            something comes between attention's result and the output matrix.
        losses: [pos - 1] minus the log-probability of each token but the first.
    """

    measures: dict[str, dict[Unit, Float[Tensor, " measure"]]]
    sinks: dict[str, dict[Unit, float]]
    looks_first: dict[Unit, float] = field(default_factory=dict)
    copying: dict[Unit, Float[Tensor, " measure"]] = field(default_factory=dict)
    copying_alone: dict[Unit, Float[Tensor, " measure"]] = field(default_factory=dict)
    losses: Float[Tensor, " token"] = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True, eq=False)
class _Looked:
    """What a head looks at most, as places among the copied positions, and its values there if its output is theirs."""

    attended: Int[Tensor, " pos"]
    values: Float[Tensor, "pos d_value"] | None


def heads_of(anatomy: Anatomy) -> list[Unit]:
    """All heads that can be told apart.

    Raises:
        LevelRefusedError: if there are none, with the reason, or if attention is not causal.
    """
    if not anatomy.causal:
        raise LevelRefusedError(
            "No behaviours of heads", reason="attention is not causal, so no token is predicted from those before it"
        )
    found = [unit for core, owner in _cores(anatomy) for unit in _units(core, owner)]
    if not found:
        reasons = set(anatomy.refusals("heads").values())
        reason = reasons.pop() if len(reasons) == 1 else "the model has no attention that can be taken apart"
        raise LevelRefusedError("No behaviours of heads", reason=reason, remedy="`mainstem anatomy` says what it has.")
    return found


@torch.no_grad()
def head_run(
    model: torch.nn.Module,
    anatomy: Anatomy,
    inputs: Inputs,
    probes: dict[str, Probe],
    copied: Sequence[int] = (),
) -> HeadRun:
    """Runs the model on one prompt and measures every head.

    Args:
        model: the module; it is left as it was.
        anatomy: its anatomy.
        inputs: of one prompt.
        probes: what to measure of patterns.
        copied: positions of different tokens, without repeats, to measure copying on; none for no copying.
    """
    ids = inputs.ids[0]
    now = Pass(1, len(ids))
    out = HeadRun({name: {} for name in probes}, {name: {} for name in probes})
    places = torch.tensor(list(copied), dtype=torch.long)
    looked: dict[Unit, _Looked] = {}
    taps: list[tuple[Site, Tap]] = []
    for core, owner in _cores(anatomy):
        taps.append((core.site, _measuring(core, owner, probes, places, out, looked, now)))
    if len(places):
        directions = _directions(anatomy, ids[places.to(ids.device)])
        for site, writes in _outputs(anatomy).items():
            taps.append((site, _copying(writes, places, directions, out, looked, now)))
    with tapped(model, taps):
        logits = logits_of(model(input_ids=inputs.ids, **inputs.forward))[0]
    out.losses = losses(logits, ids)
    return out


def losses(logits: Float[Tensor, "pos d_vocab"], ids: Int[Tensor, " pos"]) -> Float[Tensor, " token"]:
    """Minus the log-probability of each token but the first, in nats."""
    return -logits[:-1].float().log_softmax(-1).gather(1, ids[1:, None].to(logits.device))[:, 0].double().cpu()


def _cores(anatomy: Anatomy) -> Iterator[tuple[AttentionCore, Unit]]:
    """Each attention once, with the first write behind it."""
    seen: set[Site] = set()
    for write in anatomy.writes:
        if write.attention is not None and write.attention.site not in seen:
            seen.add(write.attention.site)
            yield write.attention, write.unit


def _units(core: AttentionCore, owner: Unit) -> list[Unit]:
    return [Unit.head(owner.layer or 0, head, owner.nth) for head in range(core.n_heads)]


def _outputs(anatomy: Anatomy) -> dict[Site, list[Write]]:
    """The writes of heads by where their output matrices read."""
    found: dict[Site, list[Write]] = {}
    for write in anatomy.writes:
        if write.attention is not None and write.source is not None and write.projection is not None:
            found.setdefault(write.source, []).append(write)
    return found


def _measuring(
    core: AttentionCore,
    owner: Unit,
    probes: dict[str, Probe],
    places: Tensor,
    out: HeadRun,
    looked: dict[Unit, _Looked],
    now: Pass,
) -> Tap:
    def tap(leaves) -> None:
        operands = received(core, leaves, now.batch, now.positions)
        for head, unit in enumerate(_units(core, owner)):
            pattern = operands.of("pattern", 0, head, core.n_heads).detach().cpu()
            for name, probe in probes.items():
                out.measures[name][unit], out.sinks[name][unit] = probe(pattern)
            out.looks_first[unit] = looks_first(pattern)
            if len(places):
                values = operands.of("value", 0, head, core.n_heads)[places.to(operands.value.device)]
                looked[unit] = _Looked(pattern[places][:, places].argmax(-1), None if core.steps else values)

    return tap


def _directions(anatomy: Anatomy, tokens: Int[Tensor, " token"]) -> Float[Tensor, "direction d_model"]:
    """The stream directions of some tokens' logits and of the mean logit, through the final norm without its scale."""
    readout = anatomy.readout
    if readout.opaque is not None:
        raise LevelRefusedError("No copying scores", "the readout", readout.opaque)
    weight = readout.unembedding
    mean = expected_rows(readout, torch.full((1, len(weight)), 1 / len(weight), dtype=weight.dtype).to(weight.device))
    rows = torch.cat([token_rows(readout, tokens.to(weight.device)), mean.double()])
    return token_direction(readout, rows, torch.ones(1, dtype=torch.float64, device=weight.device))


def _copying(
    writes: list[Write], places: Tensor, directions: Tensor, out: HeadRun, looked: dict[Unit, _Looked], now: Pass
) -> Tap:
    site = writes[0].source
    assert site is not None

    def tap(leaves) -> None:
        read = copied_by_token(leaves[site.slot], site, now)[1][0][places.to(leaves[site.slot].device)]
        for write in writes:
            assert write.attention is not None and write.projection is not None
            for unit, channels in zip(_units(write.attention, write.unit), write.attention.channels, strict=True):
                columns = write.projection.columns(channels.to(read.device)).double()
                reading = (directions.to(columns) @ columns).T
                own = looked[unit]
                out.copying[unit] = _copied(read[:, channels.to(read.device)].double() @ reading, own.attended)
                if own.values is not None:
                    alone = own.values.double() @ reading
                    out.copying_alone[unit] = _copied(alone, torch.arange(len(alone)))

    return tap


def _copied(logits: Float[Tensor, "pos direction"], attended: Int[Tensor, " pos"]) -> Float[Tensor, " measure"]:
    """The copying score from logits of the tokens and, last, of the mean."""
    return copied_share(logits[:, :-1].cpu(), logits[:, -1].cpu(), attended)
