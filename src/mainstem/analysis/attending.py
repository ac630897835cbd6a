"""Where heads of a known behaviour look, as weights on their patterns; and what the same weights give elsewhere.

A probe is a stack of weights [measure, pos, source]: its product with a pattern is, for each measure, the mean
attention over destinations to the sources named by it. One of the measures is what a behaviour is about, the others are
its null: as many sources at other offsets, of which none means anything.

    copies   destinations whose token was there before; sources at an offset from each earlier copy
             +1 prefix matching, the token after the copy: what an induction head looks at (Olsson et al. 2022)
             -1 the same as published, "the tokens that preceded the same token in earlier repeats"
              0 duplicate-token heads
    back     sources so many tokens back; 1 is a previous-token head
    first    single sources, counted from the beginning; 0 is a sink

Position 0 is left out of copies and of sources in `copies` and `back`: it holds a beginning-of-sequence token, or,
where a model has none, the token that became its sink. Sources are before their destination.

Cost: a product of 25 weights with each pattern.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

REACH = 12
"""Offsets from a copy go from -REACH to REACH: of 25 repeated tokens each exactly once."""

BEHAVIOURS = {"prefix": ("copies", 1), "legacy": ("copies", -1), "duplicate": ("copies", 0), "previous": ("back", 1),
              "first": ("first", 0)}  # fmt: skip
"""Each behaviour's probe, and the measure that is the behaviour itself."""

NAMED = {
    probe: {number for own, number in BEHAVIOURS.values() if own == probe} for probe in ("copies", "back", "first")
}
"""The measures of each probe that a behaviour is about, and that are in no null."""


@dataclass(frozen=True, eq=False)
class Probe:
    """Measures of patterns.

    Attributes:
        numbers: what each measure is about: an offset from a copy, a distance, a position.
        weights: the sources of each measure at each destination, divided by the number of destinations.
        sink: the weight of position 0 over the same destinations as the first measure's.
    """

    numbers: tuple[int, ...]
    weights: Float[Tensor, "measure pos source"]
    sink: Float[Tensor, "pos source"]

    def __call__(self, pattern: Float[Tensor, "pos source"]) -> tuple[Float[Tensor, " measure"], float]:
        """Each measure of one head's pattern, and its attention to the first position."""
        flat = pattern.flatten().to(self.weights)
        return self.weights.flatten(1) @ flat, float(self.sink.flatten() @ flat)


def probes(ids: Int[Tensor, " pos"]) -> dict[str, Probe]:
    """All probes for a text; NaN where it has no destination for a measure."""
    length = len(ids)
    places = torch.arange(length)
    distance = places[:, None] - places
    copies = _copies(ids)
    offsets, steps, columns = range(-REACH, REACH + 1), range(1, 2 * REACH), range(2 * REACH - 1)
    behind = torch.stack([_moved(copies, offset) for offset in offsets])
    back = torch.stack([(distance == step) & (places >= 1) for step in steps])
    first = torch.stack([(places == column) & (distance > 0) for column in columns])
    return {
        "copies": Probe(tuple(offsets), behind / copies.any(1).sum(), _sink(copies.any(1), length)),
        "back": Probe(tuple(steps), back / back.any(2).sum(1)[:, None, None], _sink(places >= 2, length)),
        "first": Probe(tuple(columns), first / first.any(2).sum(1)[:, None, None], _sink(places >= 1, length)),
    }


def _copies(ids: Int[Tensor, " pos"]) -> Bool[Tensor, "pos source"]:
    """Which earlier positions hold the token of each destination, the first position left out."""
    same = (ids[:, None] == ids).tril(-1)
    same[:, 0] = False
    return same


def _moved(sources: Bool[Tensor, "pos source"], offset: int) -> Bool[Tensor, "pos source"]:
    """The sources at an offset from the given ones, after the first position and before the destination."""
    moved = sources.roll(offset, 1)
    places = torch.arange(len(sources))
    from_inside = (places - offset >= 0) & (places - offset < len(sources)) & (places >= 1)
    return (moved & from_inside).tril(-1)


def _sink(destinations: Bool[Tensor, " pos"], length: int) -> Float[Tensor, "pos source"]:
    weights = torch.zeros(length, length)
    weights[destinations, 0] = 1 / destinations.sum()
    return weights


def looks_first(pattern: Float[Tensor, "pos source"]) -> float:
    """The part of the destinations, from the second on, that give their largest weight to the first position."""
    return float((pattern[1:].argmax(-1) == 0).double().mean())


def copied_share(
    logits: Float[Tensor, "pos token"], mean: Float[Tensor, " pos"], attended: Int[Tensor, " pos"]
) -> Float[Tensor, " measure"]:
    """The copying score of one head on different tokens, and its null, the same for other tokens.

    A head's write at each destination is read as logits of the tokens of the text alone; what is above the mean logit
    of the vocabulary is raised. The score is the part of what is raised that is raised for the attended token, from -1
    (none) to 1 (all), a mean over destinations; where nothing is raised it is -1. (Olsson et al. 2022, appendix.)

    Args:
        logits: of each token of the text, at each destination.
        mean: the mean over the vocabulary.
        attended: which token of the text each destination looks at most.

    Returns:
        The score, and the same for the tokens 1, 2, ... further on in the text, in a circle.
    """
    raised = (logits - mean[:, None]).clamp_min(0)
    share = raised / raised.sum(-1, keepdim=True).clamp_min(torch.finfo(raised.dtype).tiny)
    count = logits.shape[1]
    steps = torch.arange(min(2 * REACH - 1, count), device=attended.device)
    return 2 * share.gather(1, (attended[:, None] + steps) % count).mean(0) - 1
