"""A rotated copy of a model: R x flows where x flowed, and the same logits come out.

The copy's tensors that read or write the stream are turned (`mainstem.model.turning` says which and how), norm gains
are folded into the matrices behind their norms, and a tensor that two uses need in two forms (a tied embedding) becomes
two. What cannot be folded is turned back and forth while the copy runs: then `Rotated.running` must be around its runs.
The model itself is never changed.

Weights are turned in float64 and rounded once. Cost: a copy of the model and one product of every matrix with R.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mainstem.causal.evaluation import Run
from mainstem.causal.stream_points import StreamPoint, tap_at
from mainstem.errors import CertificateError, RefusedError
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.model.outputs import logits_of
from mainstem.model.turning import Bracket, Place, Turn, Turning
from mainstem.model.widened import widened
from mainstem.run.inputs import base_arguments

TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class Rotated:
    """A rotated copy.

    Attributes:
        model: the copy; by itself it computes the same only where nothing is turned while it runs.
        rotation: R, float64.
        turning: what was turned.
        untied: tensors that were one in the model and are two in the copy.
    """

    model: nn.Module
    rotation: Float[Tensor, "d_model d_model"]
    turning: Turning
    untied: tuple[Place, ...]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs of the copy inside are those of the rotated model."""
        taps = [tap for bracket in self.turning.brackets for tap in _taps(bracket, self.rotation)]
        with tapped(self.model, taps):
            yield

    def to(self, dtype: torch.dtype, like: nn.Module) -> "Rotated":
        """The same with parameters of another dtype and buffers of the dtypes that they have in `like`; a copy."""
        return replace(self, model=in_dtype(self.model, dtype, like, self.turning))

    @torch.no_grad()
    def logits(self, ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
        """The copy's logits."""
        with self.running():
            return logits_of(self.model(input_ids=ids, **base_arguments(self.model)))


def in_dtype(module: nn.Module, dtype: torch.dtype, like: nn.Module, turning: Turning) -> nn.Module:
    """A copy whose floating parameters are of a dtype, and whose buffers are of those that they have in `like`.

    `Module.to` would cast buffers too, such as the float32 frequencies that a bfloat16 model turns its positions with.
    Buffers that turn with the stream, such as a computed table of positions, are added to it and follow the parameters.
    """
    written = {str(turn.place) for turn in turning.turns}
    made, own = copy.deepcopy(module), dict(like.named_buffers(remove_duplicate=False))
    for parameter in made.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for name, buffer in made.named_buffers(remove_duplicate=False):
        if buffer.is_floating_point() and name in own:
            buffer.data = buffer.data.to(dtype if name in written else own[name].dtype)
    return made


def plain_run(module: nn.Module) -> Run:
    """Logits of a module as it is."""
    arguments, device = base_arguments(module), next(module.parameters()).device
    return lambda ids: logits_of(module(input_ids=ids.to(device), **arguments))


@torch.no_grad()
def rotated(
    model: nn.Module,
    turning: Turning,
    rotation: Float[Tensor, "d_model d_model"],
    dtype: torch.dtype | None = None,
) -> Rotated:
    """A copy of `model` in a rotated basis.

    Args:
        model: is left as it is.
        turning: what turns in it.
        rotation: R; with R 1 = 1 where `turning.centred`.
        dtype: of the copy; the model's own by default.

    Raises:
        RefusedError: the rotation does not fit, or a bias would be divided by a gain of 0; names the place.
    """
    _check_rotation(turning, rotation)
    made = copy.deepcopy(model)
    made = made if dtype is None else made.to(dtype)
    once, untied = _separated(made, turning)
    for turn in once:
        _turn(turn, turn.place.of(made), rotation)
    for gain in turning.gains:
        if gain.place is not None and gain.unit is not None:
            held = gain.place.of(made)
            held.copy_(gain.unit.to(held).reshape(held.shape))
    return Rotated(made, rotation, turning, untied)


def _check_rotation(turning: Turning, rotation: Tensor) -> None:
    if rotation.shape != (turning.d_model, turning.d_model):
        raise RefusedError(
            f"A rotation of {rotation.shape[0]} dimensions does not fit",
            f"the stream has {turning.d_model}",
            remedy="Make one of the stream's width.",
        )
    if turning.centred and not torch.allclose(rotation.sum(1), rotation.new_ones(()), rtol=0, atol=1e-9):
        raise RefusedError(
            "This model takes means over the stream, and the rotation does not keep the vector of ones",
            remedy="Make one with fix_ones.",
        )


def _turn(turn: Turn, held: Tensor, rotation: Tensor) -> None:
    """The rows of one tensor, in place; 2^24 numbers at a time, for the float64 copy of them."""
    for gain in turn.over:
        dead = (gain.value == 0) & (held.double().reshape(-1, held.shape[-1]) != 0).any(0)
        if not gain.kept and bool(dead.any()):
            raise RefusedError(
                f"A norm's gain is 0 at dimension {int(dead.nonzero()[0])}, where its bias is not",
                gain.where,
                "the bias would be divided by it",
            )
    scale, turned = turn.scale(), rotation.T.to(held.device)
    rows = held if held.dim() > 1 else held[None]
    for part in rows.split(max(1, 2**24 // max(1, rows[0].numel()))):
        wide = part.double()
        wide = wide if scale is None else torch.where(wide == 0, wide, wide * scale.to(wide))
        part.copy_(wide @ turned)


def _separated(model: nn.Module, turning: Turning) -> tuple[list[Turn], tuple[Place, ...]]:
    """Gives uses of one tensor that need it in different forms a tensor each.

    Returns what is to be turned, each tensor once, and where new tensors are.
    """
    uses: dict[int, list[Turn]] = defaultdict(list)
    for turn in turning.turns:
        uses[id(turn.place.held(model))].append(turn)
    once, untied = [], []
    plain = {id(place.held(model)) for place in turning.plain}
    for identity, turns in uses.items():
        forms: dict[tuple, list[Turn]] = defaultdict(list)
        for turn in turns:
            forms[(turn.place.size, turn.place.stride, turn.folded())].append(turn)
        for number, (first, *others) in enumerate(forms.values()):
            once.append(first)
            if number or identity in plain:
                own = first.place.held(model)
                fresh = own.detach().clone()
                own = nn.Parameter(fresh, own.requires_grad) if isinstance(own, nn.Parameter) else fresh
                for turn in (first, *others):
                    setattr(model.get_submodule(turn.place.module), turn.place.attribute, own)
                    untied.append(turn.place)
    return once, tuple(untied)


def _taps(bracket: Bracket, rotation: Tensor) -> Iterator[tuple[Site, Tap]]:
    """What a run does around one operation that stays in the old basis."""
    for sites, matrix in ((bracket.inputs, rotation.T), (bracket.results, rotation)):
        for site, axis in sites:
            yield site, _turning_tap(site.slot, axis, matrix)


def _turning_tap(slot: int, axis: int, matrix: Tensor) -> Tap:
    def tap(leaves):
        value = leaves[slot]
        turned = value.movedim(axis, -1) @ matrix.T.to(value)
        return [*leaves[:slot], turned.movedim(-1, axis), *leaves[slot + 1 :]]

    return tap


@torch.no_grad()
def difference(plain: nn.Module, other: Rotated, ids: Int[Tensor, "batch pos"]) -> float:
    """How far the logits of a float64 model and of its rotated copy are apart, relative to the largest logit.

    Casts to narrower numbers are lifted in both (`widened`), so that what is left is rounding.
    """
    with widened():
        expected, seen = logits_of(plain(input_ids=ids, **base_arguments(plain))), other.logits(ids)
    return float((seen - expected).abs().max() / expected.abs().max())


def check(plain: nn.Module, other: Rotated, ids: Int[Tensor, "batch pos"], points: Sequence[StreamPoint] = ()) -> float:
    """`difference`, refused where it is more than rounding.

    Args:
        plain: the model in float64.
        other: its rotated copy in float64.
        ids: tokens.
        points: states of the stream, by which the place is named.

    Raises:
        CertificateError: the rotated copy does not compute what the model does; names the first state that differs.
    """
    found = difference(plain, other, ids)
    if not found <= TOLERANCE:
        raise CertificateError(
            f"The rotated copy's logits are {found:.1e} off in float64",
            first_difference(plain, other, ids, points) or "after the last state of the stream",
            "Something there uses the stream otherwise than was seen; this model is not rotated.",
        )
    return found


@torch.no_grad()
def first_difference(
    plain: nn.Module, other: Rotated, ids: Int[Tensor, "batch pos"], points: Sequence[StreamPoint]
) -> str | None:
    """The name of the first state of the stream that is not the model's own, rotated; None if all are."""
    shape = (ids.shape[0], ids.shape[1])
    expected: dict[str, Tensor] = {}
    wrong: list[str] = []

    def keep(point: StreamPoint):
        return tap_at(point, lambda x: expected.__setitem__(point.name, x @ other.rotation.T), lambda: shape)

    def compare(point: StreamPoint):
        def see(x: Tensor) -> None:
            wanted = expected[point.name]
            if not bool((x - wanted).norm() <= TOLERANCE * wanted.norm()):
                wrong.append(point.name)

        return tap_at(point, see, lambda: shape)

    with widened(), tapped(plain, [keep(point) for point in points]):
        plain(input_ids=ids, **base_arguments(plain))
    with widened(), other.running(), tapped(other.model, [compare(point) for point in points]):
        other.model(input_ids=ids, **base_arguments(other.model))
    return wrong[0] if wrong else None
