"""What turns with the stream in one recording, from the writes on; `turning` has the idea and the words."""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, count

from torch import Tensor

from mainstem.errors import RefusedError
from mainstem.model.discovery import expand
from mainstem.model.equivariance import BLIND, Reflections
from mainstem.model.program import Program, dependents, extract, one_call
from mainstem.model.recording import Call, Frame, Recording, Value
from mainstem.model.sites import SiteFinder
from mainstem.model.stream import PRODUCTS, StreamWalk, is_weight_product
from mainstem.model.turning import Bracket, Gains, Place, Turn, Turning
from mainstem.model.turning_gains import GainBook, factors, is_vector
from mainstem.model.turning_makers import MAX_TOGETHER, Found, Makers, Mark
from mainstem.model.turning_places import place_of, same_values, settled, weights_of, where

MAX_OPEN = 40


class Spreading:
    """The marks of one recording, spread until nothing changes.

    Args:
        recording: of one run.
        walk: over its stream.
    """

    def __init__(self, recording: Recording, walk: StreamWalk) -> None:
        self.walk = walk
        self.finder = SiteFinder(recording, walk.positions)
        self.reflections = Reflections(walk.width)
        self.marks: dict[int, Mark] = {}
        self.places: dict[int, tuple[Place, ...]] = {}
        self.open: dict[int, tuple[Value, ...]] = {}
        self.openers: dict[int, Call] = {}
        self.plain: list[Place] = []
        self.decided: dict[int, set[int]] = defaultdict(set)
        self.stream: set[int] = set()
        self.gains = GainBook(walk.width)
        self.makers = Makers(self.reflections, self.marks, self.places)
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
        kept = [bracket for gain in self.gains.found if gain.kept for bracket in gain.brackets]
        folded = tuple(gain for gain in self.gains.found if not gain.kept)
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
        self.marks[value.id] = Mark(axis, gains)
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
        found = self.makers.behind(leaf, axis, None)
        operands = leaf.call.operands() if leaf.call is not None else []
        if found is None and not any(o.id in self.marks or o.id in self.open for o in operands):
            self.brackets.append(Bracket((), ((self.finder.site(leaf, whole=True), axis),), where(leaf.call)))
            self._mark(leaf, axis)
        elif found is not None:
            self._commit(found)
            self.turns.extend(Turn(place) for place in self.places[leaf.id])

    def _commit(self, found: Found) -> None:
        for value_id, behind in found.items():
            self.places[value_id] = behind.places
            if value_id in self.marks:
                self._keep(self.marks[value_id].gains)
            else:
                self._mark(behind.value, behind.axis)

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
                if same_values(operand, result):
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
        for chosen in self.makers.choices(call, MAX_TOGETHER):
            if any(operand.id in marked for operand, _ in chosen):
                continue
            program = one_call(result, [*sources, *(operand for operand, _ in chosen)])
            inputs = [*self._inputs(sources), *((operand.tensor, axis) for operand, axis in chosen)]
            answer = self.reflections.turns(program, inputs)
            found = None if answer is None else self.makers.all_behind(chosen, call.frame)
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
        every = {o.id: o for c in calls for o in c.operands() if is_vector(o, self.walk.width)}
        axis = self.marks[source.id].axis
        for factor, bias, made in factors(result, (source, axis), list(every.values()), opened, self.reflections):
            found = {} if bias is None else self.makers.behind(bias, -1, call.frame)
            if found is None or factor.id in self.marks:
                continue
            self._decide(result, [] if bias is None else [bias])
            self._commit(found)
            self._note_gain(call, result, source, factor, bias, made, opened)
            return True
        return False

    def _note_gain(
        self, call: Call, result: Value, source: Value, factor: Value, bias: Value | None, axis: int, opened: bool
    ) -> None:
        gain = self.gains.gain(factor, call)
        carried = self.marks[source.id].gains
        if carried:
            self._keep(carried)
            carried = ()
        if not opened and result.slot >= 0 and call.frame is not None:
            gain.brackets.append(self._bracket(call, result, [source], axis))
        if bias is not None:
            self.turns.extend(Turn(place, (), (gain, *carried), gain, where(call)) for place in self.places[bias.id])
        self._mark(result, axis, (gain, *carried))

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
        made = call.site("result", result.slot)
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
                "a rotation can be undone only in matrices that read the stream",
            )
        self.open[result.id] = tuple(sources)
        self.openers[result.id] = first
        self._spread(result)
