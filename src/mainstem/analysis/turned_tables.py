"""How large an entry of a token table has to be: its level against tables whose factors were turned at random.

The null hypothesis is that of a head at its initialisation: turning all its rows (queries, or outputs) by an orthogonal
matrix of d_head dimensions, against its columns (keys, or values), is as likely as not turning them. Norms of all rows
and columns stay, so a token is not found for being large. Under a uniformly random rotation an entry is |a| |b| cos
with cos the first coordinate of a random unit vector, P(cos >= t) = I_{1-t^2}((d-1)/2, 1/2) / 2; the sum over all
entries bounds the probability that any reaches x (Boole). No draws are made. The bound holds for every table, so the
rate is a ceiling; in very few dimensions it is not reached.

Norms are rounded up to a bin of 1 %, so that the sum over d_vocab^2 pairs is one over bins, and the level rises by 2 %
at most.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.vocabulary_table import VocabularyTable

RATE = 0.05
"""How often at most a table that means nothing has any entry above its level."""

BIN = 0.01
BINS = 1000
ANGLES = 8192
STEPS = 30


def level(table: VocabularyTable, rate: float = RATE) -> float:
    """What no entry of the table reaches after a random rotation between its factors, but for a part `rate` of them."""
    sizes, counts = _pairs(table)
    tail = _tail(table.rows.shape[1])
    low, high = 0.0, float(sizes[0]) * (1 + 1e-9)
    for _ in range(STEPS):
        middle = (low + high) / 2
        if float((counts * _beyond(middle / sizes, tail)).sum()) > rate:
            low = middle
        else:
            high = middle
    return high


def _pairs(table: VocabularyTable) -> tuple[Float[Tensor, " bin"], Float[Tensor, " bin"]]:
    """|a| |b| of all pairs, rounded up, the largest first, and how many pairs have it."""
    norms = [factor.norm(dim=-1) for factor in (table.rows, table.columns)]
    largest = [float(one.max()) for one in norms]
    counts = []
    for one, most in zip(norms, largest, strict=True):
        bins = ((most / one[one > 0]).log() / BIN).floor().long().clamp(0, BINS - 1)
        counts.append(torch.bincount(bins).double().cpu())
    both = torch.nn.functional.conv1d(counts[0][None, None], counts[1].flip(0)[None, None], padding=len(counts[1]) - 1)
    used = both[0, 0].nonzero()[:, 0]
    return math.prod(largest) * torch.exp(-BIN * used.double()), both[0, 0][used]


def _tail(width: int) -> Float[Tensor, " angle"]:
    """P(angle <= a) of a random direction of `width` dimensions to a fixed one, rounded up, for a from 0 to a right."""
    angles = torch.linspace(0, math.pi / 2, ANGLES + 1, dtype=torch.float64)
    if width == 1:
        return torch.full_like(angles, 0.5)
    whole = math.sqrt(math.pi) * math.exp(math.lgamma((width - 1) / 2) - math.lgamma(width / 2))
    return ((angles.sin() ** (width - 2) * angles[1]).cumsum(0) / whole).clamp_max(0.5)


def _beyond(cosines: Float[Tensor, " value"], tail: Float[Tensor, " angle"]) -> Float[Tensor, " value"]:
    """P(cos >= t), rounded up; t is not negative."""
    place = (torch.acos(cosines.clamp_max(1)) * ANGLES / (math.pi / 2)).ceil().long().clamp_max(ANGLES)
    return torch.where(cosines > 1, 0.0, tail[place])
