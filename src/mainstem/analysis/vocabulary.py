"""Scores of every unit that need its logits on the whole vocabulary, all from the same products, in chunks.

x is the stream that the unit's sublayer read, v the unit's vector as it enters the stream. Under the frozen norm values
before the softmax add: bs(x + v) = bs(x) + bs(v) (Yu et al. 2023, section 3), so one product with the unembedding
serves log p(w | v), the rank of w, log p(w | x + v) and p(w | x + v); where there is no softcap so does one
exponential, because lse bs(x + v) - lse bs(x) = log sum p e^bs(v) with p = softmax bs(x). Under a recomputed norm v and
x + v are read each at its own scale, two products. Probabilities stay logarithms until their difference is taken in
float64.

Cost: 2 x units x d_model x d_vocab operations. Memory: a chunk of units x d_vocab, at most ELEMENTS numbers.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.analysis.bases import Entry, entries
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.increase import log_probability
from mainstem.analysis.parts import Group
from mainstem.analysis.readout import (
    NormConvention,
    before_softmax,
    frozen_scale,
    normed,
    require_linear,
    softcapped,
    working_dtype,
)
from mainstem.model.anatomy import Readout
from mainstem.targets import Target

ELEMENTS = 2**23
BLOCK = 1024
SPREAD = 60.0
VOCABULARY_SCORES = ("increase", "log-probability", "probability-increase", "reciprocal-rank")
OF_SUMS = {"increase", "probability-increase"}
OF_UNITS = {"log-probability", "reciprocal-rank"}


def vocabulary_scores(
    decomposition: Decomposition,
    target: Target,
    names: Sequence[str],
    norm: NormConvention,
    groups: Sequence[Group],
) -> dict[str, list[Float[Tensor, " part"]]]:
    """The named ones of `VOCABULARY_SCORES` for all units of the groups, float64.

    Raises:
        LevelRefusedError: if the readout is not a norm and an unembedding.
    """
    require_linear(decomposition.moment.anatomy.readout)
    places = entries(decomposition)
    reader = _Reader(decomposition, target, set(names), norm)
    out: dict[str, list[Tensor]] = {name: [] for name in names}
    for group in groups:
        entry = places[group.sublayer or group.units[0]]
        for name, scores in reader.group(entry, group).items():
            out[name].append(scores)
    return out


class _Reader:
    """Reads units of one decomposition through its readout."""

    def __init__(self, decomposition: Decomposition, target: Target, names: set[str], norm: NormConvention) -> None:
        self.readout, self.target = narrowed(decomposition.moment.anatomy.readout, target)
        self.names = names
        self.scale = frozen_scale(self.readout, decomposition.moment.stream) if norm == "frozen" else None
        self.dtype = working_dtype(self.readout)
        self.weight = self.readout.unembedding.to(self.dtype).T
        self.rows = max(1, ELEMENTS // self.weight.shape[1])
        self.base: tuple[int, Tensor] | None = None
        self.shares = norm == "frozen" and self.readout.softcap is None and not target.against

    def group(self, entry: Entry, group: Group) -> dict[str, Tensor]:
        """Each named score of a group's units."""
        device = entry.base.device
        found = {name: torch.zeros(len(group), dtype=torch.float64, device=device) for name in self.names}
        base = self._base(entry)
        for start in range(0, len(group), self.rows):
            index = torch.arange(start, min(start + self.rows, len(group)), device=device)
            vectors = entry.vectors(group, index)
            made = self._frozen(base, vectors) if self.scale is not None else self._recomputed(base, entry, vectors)
            for name, scores in made.items():
                found[name][index] = scores.double()
        return found

    def _base(self, entry: Entry) -> Float[Tensor, " d_vocab"]:
        """Before the softmax at the stream value that the sublayer read."""
        if self.base is None or self.base[0] != entry.base_node:
            x = normed(self.readout, entry.base[None], self.scale).to(self.dtype)
            self.base = (entry.base_node, before_softmax(self.readout, x)[0])
        return self.base[1]

    def _frozen(self, base: Tensor, vectors: Float[Tensor, "part d_model"]) -> dict[str, Tensor]:
        x = normed(self.readout, vectors, self.scale, vectors=True).to(self.dtype) * self.readout.scale
        own = x @ self.weight
        out = self._ranks(own)
        if self.shares and {*self.names} != {"reciprocal-rank"} and _narrow(own):
            return out | self._by_one_exponential(base, own)
        if "log-probability" in self.names:
            out["log-probability"] = self._log_p(own)
        return out | (self._changes(base, own + base) if self.names & OF_SUMS else {})

    def _by_one_exponential(self, base: Tensor, own: Float[Tensor, "part d_vocab"]) -> dict[str, Tensor]:
        """log p(w | v) and log p(w | x + v) from e^bs(v) alone."""
        ids = list(self.target.ids)
        chosen = own[:, ids].double()
        largest = own.amax(-1, keepdim=True)
        weighing = torch.stack([torch.ones_like(base), base.softmax(-1)], -1)
        exponentials = (own - largest).exp_()
        blocks = zip(exponentials.split(BLOCK, -1), weighing.split(BLOCK), strict=True)
        sums = sum((e @ w).double() for e, w in blocks)  # short sums: float32 loses too much of a long one
        sums = torch.as_tensor(sums).log() + largest.double()
        out = {"log-probability": chosen.logsumexp(-1) - sums[:, 0]} if "log-probability" in self.names else {}
        if self.names & OF_SUMS:
            at = base[ids].double()
            change = (chosen + at).logsumexp(-1) - at.logsumexp(-1) - sums[:, 1]
            out |= self._of_change(change, self._log_p(base[None])[0])
        return out

    def _recomputed(self, base: Tensor, entry: Entry, vectors: Float[Tensor, "part d_model"]) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        if self.names & OF_UNITS:
            own = before_softmax(self.readout, normed(self.readout, vectors, None).to(self.dtype))
            out = self._ranks(own)
            if "log-probability" in self.names:
                out["log-probability"] = self._log_p(own)
        if self.names & OF_SUMS:
            x = normed(self.readout, entry.base + vectors, None).to(self.dtype)
            out |= self._changes(base, before_softmax(self.readout, x))
        return out

    def _ranks(self, own: Float[Tensor, "part d_vocab"]) -> dict[str, Tensor]:
        return {"reciprocal-rank": 1 / ranks(own, self.target).double()} if "reciprocal-rank" in self.names else {}

    def _log_p(self, before: Float[Tensor, "part d_vocab"]) -> Float[Tensor, " part"]:
        return log_probability(softcapped(self.readout, before), self.target).double()

    def _changes(self, base: Tensor, after: Float[Tensor, "part d_vocab"]) -> dict[str, Tensor]:
        before = self._log_p(base[None])[0]
        return self._of_change(self._log_p(after) - before, before)

    def _of_change(self, change: Float[Tensor, " part"], before: Tensor) -> dict[str, Tensor]:
        """From the change of the log-probability to that of the probability."""
        made = {"increase": change, "probability-increase": before.exp() * change.expm1()}
        return {name: made[name] for name in OF_SUMS & self.names}


def narrowed(readout: Readout, target: Target) -> tuple[Readout, Target]:
    """For a contrast, which needs no other token's logit, the readout of its tokens alone."""
    if not target.against:
        return readout, target
    ids, n = [*target.ids, *target.against], len(target.ids)
    bias = None if readout.bias is None else readout.bias[ids]
    own = Target(ids=tuple(range(n)), against=tuple(range(n, len(ids))), text=target.text)
    return replace(readout, unembedding=readout.unembedding[ids], bias=bias), own


def _narrow(values: Float[Tensor, "part d_vocab"]) -> bool:
    """Whether no exponential can be lost beside the largest: what p is small times what e^bs is large."""
    least, largest = values.aminmax(dim=-1)
    return bool((largest - least).max() < SPREAD)


def ranks(values: Float[Tensor, "part d_vocab"], target: Target) -> Int[Tensor, " part"]:
    """The rank of the target (of the best of a set) in each row, from 1."""
    best = values[:, list(target.ids)].amax(-1, keepdim=True)
    return (values > best).count_nonzero(-1) + 1
