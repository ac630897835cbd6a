"""Dimensions of the stream taken out where matrices read it, and what stands in their place.

A dimension is taken out of the inputs of matrices, after the norm, so that the stream itself and the scale of the norm
stay what they are (Dettmers et al. 2022, LLM.int8(), section 4: outlier features are set to zero before they enter the
attention projections). In its place is 0, or its mean over a text: one mean for all tokens, or one for first positions
and one for the others (Sun et al. 2024, Massive Activations: harmless where zero is ruinous).

Controls are as many other dimensions: any (`random_dimensions`), those of nearly the same size (`nearest_dimensions`),
or any, of which as much is subtracted, token by token, as the norm of what the set itself has there (`subtracted`).

Cost: a run of the model for each text and each variant; changes are made by taps, and the model is left as it was.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.causal.changes import Change, New, Pass, change_taps, copied_by_token, set_to
from mainstem.causal.evaluation import Run
from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Anatomy, Read
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.model.outputs import logits_of
from mainstem.run.windows import Windows

Where = Literal["attention", "everywhere"]
"""At the inputs of attention's query, key and value matrices, or of every matrix that reads the stream."""

ATTENTION = frozenset({"query", "key", "value"})
NEAREST = 20


@dataclass(frozen=True, eq=False)
class ReadInput:
    """One value that matrices read: the stream after a norm.

    Attributes:
        unit: whose matrices; "unembed" for those that make the logits.
        sites: where each of them receives it.
    """

    unit: str
    sites: tuple[Site, ...]


def read_inputs(anatomy: Anatomy, where: Where) -> list[ReadInput]:
    """What is read, in the order of the anatomy; the unembedding's input comes last.

    Inputs of another width than the stream's are left out, and so is what experts read in their own module.

    Raises:
        LevelRefusedError: if there is nothing of the kind.
    """
    width = anatomy.sizes.d_model
    grouped: dict[tuple[str, int], list[Read]] = {}
    for read in anatomy.reads:
        wanted = where == "everywhere" or not ATTENTION.isdisjoint(read.roles)
        if wanted and read.weight.shape[1] == width:
            grouped.setdefault((str(read.unit), read.node), []).append(read)
    found = [ReadInput(unit, _sites(reads)) for (unit, _), reads in grouped.items()]
    if not found:
        what = "attention reads the stream" if where == "attention" else "a matrix reads the stream"
        raise LevelRefusedError("No dimension can be taken out", where, f"it is not seen where {what}")
    readout = anatomy.readout
    if where == "everywhere" and readout.opaque is None and readout.unembedding.shape[1] == width:
        found.append(ReadInput("unembed", (readout.input_site,)))
    return found


def _sites(reads: Iterable[Read]) -> tuple[Site, ...]:
    return tuple(dict.fromkeys(read.input_site for read in reads))


@dataclass(frozen=True, eq=False)
class Moments:
    """One read input over the tokens of a text.

    Attributes:
        first: [d_model] the mean over first positions of windows.
        rest: the mean over all other tokens.
        mean: the mean over all tokens.
        mean_square: over all tokens.
    """

    first: Float[Tensor, " d_model"]
    rest: Float[Tensor, " d_model"]
    mean: Float[Tensor, " d_model"]
    mean_square: Float[Tensor, " d_model"]

    @property
    def variance(self) -> Float[Tensor, " d_model"]:
        """Over all tokens."""
        return (self.mean_square - self.mean.square()).clamp_min(0)


@torch.no_grad()
def read_moments(
    model: torch.nn.Module, inputs: Sequence[ReadInput], windows: Windows, batch: int = 1, **forward: Any
) -> list[Moments]:
    """Means and mean squares of each read input, in float64, in one run over the text.

    Args:
        model: the module; it is left as it was.
        inputs: what to look at.
        windows: the text; tokens that an earlier window had are not counted again.
        batch: windows that run together.
        forward: further arguments of the forward call.
    """
    sums = [_Sums() for _ in inputs]
    device = next(model.parameters()).device
    for rows in windows.batches(batch):
        ids, fresh = windows.ids[rows].to(device), windows.fresh(rows)
        now = Pass(*ids.shape)
        taps = [(each.sites[0], own.tap(each.sites[0], now, fresh)) for each, own in zip(inputs, sums, strict=True)]
        with tapped(model, taps):
            model(input_ids=ids, **forward)
    return [own.moments() for own in sums]


class _Sums:
    """Sums of one read input: of first positions, of others, of squares."""

    def __init__(self) -> None:
        self.counts = [0, 0]
        self.sums: list[Tensor | float] = [0.0, 0.0]
        self.squares: Tensor | float = 0.0

    def tap(self, site: Site, now: Pass, fresh: Tensor) -> Tap:
        def tap(leaves) -> None:
            tokens = copied_by_token(leaves[site.slot], site, now)[1]
            for row, new in zip(tokens, fresh.to(tokens.device), strict=True):
                for kind, values in enumerate((row[:1][new[:1]], row[1:][new[1:]])):
                    self.counts[kind] += len(values)
                    self.sums[kind] = self.sums[kind] + values.double().sum(0)
                    self.squares = self.squares + values.double().square().sum(0)

        return tap

    def moments(self) -> Moments:
        first, rest = (
            torch.as_tensor(made) / max(count, 1) for made, count in zip(self.sums, self.counts, strict=True)
        )
        total = sum(self.counts)
        mean = (first * self.counts[0] + rest * self.counts[1]) / total
        return Moments(first, rest, mean, torch.as_tensor(self.squares) / total)


def sizes_of(moments: Sequence[Moments]) -> Float[Tensor, " d_model"]:
    """The share of each dimension in the mean square of a read input, a mean over inputs."""
    return torch.stack([each.mean_square / each.mean_square.sum() for each in moments]).mean(0)


def variances_of(moments: Sequence[Moments]) -> Float[Tensor, " d_model"]:
    """The variance of each dimension in units of its input's mean square, a mean over inputs."""
    return torch.stack([each.variance / each.mean_square.sum() for each in moments]).mean(0)


# --- what stands in their place ---------------------------------------------------------------------------


def zeroed(inputs: Sequence[ReadInput], dimensions: Int[Tensor, " dimension"]) -> list[Change]:
    """0 in place of the dimensions, wherever the inputs are read."""
    return _changes(inputs, dimensions, [set_to(0.0)] * len(inputs))


def at_mean(
    inputs: Sequence[ReadInput], dimensions: Int[Tensor, " dimension"], moments: Sequence[Moments], by_place: bool
) -> list[Change]:
    """Their means in place of the dimensions: one for all tokens, or (`by_place`) first positions apart."""
    means = [(each.first, each.rest) if by_place else (each.mean, each.mean) for each in moments]
    return _changes(inputs, dimensions, [_mean(first[dimensions], rest[dimensions]) for first, rest in means])


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
        with tapped(model, change_taps(changes, Pass(*ids.shape))):
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
    logs = sizes.clamp_min(1e-300).log()
    for dimension in dimensions:
        order = (logs - logs[dimension]).abs().argsort().tolist()
        free = [i for i in order if i not in taken][:NEAREST]
        if free:
            drawn.append(free[int(torch.randint(len(free), (1,), generator=generator))])
            taken.add(drawn[-1])
    return torch.tensor(drawn, dtype=torch.long)
