"""Dimensions of the stream taken out where matrices read it, and what stands in their place.

A dimension is taken out of the inputs of matrices, after the norm, so that the stream itself and the scale of the norm
stay what they are (Dettmers et al. 2022, LLM.int8(), section 4: outlier features are set to zero before they enter the
attention projections). In its place is 0, or its mean over a text: one mean for all tokens, or one for first positions
and one for the others (Sun et al. 2024, Massive Activations: harmless where zero is ruinous).

Controls are as many other dimensions: any (`random_dimensions`), those of nearly the same size (`nearest_dimensions`),
or any, of which as much is subtracted, token by token, as the norm of what the set itself has there (`subtracted`).

Cost: a run of the model for each text and each variant; changes are made by taps, and the model is left as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.causal.changes import Change, New, Pass, change_taps, set_to
from mainstem.causal.evaluation import Run
from mainstem.causal.stream_points import StreamPoint
from mainstem.causal.stream_statistics import PointMoments
from mainstem.errors import RefusedError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Site, tapped
from mainstem.model.outputs import logits_of
from mainstem.units import Unit

Where = Literal["attention", "everywhere"]
"""At the inputs of attention's query, key and value matrices, or of every matrix that reads the stream."""

ATTENTION = frozenset({"query", "key", "value"})
NEAREST = 20


@dataclass(frozen=True)
class ReadInput:
    """One value that matrices read: the stream after a norm.

    Attributes:
        point: where it is seen; "unembed.input" is what the matrix that makes the logits reads.
        sites: where each of its matrices receives it.
    """

    point: StreamPoint
    sites: tuple[Site, ...]


def read_inputs(anatomy: Anatomy, where: Where) -> list[ReadInput]:
    """What is read, in the order of the anatomy; the unembedding's input comes last.

    Inputs of another width than the stream's are left out, and so is what experts read in their own module.

    Raises:
        RefusedError: if there is nothing of the kind.
    """
    width = anatomy.sizes.d_model
    grouped: dict[tuple[Unit, int], list[Site]] = {}
    for read in anatomy.reads:
        wanted = where == "everywhere" or not ATTENTION.isdisjoint(read.roles)
        if wanted and read.weight.shape[1] == width:
            grouped.setdefault((read.unit, read.node), []).append(read.input_site)
    found = [_input(f"{unit}.input", unit.layer, sites) for (unit, _), sites in grouped.items()]
    if not found:
        what = "attention reads the stream" if where == "attention" else "a matrix reads the stream"
        remedy = "Ask this of a model with attention." if where == "attention" else None
        raise RefusedError("No dimension can be taken out", where, f"it is not seen where {what}", remedy)
    readout = anatomy.readout
    if where == "everywhere" and readout.opaque is None and readout.unembedding.shape[1] == width:
        found.append(_input("unembed.input", None, [readout.input_site]))
    return found


def left_out(anatomy: Anatomy) -> list[str]:
    """What "everywhere" does not hold, each in a sentence."""
    notes = [
        f"What the experts of {unit} read is left as it is."
        for unit in dict.fromkeys(read.unit for read in anatomy.expert_reads)
    ]
    if anatomy.readout.opaque is not None:
        notes.append("What the logits are made from is left as it is: the readout is no norm and unembedding.")
    return notes


def _input(name: str, layer: int | None, sites: Sequence[Site]) -> ReadInput:
    return ReadInput(StreamPoint(name, "input", layer, sites[0]), tuple(dict.fromkeys(sites)))


# --- what stands in their place ---------------------------------------------------------------------------


def zeroed(inputs: Sequence[ReadInput], dimensions: Int[Tensor, " dimension"]) -> list[Change]:
    """0 in place of the dimensions, wherever the inputs are read."""
    return _changes(inputs, dimensions, [set_to(0.0)] * len(inputs))


def at_mean(
    inputs: Sequence[ReadInput], dimensions: Int[Tensor, " dimension"], moments: PointMoments, by_place: bool
) -> list[Change]:
    """Their means in place of the dimensions: one for all tokens, or (`by_place`) first positions apart.

    Args:
        inputs: where.
        dimensions: which.
        moments: of these inputs, in their order.
        by_place: whether a first position gets the mean of first positions, and others the mean of the others.
    """
    new = []
    for number in range(len(inputs)):
        first, rest = moments.first_positions(number), moments.without_first(number)
        mean = moments.whole(number).mean
        means = (mean if first is None else first.mean, rest.mean) if by_place else (mean, mean)
        new.append(_mean(*(each[dimensions] for each in means)))
    return _changes(inputs, dimensions, new)


def _mean(first: Float[Tensor, " dimension"], rest: Float[Tensor, " dimension"]) -> New:
    def new(old: Tensor, places: Tensor) -> Tensor:
        start = (places == 0)[:, None].to(old.device)
        return torch.where(start, first.to(old), rest.to(old))

    return new


def subtracted(
    inputs: Sequence[ReadInput], dimensions: Int[Tensor, " dimension"], others: Int[Tensor, " other"]
) -> list[Change]:
    """As much subtracted of `others`, along what they have at each token, as the norm of `dimensions` there.

    Where the norms are equal this is zeroing `others`.
    """
    k = len(others)

    def new(old: Tensor, places: Tensor) -> Tensor:
        wide = old.double()
        own, lost = wide[:, :k], wide[:, k:].norm(dim=-1, keepdim=True)
        direction = own / own.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(old.dtype).tiny)
        return torch.cat([own - lost * direction, wide[:, k:]], -1).to(old)

    return _changes(inputs, torch.cat([others, dimensions]), [new] * len(inputs))


def _changes(inputs: Sequence[ReadInput], entries: Tensor, new: Sequence[New]) -> list[Change]:
    made = zip(inputs, new, strict=True)
    return [Change(site, values, entries=entries) for each, values in made for site in each.sites]


def changed_run(model: torch.nn.Module, changes: Sequence[Change], **forward: Any) -> Run:
    """A forward pass under the changes; without any, the model's own."""
    device = next(model.parameters()).device

    def run(ids: Tensor) -> Tensor:
        with tapped(model, change_taps(changes, Pass(ids.shape[0], ids.shape[1]))):
            return logits_of(model(input_ids=ids.to(device), **forward))

    return run


# --- controls ---------------------------------------------------------------------------------------------


def random_dimensions(width: int, dimensions: Sequence[int], generator: torch.Generator) -> Int[Tensor, " dimension"]:
    """As many other dimensions; all others, if they are fewer."""
    others = torch.tensor([i for i in range(width) if i not in set(dimensions)], dtype=torch.long)
    return others[torch.randperm(len(others), generator=generator)[: len(dimensions)]]


def nearest_dimensions(
    sizes: Float[Tensor, " d_model"], dimensions: Sequence[int], generator: torch.Generator
) -> Int[Tensor, " dimension"]:
    """For each dimension another one, drawn from the 20 that are nearest to it in size (as a ratio)."""
    taken, drawn = set(dimensions), []
    logs = sizes.clamp_min(torch.finfo(sizes.dtype).tiny).log()
    for dimension in dimensions:
        order = (logs - logs[dimension]).abs().argsort().tolist()
        free = [i for i in order if i not in taken][:NEAREST]
        if free:
            drawn.append(free[int(torch.randint(len(free), (1,), generator=generator))])
            taken.add(drawn[-1])
    return torch.tensor(drawn, dtype=torch.long)
