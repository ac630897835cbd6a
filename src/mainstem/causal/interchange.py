"""Interchange: a base run goes on with what a source run has in some directions of one point.

With orthonormal directions R [k, width] at one point and position

    h  <-  h_base + (h_source - h_base) R^T R

(Geiger et al. 2023; without R the whole vector). The change is differentiable in R. `mainstem.causal.subspaces` learns
R on counterfactuals: a base, a source, and the answer that the base should have if a variable had the source's value.

Runs are rows of batches, except in models where a row does not get what it gets alone; that is tried once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mainstem.causal.changes import Pass, copied_by_token
from mainstem.causal.pieces import Entries, PieceMap
from mainstem.causal.row_batches import mixes_rows
from mainstem.errors import LevelRefusedError, PairError, PositionError, UsageError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.model.outputs import logits_of
from mainstem.points import Point

ACTIVE = 0.999
"""The share of the variance that active directions hold."""

BATCH = 64
"""Rows of one batch where nothing is learned."""


@dataclass(frozen=True)
class Counterfactual:
    """Token ids of the base and the source, and the token that the base gives with the source's variable."""

    base: tuple[int, ...]
    source: tuple[int, ...]
    expected: int


class Interchange:
    """Runs of base prompts with a source's values in a subspace.

    Args:
        model: the module; it is left as it was, and its parameters get no gradient.
        anatomy: its anatomy.
        at: a point that is one vector at each position: the stream, a write, a head's result.
        positions: where values are interchanged, from 0.
        position: the destination of the answer, from 0.
        forward: further arguments of the forward call.

    Raises:
        UnitError, LevelRefusedError: if the model has no such point, or it is not one vector.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        at: Point,
        positions: Sequence[int],
        position: int,
        **forward: Any,
    ) -> None:
        pieces = PieceMap(anatomy).of(at)
        if len(pieces) != 1 or not isinstance(pieces[0], Entries):
            raise LevelRefusedError(
                f"No subspace of {at}",
                reason="it is not one vector at each position",
                remedy="Ask about what a unit writes, or about the stream, such as L5.resid_pre.",
            )
        self.model, self.piece, self.at, self.position, self.forward = model, pieces[0], at, position, forward
        self.places = torch.tensor(list(positions))
        entries = self.piece.entries
        self.entries = torch.arange(self.piece.width) if entries is None else entries
        self.device = next(model.parameters()).device
        self.mixes: bool | None = None
        """Whether rows of a batch get other values than alone; not known before the first run."""

    def values(self, ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch destination d_in"]:
        """What the point is at the positions, in plain runs."""
        return self.values_beside(ids, [self])[0]

    def values_beside(
        self, ids: Int[Tensor, "batch pos"], places: Sequence["Interchange"]
    ) -> list[Float[Tensor, "batch destination d_in"]]:
        """What several points are, in the same plain runs."""
        return _gathered([self._seen(part, places) for part in ids.split(self._rows(ids))])

    def values_after(
        self,
        ids: Int[Tensor, "batch pos"],
        sources: Float[Tensor, "batch destination d_in"],
        directions: Float[Tensor, "direction d_in"] | None,
        places: Sequence["Interchange"],
    ) -> list[Float[Tensor, "batch destination d_in"]]:
        """What other, later points are after the interchange at this one."""
        found, rows = [], self._rows(ids)
        for part, theirs in zip(ids.split(rows), sources.split(rows), strict=True):
            put = self._putting(theirs, directions, Pass(part.shape[0], part.shape[1]))
            found.append(self._seen(part, places, (self.piece.site, put)))
        return _gathered(found)

    @torch.no_grad()
    def _seen(
        self, ids: Int[Tensor, "batch pos"], places: Sequence["Interchange"], *taps: tuple[Site, Tap]
    ) -> list[Tensor]:
        """What points are in one run that taps may change."""
        now = Pass(ids.shape[0], ids.shape[1])
        found: list[list[Tensor]] = [[] for _ in places]
        watching = [(place.piece.site, place._watching(held, now)) for place, held in zip(places, found, strict=True)]
        self._run(ids, *taps, *watching)
        return [held[0] for held in found]

    def logits(
        self,
        ids: Int[Tensor, "batch pos"],
        sources: Float[Tensor, "batch destination d_in"],
        directions: Float[Tensor, "direction d_in"] | None,
    ) -> Float[Tensor, "batch d_vocab"]:
        """Those of the base runs after the interchange; without directions of the full vector."""
        rows = self._rows(ids)
        pairs = zip(ids.split(rows), sources.split(rows), strict=True)
        return torch.cat([self._after(part, theirs, directions) for part, theirs in pairs])

    def _after(self, ids: Int[Tensor, "batch pos"], sources: Tensor, directions: Tensor | None) -> Tensor:
        now = Pass(ids.shape[0], ids.shape[1])
        return self._run(ids, (self.piece.site, self._putting(sources, directions, now)))

    @torch.no_grad()
    def _rows(self, ids: Int[Tensor, "batch pos"]) -> int:
        """How many rows a batch has."""
        if self.mixes is None:
            alone = self._run(ids[:1])[0]
            self.mixes = mixes_rows(self.model, ids[0], self.position, alone, **self.forward)
        return 1 if self.mixes else BATCH

    def _watching(self, found: list[Tensor], now: Pass) -> Tap:
        def tap(leaves) -> None:
            tokens = copied_by_token(leaves[self.piece.site.slot], self.piece.site, now)[1]
            found.append(tokens[self._where(tokens)])

        return tap

    def _putting(self, sources: Tensor, directions: Tensor | None, now: Pass) -> Tap:
        def tap(leaves):
            out, tokens = copied_by_token(leaves[self.piece.site.slot], self.piece.site, now)
            where = self._where(tokens)
            change = sources.to(tokens) - tokens[where]
            if directions is not None:
                own = directions.to(tokens)
                change = change @ own.T @ own
            tokens[where] = tokens[where] + change
            new = list(leaves)
            new[self.piece.site.slot] = out
            return new

        return tap

    def _run(self, ids: Int[Tensor, "batch pos"], *taps: tuple[Site, Tap]) -> Float[Tensor, "batch d_vocab"]:
        with tapped(self.model, list(taps)):
            return logits_of(self.model(input_ids=ids, **self.forward))[:, self.position]

    def _where(self, tokens: Tensor) -> tuple:
        return slice(None), self.places.to(tokens.device)[:, None], self.entries.to(tokens.device)[None]


def _gathered(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Of each point the values of all batches."""
    return [torch.cat(list(values)) for values in zip(*parts, strict=True)]


class Counterfactuals:
    """Counterfactuals as tensors, with the sources' values at the point.

    Raises:
        PairError, PositionError, UsageError: if there are none, they are of unequal length, or too short.
    """

    def __init__(self, interchange: Interchange, examples: Sequence[Counterfactual]) -> None:
        lengths = {len(ids) for example in examples for ids in (example.base, example.source)}
        if len(lengths) > 1:
            raise PairError(
                f"The prompts have {', '.join(map(str, sorted(lengths)))} tokens",
                None,
                "Give counterfactuals of equal length, so that a position is the same place in all of them.",
            )
        if not lengths:
            raise UsageError("A subspace is learned on counterfactuals", None, "Give some.")
        last = max(interchange.position, *interchange.places.tolist())
        if not last < max(lengths):
            raise PositionError(f"Position {last} is outside the prompts", f"they have {max(lengths)} tokens")
        self.interchange = interchange
        self.base, source = (
            torch.tensor([getattr(example, name) for example in examples], device=interchange.device)
            for name in ("base", "source")
        )
        self.expected = torch.tensor([example.expected for example in examples], device=interchange.device)
        self.own, self.sources = interchange.values(self.base), interchange.values(source)

    def varying(self, which: Int[Tensor, " row"]) -> tuple[Float[Tensor, "direction d_in"], int]:
        """The principal directions of the point over bases and sources, the most varying first; how many are active."""
        pooled = torch.cat([self.own[which], self.sources[which]]).flatten(0, 1).double()
        values, vectors = torch.linalg.eigh(torch.cov(pooled.T))
        variances = values.flip(0).clamp_min(0)
        active = int((variances.cumsum(0) < ACTIVE * variances.sum()).sum()) + 1
        return vectors.T.flip(0), active

    def log_p(self, which: Int[Tensor, " row"], directions: Tensor | None) -> Float[Tensor, "row d_vocab"]:
        """Log-probabilities after the interchange."""
        logits = self.interchange.logits(self.base[which], self.sources[which], directions)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    @torch.no_grad()
    def outcome(self, which: Int[Tensor, " row"], directions: Tensor | None) -> tuple[float, float]:
        """How often the expected token is the likeliest, and its mean log-probability."""
        log_p = torch.cat([self.log_p(part, directions) for part in which.split(BATCH)])
        expected = self.expected[which]
        return (
            float((log_p.argmax(-1) == expected).double().mean()),
            float(log_p.gather(1, expected[:, None]).double().mean()),
        )
