"""Finding what turns with the stream in one recorded forward pass; `turning` has the idea and the words."""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations, count, product
from typing import Any

import torch
from torch import Tensor

from mainstem.errors import NoLanguageHeadError, RefusedError
from mainstem.model.behaviour import affine
from mainstem.model.discovery import expand, probe_ids
from mainstem.model.equivariance import BLIND, Reflections
from mainstem.model.experts import data_operand
from mainstem.model.hooks import Site
from mainstem.model.program import Program, dependents, extract, one_call
from mainstem.model.recorder import Call, Frame, Recording, Value, record
from mainstem.model.sites import SiteFinder
from mainstem.model.stream import PRODUCTS, StreamWalk, find_head, find_root, is_weight_product
from mainstem.model.turning import Bracket, Gain, Gains, Place, Turn, Turning

MAX_OPEN = 40
MAX_TOGETHER = 2
MAX_BEHIND = 30


@torch.no_grad()
def find_turning(model: torch.nn.Module, **forward: Any) -> Turning:
    """How to rotate a copy of a causal language model.

    Args:
        model: the module, in evaluation mode; it is run once on random tokens and left as it was.
        forward: keyword arguments for its forward call, besides the token ids.

    Raises:
        NoLanguageHeadError: the run returns no logits.
        ParallelStreamsError: the model has several streams.
        RefusedError: something reads the stream that is no matrix; names the place.
    """
    ids = probe_ids(model)
    recording = record(model, ids, **forward)
    try:
        logits = recording.result["logits"]
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            raise NoLanguageHeadError("The model returns no logits over a vocabulary", type(model).__name__)
        walk, root = find_root(recording, find_head(recording, logits)[2], ids.shape[1])
        found = _Search(recording, walk).run(root)
        _check_seen(model, recording, found.turns)
        return found
    finally:
        recording.release()


def _check_seen(model: torch.nn.Module, recording: Recording, turns: Sequence[Turn]) -> None:
    """Refuses a tensor that no recorded token used, where its like in a neighbouring module turns."""

    def kind(name: str) -> str:
        return ".".join("" if word.isdigit() else word for word in name.split("."))

    used = {id(value.holder) for value in recording.values if value.parameter is not None}
    turned = {kind(str(turn.place)) for turn in turns}
    for name, parameter in model.named_parameters():
        if id(parameter) not in used and kind(name) in turned:
            raise RefusedError(
                "No token of the recorded run used this tensor, and its like turns",
                name,
                "It cannot be known how it does.",
            )


@dataclass(frozen=True, eq=False)
class _Mark:
    """That a value turns along an axis, and the gains it carries that what reads it is to take over."""

    axis: int
    gains: Gains = ()


@dataclass(frozen=True, eq=False)
class _Behind:
    """A value that must turn, along which axis, and the tensors of the model that make it turn."""

    value: Value
    axis: int
    places: tuple[Place, ...]


class _Search:
    """The marks of one recording, spread until nothing changes."""

    def __init__(self, recording: Recording, walk: StreamWalk) -> None:
        self.walk = walk
        self.finder = SiteFinder(recording, walk.positions)
        self.reflections = Reflections(walk.width)
        self.marks: dict[int, _Mark] = {}
        self.places: dict[int, tuple[Place, ...]] = {}
        self.open: dict[int, tuple[Value, ...]] = {}
        self.openers: dict[int, Call] = {}
        self.plain: list[Place] = []
        self.decided: dict[int, set[int]] = defaultdict(set)
        self.stream: set[int] = set()
        self.gains: dict[int | str, Gain] = {}
        self.turns: list[Turn] = []
        self.brackets: list[Bracket] = []
        self.queue: list[tuple[int, int, Value | Call]] = []
        self.number = count()
        self.users: dict[int, dict[int, Call]] = defaultdict(dict)
        for value in recording.values:
            if value.call is not None:
                for operand in value.call.operands():
                    self.users[operand.id][id(value.call)] = value.call

    def run(self, root: Value) -> Turning:
        """From the writes to everything that uses the stream."""
        values = expand(self.walk, root)
        self.stream = {value.id for value in values}
        for value in values:
            if not self.walk.step(value).terms:
                heapq.heappush(self.queue, (value.id, -1, value))
        while self.queue:
            one = heapq.heappop(self.queue)[2]
            if isinstance(one, Value):
                self._write(one)
            else:
                for result in list(one.outputs):
                    self._meet(one, result)
        turns = settled(self.turns, self.plain)
        kept = [bracket for gain in self.gains.values() if gain.kept for bracket in gain.brackets]
        folded = tuple(gain for gain in self.gains.values() if not gain.kept)
        brackets = tuple(dict.fromkeys([*self.brackets, *kept]))
        plain = tuple(dict.fromkeys(self.plain))
        return Turning(self.walk.width, self.reflections.centred, turns, folded, brackets, plain)

    # --- marking ---

    def _mark(self, value: Value, axis: int, gains: Gains = ()) -> None:
        known = self.marks.get(value.id)
        if known is not None and known.axis != axis:
            raise RefusedError("A value of the stream turns along two axes", where(value.call))
        if known is not None and known.gains == gains:
            return
        if known is not None:
            self._keep(known.gains + gains)
            gains = ()
        self.marks[value.id] = _Mark(axis, gains)
        self._spread(value)

    def _spread(self, value: Value) -> None:
        """Everything that uses the value is to be asked, in the order of the run."""
        for call in self.users.get(value.id, {}).values():
            if call.outputs:
                heapq.heappush(self.queue, (min(v.id for v in call.outputs), next(self.number), call))

    def _keep(self, gains: Gains) -> None:
        for gain in gains:
            gain.kept = True

    def _common(self, sources: Sequence[Value]) -> Gains:
        """The gains that all sources carry; where they differ none is folded."""
        carried = {self.marks[source.id].gains for source in sources}
        if len(carried) == 1:
            return carried.pop()
        self._keep(tuple(chain(*carried)))
        return ()

    def _inputs(self, sources: Sequence[Value]) -> list[tuple[Tensor, int]]:
        return [(source.tensor, self.marks[source.id].axis) for source in sources]

    # --- backwards: what makes a value turn ---

    def _write(self, leaf: Value) -> None:
        """A write turns with the tensors that make it, or else while the model runs."""
        axis = self.reflections.axes(leaf.shape)[0]
        found = self._behind(leaf, axis, None)
        operands = leaf.call.operands() if leaf.call is not None else []
        if found is None and not any(o.id in self.marks or o.id in self.open for o in operands):
            self.brackets.append(Bracket((), ((self.finder.site(leaf, whole=True), axis),), where(leaf.call)))
            self._mark(leaf, axis)
        elif found is not None:
            self._commit(found)
            self.turns.extend(Turn(place) for place in self.places[leaf.id])

    def _commit(self, found: dict[int, _Behind]) -> None:
        for value_id, behind in found.items():
            self.places[value_id] = behind.places
            if value_id in self.marks:
                self._keep(self.marks[value_id].gains)
            else:
                self._mark(behind.value, behind.axis)

    def _behind(self, value: Value, axis: int, frame: Frame | None, depth: int = 0) -> dict[int, _Behind] | None:
        """Everything that must turn so that `value` does, itself last; None if the model's tensors do not make it."""
        known = self.marks.get(value.id)
        if known is not None:
            return {value.id: _Behind(value, axis, self.places.get(value.id, ()))} if known.axis == axis else None
        if value.parameter is not None and not value.active:
            return {value.id: _Behind(value, axis, (place_of(value, axis, frame),))}
        call = value.call
        if call is None or depth > MAX_BEHIND:
            return None
        frame = call.frame or frame
        for chosen in self._candidates(call, value, axis):
            found: dict[int, _Behind] = {}
            for operand, own in chosen:
                more = self._behind(operand, own, frame, depth + 1)
                if more is None:
                    break
                found |= more
            else:
                places = dict.fromkeys(chain(*(found[operand.id].places for operand, _ in chosen)))
                return found | {value.id: _Behind(value, axis, tuple(places))}
        return None

    def _candidates(self, call: Call, value: Value, axis: int):
        """The smallest choices of operands with which a result turns along `axis`."""
        if call.func is None:  # the value again, seen through another tensor
            yield from ([(o, axis)] for o in call.operands() if _same(o, value))
            return
        for chosen in self._choices(call, 1 + MAX_TOGETHER):
            program = one_call(value, [operand for operand, _ in chosen])
            if self.reflections.turns(program, [(operand.tensor, own) for operand, own in chosen]) == axis:
                yield chosen

    def _choices(self, call: Call, most: int):
        """Operands that could turn, unmarked or marked, few first, each with each of its axes of the stream's size."""
        operands = [(o, self.reflections.axes(o.shape)) for o in call.operands() if o.tensor.is_floating_point()]
        able = [(operand, axes) for operand, axes in operands if axes]
        for size in range(1, most + 1):
            for some in combinations(able, size):
                for axes in product(*(axes for _, axes in some)):
                    yield [(operand, axis) for (operand, _), axis in zip(some, axes, strict=True)]
        if len(able) > most:  # many parts joined
            yield [(operand, axes[0]) for operand, axes in able]

    # --- forwards: what uses a value that turns ---

    def _meet(self, call: Call, result: Value) -> None:
        """Asks what becomes of one result of a call that uses values that turn."""
        operands = call.operands()
        marked = [o for o in operands if o.id in self.marks]
        opened = [o for o in operands if o.id in self.open]
        sources = list({v.id: v for v in [*marked, *chain(*(self.open[o.id] for o in opened))]}.values())
        if {source.id for source in sources} <= self.decided[result.id]:
            return
        self.decided[result.id] = {source.id for source in sources}
        if call.func is None:
            for operand in marked:
                if _same(operand, result):
                    self._mark(result, self.marks[operand.id].axis, self.marks[operand.id].gains)
            return
        if not opened and is_weight_product(call) and not weights_of(call, sources):  # it needs its weight to turn too
            if not self._together(call, result, sources):
                self._leave_open(call, result, sources)
            return
        program = extract(result, sources) if opened else one_call(result, sources)
        answer = self.reflections.turns(program, self._inputs(sources))
        if answer == BLIND:
            self._blind(call, program, sources)
        elif answer is not None:
            self._turned(result, answer, program, sources)
        elif not result.active:
            return  # made of the model's tensors alone, and used, if at all, in the old basis
        elif not any(source.active for source in sources):
            self.plain.extend(place_of(source, self.marks[source.id].axis, call.frame) for source in sources)
        elif not (
            (not opened and self._together(call, result, sources))
            or self._gained(call, result, sources, bool(opened))
            or (not opened and self._bracketed(call, result, marked))
        ):
            self._leave_open(call, result, sources)

    def _blind(self, call: Call, program: Program | None, sources: list[Value]) -> None:
        """A product of stream values with weights reads them; anything else must see no gain."""
        weights = weights_of(call, sources)
        streams = [source for source in sources if source not in weights]
        assert program is not None
        if streams and not weights and self.reflections.ignores(program, self._inputs(sources)):
            return
        gains = self._common(streams) if streams else ()
        if weights:
            self.turns.extend(Turn(p, gains) for weight in weights for p in self._places(weight, call.frame))
        else:
            self._keep(gains)

    def _places(self, weight: Value, frame: Frame | None) -> tuple[Place, ...]:
        """The tensors of the model that make a weight turn, as the module that uses it holds them."""
        if weight.parameter is not None and not weight.active:
            return (place_of(weight, self.marks[weight.id].axis, frame),)
        makers = [o for o in weight.call.operands() if o.id in self.marks] if weight.call is not None else []
        return tuple(dict.fromkeys(chain(*(self._places(maker, frame) for maker in makers))))

    def _turned(self, result: Value, axis: int, program: Program | None, sources: list[Value]) -> None:
        gains = self._common(sources)
        assert program is not None
        if gains and not self.reflections.scales(program, self._inputs(sources), axis):
            self._keep(gains)
            gains = ()
        self._mark(result, axis, gains)

    def _together(self, call: Call, result: Value, sources: list[Value]) -> bool:
        """Whether the call turns, or is blind, if some more of its operands turn, and they can."""
        marked = {source.id for source in sources}
        for chosen in self._choices(call, MAX_TOGETHER):
            if any(operand.id in marked for operand, _ in chosen):
                continue
            program = one_call(result, [*sources, *(operand for operand, _ in chosen)])
            inputs = [*self._inputs(sources), *((operand.tensor, axis) for operand, axis in chosen)]
            answer = self.reflections.turns(program, inputs)
            found = None if answer is None else self._all_behind(chosen, call.frame)
            if answer is None or found is None:
                continue
            gains = self._common(sources)
            self._decide(result, [operand for operand, _ in chosen])
            self._commit(found)
            if answer != BLIND and any(operand.active for operand, _ in chosen):
                self._keep(gains)
            places = dict.fromkeys(chain(*(self.places[operand.id] for operand, _ in chosen)))
            reads = answer == BLIND
            self.turns.extend(Turn(place, gains if reads else (), () if reads else gains) for place in places)
            if answer != BLIND:
                self._mark(result, answer, gains)
            return True
        return False

    def _all_behind(self, chosen: Sequence[tuple[Value, int]], frame: Frame | None) -> dict[int, _Behind] | None:
        found: dict[int, _Behind] = {}
        for operand, axis in chosen:
            more = self._behind(operand, axis, frame)
            if more is None:
                return None
            found |= more
        return found

    def _decide(self, result: Value, more: Sequence[Value]) -> None:
        """What is marked because of this result is no reason to ask about it again."""
        self.decided[result.id] |= {value.id for value in more}

    # --- factors for each dimension ---

    def _gained(self, call: Call, result: Value, sources: list[Value], opened: bool) -> bool:
        """Whether the result is a factor for each dimension times something that turns, plus perhaps a bias."""
        streams = [source for source in sources if source.active]
        if len(streams) != 1:
            return False
        (source,) = streams
        calls = [v.call for v in dependents(result, sources) if v.call is not None] if opened else [call]
        vectors = list({o.id: o for c in calls for o in c.operands() if self._is_vector(o)}.values())
        for factor in (v for v in vectors if v.id not in self.marks):
            for bias in (None, *(v for v in vectors if v is not factor)):
                axis = self._factor_axis(result, source, factor, bias, opened)
                if axis is None:
                    continue
                found = {} if bias is None else self._behind(bias, -1, call.frame)
                if found is None:
                    continue
                self._decide(result, [] if bias is None else [bias])
                self._commit(found)
                self._note_gain(call, result, source, factor, bias, axis, opened)
                return True
        return False

    def _is_vector(self, value: Value) -> bool:
        tensor = value.tensor
        whole = tensor.dim() > 0 and tensor.numel() == self.walk.width == tensor.shape[-1]
        return whole and tensor.is_floating_point() and not value.active

    def _factor_axis(self, result: Value, source: Value, factor: Value, bias: Value | None, opened: bool) -> int | None:
        inputs = [source, factor] if bias is None else [source, factor, bias]
        program = extract(result, inputs) if opened else one_call(result, inputs)
        if program is None:
            return None
        shapes = [(v.tensor, self.marks[source.id].axis if v is source else -1) for v in inputs]
        axis = self.reflections.turns_with_ones(program, shapes)
        return axis if axis is not None and self.reflections.is_factor(program, shapes, axis) else None

    def _note_gain(
        self, call: Call, result: Value, source: Value, factor: Value, bias: Value | None, axis: int, opened: bool
    ) -> None:
        gain = self._gain(factor, call)
        carried = self.marks[source.id].gains
        if carried:
            self._keep(carried)
            carried = ()
        if not opened and result.slot >= 0 and call.frame is not None:
            gain.brackets.append(self._bracket(call, result, [source], axis))
        if bias is not None:
            self.turns.extend(Turn(place, (), (gain, *carried), gain, where(call)) for place in self.places[bias.id])
        self._mark(result, axis, (gain, *carried))

    def _gain(self, factor: Value, call: Call) -> Gain:
        """The gain that a factor is, the same one for the same parameter."""
        parameter, form = factor, None
        while parameter.parameter is None and parameter.call is not None and parameter.call.func is not None:
            vectors = [o for o in parameter.call.operands() if self._is_vector(o)]
            if len(vectors) != 1:
                break
            parameter = vectors[0]
        if parameter.parameter is None:
            value = factor.tensor.double().reshape(-1)
            return self.gains.setdefault(f"value {factor.id}", Gain(None, value, None, where(call), kept=True))
        place = place_of(parameter, -1, call.frame)
        value = parameter.tensor.double().reshape(-1)
        unit: Tensor | None = torch.ones_like(value)
        if parameter is not factor:
            program = extract(factor, [parameter])
            form = None if program is None else affine(program.in_float64, [parameter.tensor.double()], len(value))
            slope = None if form is None else form.factors[0].reshape(-1)
            if form is None or slope is None or not bool((slope != 0).all()):
                value, unit = factor.tensor.double().reshape(-1), None
            else:
                constant = form.constant.reshape(-1)
                value, unit = constant + slope * value, (1 - constant) / slope
        same = [gain for gain in self.gains.values() if gain.place == place]
        found = next((gain for gain in same if torch.equal(gain.value, value)), None)
        if found is None:
            found = self.gains[len(self.gains)] = Gain(place, value, unit, where(call), kept=unit is None)
            self._keep((*same, found) if same else ())  # one parameter, two factors: it cannot make both one
        return found

    def _bracketed(self, call: Call, result: Value, marked: list[Value]) -> bool:
        """A value of the stream that nothing else explains is made in the old basis."""
        if result.id not in self.stream or result.slot < 0 or call.frame is None:
            return False
        axis = self.reflections.axes(result.shape)[0]
        self._keep(tuple(chain(*(self.marks[value.id].gains for value in marked))))
        self.brackets.append(self._bracket(call, result, marked, axis))
        self._mark(result, axis)
        return True

    def _bracket(self, call: Call, result: Value, marked: list[Value], axis: int) -> Bracket:
        assert call.frame is not None
        inputs = tuple((self.finder.arguments(call, value), self.marks[value.id].axis) for value in marked)
        made = Site(call.frame.path, call.frame.call, "result", result.slot, call.key, call.ordinal)
        return Bracket(inputs, ((made, axis),), where(call))

    def _leave_open(self, call: Call, result: Value, sources: list[Value]) -> None:
        """Neither turned nor blind yet: what follows may close it."""
        steps = len(dependents(result, sources))
        opened = [o for o in call.operands() if o.id in self.open]
        first = self.openers[opened[0].id] if opened else call
        if call.name in PRODUCTS or steps > MAX_OPEN or not result.tensor.is_floating_point():
            raise RefusedError(
                f"The stream is used in its own basis by {first.name}, and not by a matrix alone",
                where(first),
                "A rotation can be undone only in matrices that read the stream; this model is not rotated.",
            )
        self.open[result.id] = tuple(sources)
        self.openers[result.id] = first
        self._spread(result)


def settled(turns: Sequence[Turn], plain: Sequence[Place]) -> tuple[Turn, ...]:
    """Each tensor once; where two reads of one tensor would fold different gains, none is folded.

    Raises:
        RefusedError: a bias that would have to be divided by a gain of 0, a gain that can neither be folded nor left
            in the old basis, or a tensor that turns along two axes.
    """
    changed = True
    while changed:
        changed = False
        forms: dict[Place, set[tuple]] = defaultdict(set)
        for turn in turns:
            forms[turn.place].add(turn.folded())
        for turn in turns:
            if len(forms[turn.place]) > 1:
                for gain in (*turn.gains, *turn.over):
                    changed, gain.kept = changed or not gain.kept, True
    found: dict[Place, Turn] = {}
    for turn in turns:
        if turn.within is None or not turn.within.kept:
            found.setdefault(turn.place, turn)
    used = {(place.module, place.attribute) for place in plain}
    for place in found:
        if (place.module, place.attribute) in used:
            raise RefusedError("A tensor is used both by the stream and elsewhere", str(place))
    shapes = {(place.module, place.attribute): place for place in found}
    if len(shapes) != len(found):
        twice = next(place for place in found if shapes[(place.module, place.attribute)] is not place)
        raise RefusedError("A tensor turns along two axes", str(twice), "Such a model cannot be rotated.")
    for gain in {id(g): g for turn in turns for g in (*turn.gains, *turn.over)}.values():
        if gain.kept and not gain.brackets:
            raise RefusedError(
                "A factor for each dimension cannot be folded into what reads the stream",
                gain.where,
                "Such a model cannot be rotated.",
            )
    return tuple(found.values())


def weights_of(call: Call, sources: Sequence[Value]) -> list[Value]:
    """Which operands of a product are weights, also where they were chosen by token."""
    if call.name not in PRODUCTS:
        return []
    own = [source for source in sources if source in call.operands()]
    constant = [source for source in own if not source.active]
    if constant:
        return constant
    data = data_operand(call)
    return [] if data is None else [source for source in own if source is not data]


def place_of(value: Value, axis: int, frame: Frame | None) -> Place:
    """Where the model holds a parameter or buffer: the innermost module around its use with it, else by its name."""
    tensor = value.holder
    rows = tensor.detach().movedim(axis, -1)
    geometry = (tuple(rows.shape), tuple(rows.stride()))
    for around in frame.stack() if frame is not None else []:
        for name, own in chain(around.module._parameters.items(), around.module._buffers.items()):
            if own is tensor:
                return Place(around.path, name, *geometry)
    assert value.parameter is not None
    module, _, name = value.parameter.rpartition(".")
    return Place(module, name, *geometry)


def where(call: Call | None) -> str:
    """The place of a call as a reader of the model's code finds it."""
    if call is None:
        return "the model"
    path = call.frame.path if call.frame is not None else ""
    return path or "the model"


def _same(a: Value, b: Value) -> bool:
    return a.shape == b.shape and a.tensor.dtype == b.tensor.dtype and torch.equal(a.tensor, b.tensor)
