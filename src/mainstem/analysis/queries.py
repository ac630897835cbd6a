"""Which earlier units activate a value unit: inner products of the stream's parts with the unit's key.

The normed stream that a value unit reads is a sum of parts, the norm's scale frozen: x = sum over parts of tail(part).
So key . x is a sum of signed shares, one for each part and the biases, and that sum is certified against what the
model computed. Large shares of both signs cancel; positives, negatives and net are kept apart, and no share is divided
by a sum that may be near zero (query layers and query neurons are those of
Yu and Ananiadou 2024).

Cost: one inner product per unit. Limits: the scale is frozen, so what a part does to the norm is not in its share.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.certificate import SAFETY, exact_node, node_rounding
from mainstem.analysis.decompose import LEVELS, groups_to
from mainstem.analysis.keys import Key, evaluated
from mainstem.analysis.parts import Group, carry, pull_back
from mainstem.errors import CertificateError, ChoiceError, LevelRefusedError, UsageError
from mainstem.model.graph import LinearMap, maps_to, maps_to_root
from mainstem.units import Unit

TOTALS = {"layers": "sublayers", "heads": "heads", "neurons": "neurons"}
"""What query scores can be summed over, and the level of decomposition that has it."""

LEAST_NET = 1e-3


@dataclass(frozen=True, eq=False)
class Query:
    """One earlier unit with its signed share of what a key reads, in the key's quantity."""

    unit: Unit
    share: float
    group: Group
    index: int

    @property
    def coefficient(self) -> float:
        """The pattern's weight for subvalues, the activation for neurons, 1 for whole vectors."""
        return float(self.group.coefficients[self.index])


@dataclass(frozen=True, eq=False)
class Shares:
    """The shares of all parts in one key.

    Attributes:
        placed: each group of parts with its shares.
        constant: what biases add, of the read's matrix and norm.
        error, tolerance: of the sum of all against what the model computed, in the key's quantity.
    """

    key: Key
    level: str
    placed: list[tuple[Group, Float[Tensor, " _"]]]
    constant: float
    error: float
    tolerance: float

    @property
    def positives(self) -> float:
        """The sum of the positive shares."""
        return float(sum(shares.clamp_min(0).sum() for _, shares in self.placed))

    @property
    def negatives(self) -> float:
        """The sum of the negative shares."""
        return float(sum(shares.clamp_max(0).sum() for _, shares in self.placed))

    @property
    def net(self) -> float:
        """The sum of all shares, without the constant."""
        return float(sum(shares.sum() for _, shares in self.placed))

    @property
    def holds(self) -> bool:
        """Whether the shares and the constant are what the model computed."""
        return self.error <= self.tolerance

    @property
    def relative_error(self) -> float:
        """The error over what the model computed, where that is larger than the tolerance."""
        return self.error / self.size

    @property
    def size(self) -> float:
        """What errors are relative to: the size of what the model computed, or the tolerance where that is larger."""
        return max(abs(self.key.observed), self.tolerance) or 1.0

    def require(self) -> None:
        """Raises CertificateError if the shares do not add up."""
        if not self.holds:
            raise CertificateError(
                f"The shares in the {self.key.quantity} of {self.key.unit} do not add up to what the model computed",
                f"the {self.level} that {self.key.unit} reads",
                relative_error=self.relative_error,
                tolerance=self.tolerance / self.size,
            )

    def top(self, count: int, negative: bool = False, kinds: Iterable[str] | None = None) -> list[Query]:
        """The units with the largest shares in the direction of the quantity, or, with `negative`, against it.

        A share in the direction has the sign of what the model computed. Roundings are left out.
        """
        sign = (1 if self.key.observed >= 0 else -1) * (-1 if negative else 1)
        chosen = None if kinds is None else set(kinds)
        found: list[Query] = []
        for group, shares in self.placed:
            if group.kind == "rounding" or (chosen is not None and group.kind not in chosen):
                continue
            best = (sign * shares).topk(min(count, len(shares)))
            for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if value > 0:
                    found.append(Query(group.units[index], sign * value, group, index))
        return sorted(found, key=lambda q: (-sign * q.share, q.unit.sort_key))[:count]


def shares_of(key: Key, level: str = "units") -> Shares:
    """The share of every part of the stream that a key reads.

    Raises:
        ChoiceError: if the level is unknown.
        LevelRefusedError: if an earlier sublayer cannot be split to it.
    """
    if level not in LEVELS:
        raise ChoiceError("level", level, LEVELS)
    moment, graph = key.moment, key.moment.anatomy.graph
    run = evaluated(moment)
    maps = maps_to(graph, key.node, run, moment.gates)
    _require_level(key, maps, level)
    placed, constant = [], key.constant
    for group in groups_to(moment, run, maps, level):  # type: ignore[arg-type]
        shares = group.dot(key.direction)
        if group.kind == "bias" and group.node > key.stream_node:  # of the norm before the read: no unit wrote it
            constant += float(shares.sum())
        else:
            placed.append((group, shares))
    total = float(sum(shares.sum() for _, shares in placed)) + constant
    error = abs(key.observed - total)
    return Shares(key, level, placed, constant, error, key.slack + SAFETY * _expected_error(key, run, maps, placed))


def _require_level(key: Key, maps: Sequence[LinearMap | None], level: str) -> None:
    anatomy = key.moment.anatomy
    for write, node in zip(anatomy.writes, anatomy.write_nodes, strict=True):
        if maps[node] is not None and level != "units" and level in write.refusals:
            raise LevelRefusedError(f"No {level.replace('_', ' ')} at {write.unit}", reason=write.refusals[level])


def _expected_error(key: Key, run, maps: Sequence[LinearMap | None], placed) -> float:
    """The errors to expect of the parts and of the norms and factors on their way, in quadrature."""
    square = 0.0
    for piece in (piece for group, _ in placed for piece in group.pieces):
        if piece.bound is not None:
            square += float((pull_back(piece.tail, key.direction).abs() * piece.bound()).norm()) ** 2
    for i, node in enumerate(key.moment.anatomy.graph.nodes):
        tail = maps[i]
        if tail is not None and not exact_node(node):
            rounding = run.values[i][0].double().abs() * node_rounding(node)
            square += float((pull_back(tail, key.direction).abs() * rounding).norm()) ** 2
    return square**0.5


def written(shares: Shares, queries: Sequence[Query]) -> Float[Tensor, "query d_model"]:
    """What query units wrote, as it is in the stream before the final norm at the position that was read."""
    moment = shares.key.moment
    maps = maps_to_root(moment.anatomy.graph, evaluated(moment), moment.gates)
    rows = []
    for query in queries:
        index = torch.tensor([query.index], device=query.group.coefficients.device)
        row = torch.zeros_like(moment.stream, dtype=torch.float64)
        for piece in query.group.pieces:
            tail = maps[piece.node]
            row = row if tail is None else row + carry(tail, piece.raw(index))[0]
        rows.append(row)
    return torch.stack(rows)


def read_vectors(queries: Sequence[Query]) -> Float[Tensor, "query d_model"]:
    """What query units put into the normed stream that is read."""
    return torch.stack(
        [q.group.vectors(torch.tensor([q.index], device=q.group.coefficients.device))[0] for q in queries]
    )


@dataclass(frozen=True)
class Total:
    """What one earlier unit at one position adds up to over several value units; `score` in nats."""

    unit: Unit
    position: int
    score: float


def query_totals(
    values: Sequence[tuple[Shares, float]], over: str = "layers", top: int = 10, least_net: float = LEAST_NET
) -> tuple[list[Total], list[Unit]]:
    """Query layers, heads or neurons: score_l += share_l / (net + constant) x increase, over several value units.

    A value unit whose shares cancel to less than `least_net` of the sum of their sizes is left out, and named: its
    ratios would be a division by nearly zero.

    Args:
        values: shares (at the level `TOTALS[over]`) and log-probability increase, in nats, of each value unit.
        over: layers, heads or neurons.
        top: how many to give, the largest first.
        least_net: the least ratio of net to gross that is divided by.

    Raises:
        ChoiceError: if `over` is none of these.
        UsageError: if shares are of another level.
    """
    if over not in TOTALS:
        raise ChoiceError("sum of queries", over, tuple(TOTALS))
    kinds = {"layers": {"sublayer", "embedding"}, "heads": {"head"}, "neurons": {"ffn_neuron", "expert_neuron"}}[over]
    sums: dict[tuple[Unit, int, int], Tensor] = {}
    groups: dict[tuple[Unit, int, int], Group] = {}
    left_out: list[Unit] = []
    for shares, increase in values:
        if shares.level != TOTALS[over]:
            raise UsageError(
                f"Query {over} are summed over shares at the level {TOTALS[over]}", shares.level, "Ask for it."
            )
        gross, net = shares.positives - shares.negatives, shares.net + shares.constant
        if abs(net) <= least_net * (gross + abs(shares.constant)):
            left_out.append(shares.key.unit)
            continue
        for group, found in shares.placed:
            if group.kind in kinds:
                place = (group.units[0], len(group), shares.key.moment.position)
                groups.setdefault(place, group)
                sums[place] = sums.get(place, torch.zeros_like(found)) + found * (increase / net)
    totals = [
        Total(groups[place].units[index], place[2], score)
        for place, scores in sums.items()
        for score, index in zip(*(best.tolist() for best in scores.topk(min(top, len(scores)))), strict=True)
    ]
    return sorted(totals, key=lambda t: (-t.score, t.unit.sort_key, t.position))[:top], left_out
