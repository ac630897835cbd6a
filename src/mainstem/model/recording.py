"""What a recorded run is made of: module calls, function calls, and the values that they made and used."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from mainstem.model.function_taps import counted_by
from mainstem.model.hooks import Site
from mainstem.model.trees import leaves_of


@dataclass(eq=False, slots=True)
class Frame:
    """One call of one module; `by_name` says whether all its own calls of fused attention up to now were by name."""

    path: str
    call: int
    module: torch.nn.Module
    parent: "Frame | None"
    inputs: list["Value | None"] = field(default_factory=list)
    outputs: list["Value | None"] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)
    by_name: bool = True

    def stack(self) -> list["Frame"]:
        """This frame and those around it, innermost first."""
        frames, frame = [], self
        while frame is not None:
            frames.append(frame)
            frame = frame.parent
        return frames


@dataclass(eq=False, slots=True)
class Value:
    """A tensor as it was at one moment.

    `active` says that it depends on the token ids; `slot` is its place among the results of `call`, or -1 - k for the
    k-th leaf of the arguments where the call changed that in place.
    """

    id: int
    tensor: torch.Tensor
    holder: torch.Tensor
    call: "Call | None" = None
    slot: int = 0
    active: bool = False
    parameter: str | None = None
    overwritten: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self.tensor.shape)


@dataclass(eq=False, slots=True)
class Call:
    """One torch function call; tensors among `args` and `kwargs` are replaced by the `Value`s they were."""

    name: str
    func: Any
    args: tuple
    kwargs: dict
    frame: Frame | None
    ordinal: int
    by_name: bool = False
    outputs: list[Value] = field(default_factory=list)
    _operands: list[Value] = field(init=False)
    _active: list[Value] = field(init=False)

    def __post_init__(self) -> None:
        seen: dict[int, Value] = {}
        for leaf in leaves_of((self.args, self.kwargs)):
            if isinstance(leaf, Value):
                seen.setdefault(leaf.id, leaf)
        self._operands = list(seen.values())
        self._active = [value for value in self._operands if value.active]

    @property
    def key(self) -> str:
        """What the call is counted by."""
        return counted_by(self.name, self.args)

    def operands(self) -> list[Value]:
        """Distinct values among the arguments, in their order."""
        return list(self._operands)

    def active_operands(self) -> list[Value]:
        """Those of them that depend on the token ids."""
        return list(self._active)

    def site(self, where: Literal["arguments", "result"], slot: int, **more: bool) -> Site:
        """Where its arguments or its result can be seen.

        Raises:
            ValueError: if it happened outside of any module.
        """
        if self.frame is None:
            raise ValueError(f"{self.name} was called outside of any module")
        frame = self.frame
        return Site(frame.path, frame.call, where, slot, self.key, self.ordinal, by_name=self.by_name, **more)

    def inside(self, frame: Frame) -> bool:
        """Whether it happened in a module call, or in one that that made."""
        return self.frame is not None and frame in self.frame.stack()


@dataclass(eq=False)
class Recording:
    """Everything one run did, and the value of each tensor that it returned."""

    values: list[Value]
    frames: list[Frame]
    outputs: dict[int, Value]
    result: Any

    def value_of(self, tensor: torch.Tensor) -> Value | None:
        """The value that a returned tensor held at the end of the run."""
        return self.outputs.get(id(tensor))

    def release(self) -> None:
        """Lets go of every tensor now: values and calls refer to each other, and would wait for the cycle collector."""
        for value in self.values:
            if value.call is not None:
                value.call.outputs.clear()
                value.call = None
        for frame in self.frames:
            frame.inputs, frame.outputs, frame.parent = [], [], None
        self.values, self.frames, self.outputs = [], [], {}
