"""Interchange in a learned subspace: does a subspace of one point hold a variable that a counterfactual changes?

A counterfactual is a base prompt, a source prompt, and the answer that the base should have if the variable had the
source's value. With orthonormal directions R [k, width] at one point and position the base run goes on with

    h  <-  h_base + (h_source - h_base) R^T R

and the R is sought under which it gives the expected answers: cross-entropy, Adam, R kept orthogonal by
`torch.nn.utils.parametrizations.orthogonal` (distributed alignment search: Geiger et al. 2023, "Finding alignments
between interpretable causal variables and distributed neural representations"). Nothing but R has gradients.

Accuracy is that on counterfactuals that were not trained on, beside what others of the same size do: random subspaces,
and dormant directions, those along which the point varies least; and beside no interchange and that of the full vector.
A subspace found by training may work through directions that the model does not use itself (Makelov et al. 2023, "Is
this the subspace you are looking for?"); where dormant directions do as well as learned ones, nothing was found.

The verdict is `found` if the lower end of the 95 % interval (Wilson) of the accuracy is above the accuracy of every
control of the same size and of no interchange, else `not found`.

Cost: `steps` forward and backward passes of a batch; runs are whole forward passes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal

from mainstem.causal.changes import Pass, by_token
from mainstem.causal.gradients import in_spite_of_changes
from mainstem.causal.pieces import Entries, PieceMap
from mainstem.errors import LevelRefusedError, PairError, PositionError, UsageError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Tap, tapped
from mainstem.points import Point

BATCH = 64
"""Rows of one batch where nothing is learned."""


@dataclass(frozen=True)
class Counterfactual:
    """Token ids of the base and the source, and the token that the base gives with the source's variable."""

    base: tuple[int, ...]
    source: tuple[int, ...]
    expected: int


@dataclass(frozen=True)
class Control:
    """How often the expected answer is the likeliest one under another interchange: mean and largest over draws."""

    name: str
    draws: int
    mean: float
    max: float


@dataclass(frozen=True, eq=False)
class Subspace:
    """A learned subspace, and what it does on held-out counterfactuals.

    Attributes:
        at: the point's address.
        positions: where, counted from 0.
        directions: orthonormal rows; `Edit.replace_in` takes them.
        accuracy: how often the expected answer is the likeliest, on held-out counterfactuals.
        log_probability: of the expected answer there, mean, in nats.
        trained, held_out: how many counterfactuals.
        losses: of each step.
        controls: `random` and `dormant` subspaces of the same size, `unchanged` (no interchange), `full` vector.
        provenance: versions, model, dtype, seed and date, where a session made it.
    """

    at: str
    positions: tuple[int, ...]
    directions: Float[Tensor, "direction d_in"]
    accuracy: float
    log_probability: float
    trained: int
    held_out: int
    losses: tuple[float, ...]
    controls: tuple[Control, ...]
    provenance: Any = None

    @property
    def verdict(self) -> str:
        """`found` or `not found`."""
        rivals = max(control.max for control in self.controls if control.name != "full")
        return "found" if lower_bound(self.accuracy, self.held_out) > rivals else "not found"

    def overlap(self, directions: Float[Tensor, "direction d_in"]) -> float:
        """The mean squared cosine of the subspace with the span of other directions: 1 if it is in there, 0 if across."""
        basis = torch.linalg.qr(torch.atleast_2d(directions).to(self.directions).T).Q
        return float((self.directions @ basis).pow(2).sum() / len(self.directions))


@dataclass(frozen=True)
class Training:
    """How a subspace is learned: its size, steps of Adam, counterfactuals of each step, learning rate."""

    size: int = 1
    steps: int = 200
    batch: int = 32
    rate: float = 0.02


def lower_bound(share: float, count: int, z: float = 1.96) -> float:
    """The lower end of Wilson's interval of a share of `count`."""
    centre, spread = share + z * z / (2 * count), z * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return (centre - spread) / (1 + z * z / count)


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
            raise LevelRefusedError(f"No subspace of {at}", reason="it is not one vector at each position")
        self.model, self.piece, self.at, self.position, self.forward = model, pieces[0], at, position, forward
        self.places = torch.tensor(list(positions))
        entries = self.piece.entries
        self.entries = torch.arange(self.piece.width) if entries is None else entries
        self.device = next(model.parameters()).device

    def values(self, ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch destination d_in"]:
        """What the point is at the positions, in plain runs."""
        found: list[Tensor] = []

        def watch(now: Pass) -> Tap:
            def tap(leaves) -> None:
                tokens = by_token(leaves[self.piece.site.slot], self.piece.site, now)[1]
                found.append(tokens[self._where(tokens)])

            return tap

        with torch.no_grad():
            for part in ids.split(BATCH):
                self._run(part, watch(Pass(*part.shape)))
        return torch.cat(found)

    def logits(
        self,
        ids: Int[Tensor, "batch pos"],
        sources: Float[Tensor, "batch destination d_in"],
        directions: Float[Tensor, "direction d_in"] | None,
    ) -> Float[Tensor, "batch d_vocab"]:
        """Those of the base runs after the interchange; without directions of the full vector."""
        now = Pass(*ids.shape)

        def tap(leaves):
            out, tokens = by_token(leaves[self.piece.site.slot], self.piece.site, now)
            where = self._where(tokens)
            change = sources.to(tokens) - tokens[where]
            if directions is not None:
                own = directions.to(tokens)
                change = change @ own.T @ own
            tokens[where] = tokens[where] + change
            new = list(leaves)
            new[self.piece.site.slot] = out
            return new

        return self._run(ids, tap)

    def _run(self, ids: Int[Tensor, "batch pos"], tap: Tap) -> Float[Tensor, "batch d_vocab"]:
        with tapped(self.model, [(self.piece.site, tap)]):
            result = self.model(input_ids=ids, **self.forward)
        return (result.logits if hasattr(result, "logits") else result)[:, self.position]

    def _where(self, tokens: Tensor) -> tuple:
        return slice(None), self.places.to(tokens.device)[:, None], self.entries.to(tokens.device)[None]


def learn(
    interchange: Interchange,
    examples: Sequence[Counterfactual],
    training: Training,
    held_out: float = 0.3,
    draws: int = 5,
    seed: int = 0,
) -> Subspace:
    """Learns a subspace on some counterfactuals and tries it on the others.

    Args:
        interchange: the model and the point.
        examples: prompts of equal length.
        training: how to learn.
        held_out: the share of the counterfactuals that are kept for the trial.
        draws: how many random subspaces to try.
        seed: of the split, the start, the batches and the draws.

    Raises:
        UsageError: if there are too few counterfactuals to train and to try, or a number makes no sense.
        PairError: if prompts are not of equal length.
        RunError: if the model cannot be differentiated.
    """
    data = _Data(interchange, examples)
    _check(training, draws, held_out, interchange)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(examples), generator=generator)
    count = round(held_out * len(examples))
    if not 0 < count < len(examples):
        raise UsageError(f"{len(examples)} counterfactuals cannot be split", None, "Give more of them.")
    tried, used = order[:count], order[count:]
    directions, losses = _train(data, used, training, generator)
    right, log_p = data.outcome(tried, directions)
    return Subspace(
        at=str(interchange.at),
        positions=tuple(interchange.places.tolist()),
        directions=directions,
        accuracy=right,
        log_probability=log_p,
        trained=len(used),
        held_out=count,
        losses=tuple(losses),
        controls=_controls(data, used, tried, training.size, draws, generator),
    )


class _Data:
    """Counterfactuals as tensors, with the sources' values at the point."""

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


def _check(training: Training, draws: int, held_out: float, interchange: Interchange) -> None:
    width = len(interchange.entries)
    if not 0 < training.size < width:
        raise UsageError(
            f"A subspace of {training.size} of the {width} dimensions of {interchange.at} says nothing",
            None,
            f"Give a size from 1 to {width - 1}.",
        )
    if min(training.steps, training.batch, draws) < 1 or not 0 < held_out < 1 or not training.rate > 0:
        raise UsageError(
            "Learning needs 1 or more steps, draws and rows of a batch, a rate above 0, a held-out share inside 0 to 1"
        )


def _train(
    data: _Data, used: Int[Tensor, " row"], training: Training, generator: torch.Generator
) -> tuple[Float[Tensor, "direction d_in"], list[float]]:
    width = data.own.shape[-1]
    dtype = torch.promote_types(data.own.dtype, torch.float32)
    rotation = nn.Linear(width, training.size, bias=False, device="meta").to_empty(device=data.own.device).to(dtype)
    with torch.no_grad():
        rotation.weight.copy_(_random(width, training.size, generator))
    orthogonal(rotation)
    parameters = list(rotation.parameters())
    optimiser = torch.optim.Adam(parameters, lr=training.rate)
    losses = []
    for _ in range(training.steps):
        chosen = used[torch.randint(len(used), (training.batch,), generator=generator)]
        loss, slopes = in_spite_of_changes(_differentiating(data, chosen, rotation, parameters))
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.grad = slope
        optimiser.step()
        losses.append(loss)
    return rotation.weight.detach(), losses


def _differentiating(
    data: _Data, chosen: Int[Tensor, " row"], rotation: nn.Linear, parameters: list[nn.Parameter]
) -> Callable[[], tuple[float, tuple[Tensor, ...]]]:
    def differentiate() -> tuple[float, tuple[Tensor, ...]]:
        with torch.enable_grad():
            loss = F.nll_loss(data.log_p(chosen, rotation.weight), data.expected[chosen])
            return float(loss.detach()), torch.autograd.grad(loss, parameters)

    return differentiate


def _controls(
    data: _Data,
    used: Int[Tensor, " row"],
    tried: Int[Tensor, " row"],
    size: int,
    draws: int,
    generator: torch.Generator,
) -> tuple[Control, ...]:
    width = data.own.shape[-1]
    pooled = torch.cat([data.own[used], data.sources[used]]).flatten(0, 1).double()
    varying = torch.linalg.eigh(torch.cov(pooled.T)).eigenvectors.T  # the least first
    sets: dict[str, list[Tensor | None]] = {
        "random": [_random(width, size, generator) for _ in range(draws)],
        "dormant": [varying[:size]],
        "unchanged": [torch.zeros(1, width)],
        "full": [None],
    }
    made = {name: [data.outcome(tried, directions)[0] for directions in own] for name, own in sets.items()}
    return tuple(Control(name, len(own), sum(own) / len(own), max(own)) for name, own in made.items())


def _random(width: int, size: int, generator: torch.Generator) -> Float[Tensor, "direction d_in"]:
    """Orthonormal rows."""
    return torch.linalg.qr(torch.randn(width, size, generator=generator, dtype=torch.float64)).Q.T
