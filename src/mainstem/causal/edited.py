"""A model under edits: they are compiled to taps, and hold for every run inside the context.

The runs may be single forward passes or the steps of a generation with cached keys and values; each pass is told apart
by what the model is called with (`_Passes`). Contexts may be nested: all edits that hold are compiled together, the
outer ones first. Values from other runs are had when a context is entered, by one run for each source, under the edits
that hold then.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mainstem.causal.changes import Change, Pass, change_taps
from mainstem.causal.edit_methods import Knockout
from mainstem.causal.edit_plans import AnyChange, Planned, change_of, plan
from mainstem.causal.edit_values import InputsOf, source_values
from mainstem.causal.edits import Edit
from mainstem.causal.expert_changes import ExpertChange, expert_taps
from mainstem.causal.head_changes import HeadChange, head_taps
from mainstem.causal.scale_changes import ScaleChange, scale_taps
from mainstem.errors import EditError, PositionError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import tapped
from mainstem.run.inputs import CACHES

_open: "WeakKeyDictionary[torch.nn.Module, list[_Holding]]" = WeakKeyDictionary()
"""The contexts of each model that are open, the innermost last."""


@contextmanager
def edited(
    model: torch.nn.Module,
    anatomy: Anatomy,
    edits: Sequence[Edit],
    inputs_of: InputsOf,
    prompt: int | None = None,
) -> Iterator[None]:
    """Every run of the model inside is made under the edits, after those of an outer context.

    Args:
        model: the module; on leaving, also after an error, it is as it was.
        anatomy: its anatomy.
        edits: what to change. An empty list changes nothing, to the bit.
        inputs_of: makes inputs of what an edit names as its source.
        prompt: how many tokens count as the prompt; by default what the first pass of a generation holds.

    Raises:
        EditError: if an edit cannot be made, or would be lost.
        UnitError, LevelRefusedError: if the model has no such point.
        PositionError: during a run, if a position counted from the end is before the prompt.
    """
    contexts = _open.setdefault(model, [])
    outer = contexts[-1] if contexts else None
    plans = plan(anatomy, edits, outer.plans if outer else ())
    values = source_values(model, plans, inputs_of)
    changes = [
        change_of(planned.edit, piece, values.get((i, n)))
        for i, planned in enumerate(plans)
        for n, piece in enumerate(planned.pieces)
    ]
    inner = _Holding(model, anatomy, plans, changes, prompt, outer)
    with ExitStack() as stack:
        if outer is not None:
            outer.release()
            stack.callback(outer.hold)
        stack.callback(inner.release)
        inner.hold()
        contexts.append(inner)
        stack.callback(contexts.pop)
        yield
    inner.passes.warn([planned.edit for planned in plans])


@contextmanager
def unedited(model: torch.nn.Module) -> Iterator[None]:
    """Runs inside are those of the model itself, whatever edits hold outside."""
    contexts = _open.pop(model, [])
    if contexts:
        contexts[-1].release()
    try:
        yield
    finally:
        if contexts:
            contexts[-1].hold()
            _open[model] = contexts


@contextmanager
def part_of(model: torch.nn.Module, prompt: int) -> Iterator[None]:
    """Runs inside are of parts of one prompt of so many tokens: edits count positions from its end, and not the part's.

    Where a context was opened with a prompt's length of its own, that holds.
    """
    contexts = _open.get(model)
    if not contexts or contexts[-1].passes.given is not None:
        yield
        return
    passes = contexts[-1].passes
    passes.given = prompt
    try:
        yield
    finally:
        passes.given = None


def edits_of(model: torch.nn.Module) -> tuple[Edit, ...]:
    """The edits that hold now, in their order."""
    contexts = _open.get(model)
    return tuple(planned.edit for planned in contexts[-1].plans) if contexts else ()


class _Holding:
    """The taps of all edits that hold in one context; they can be released and held again."""

    def __init__(
        self,
        model: torch.nn.Module,
        anatomy: Anatomy,
        plans: list[Planned],
        changes: list[AnyChange],
        prompt: int | None,
        outer: "_Holding | None",
    ) -> None:
        self.model, self.anatomy = model, anatomy
        self.plans = [*(outer.plans if outer else ()), *plans]
        self.changes = [*(outer.changes if outer else ()), *changes]
        given = outer.passes.given if outer is not None and prompt is None else prompt
        self.passes = _Passes([planned.edit for planned in self.plans], given)
        self._stack = ExitStack()

    def hold(self) -> None:
        """Puts the taps on, in the order of the forward pass where they meet at one site.

        What a norm gave is rescaled before it is changed; a scale is taken of what is there after all changes; experts'
        neurons are changed before the write that sums them.
        """
        now = self.passes.now

        def of(kind: type) -> list[Any]:
            return [change for change in self.changes if isinstance(change, kind)]

        experts = self._stack.enter_context(expert_taps(self.model, self.anatomy, of(ExpertChange), now))
        watching, rescaling = scale_taps(of(ScaleChange), now)
        taps = [*experts, *rescaling, *change_taps(of(Change), now), *head_taps(of(HeadChange), now), *watching]
        self._stack.enter_context(tapped(self.model, taps, self.passes.begin))

    def release(self) -> None:
        """Takes them off."""
        self._stack.close()


class _Passes:
    """Describes each forward pass before it runs, and checks positions."""

    def __init__(self, edits: Sequence[Edit], prompt: int | None) -> None:
        self.edits, self.given = edits, prompt
        self.now = Pass(1, 0, prompt=prompt)
        self.count = self.longest = 0

    def begin(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """The model is called with these arguments."""
        ids = kwargs.get("input_ids", args[0] if args else None)
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        if ids is None:
            raise EditError("A model under edits was called without tokens", None, "Give input_ids or inputs_embeds.")
        cache = next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
        now = self.now
        came = now.offset + now.positions
        now.batch, now.positions = ids.shape[:2]
        now.offset = 0 if cache is None else _length(cache, came)
        now.padding = _padding(kwargs.get("attention_mask"))
        if now.offset == 0:
            now.prompt = self.given if self.given is not None else now.positions
        self.count += 1
        self.longest = max(self.longest, now.offset + now.positions)
        self._require_positions()

    def _require_positions(self) -> None:
        lengths = [(self.now.prompt or 0) - padding for padding in self.now.padding or (0,)]
        for edit in self.edits:
            first = min(edit.positions, default=0) if isinstance(edit.positions, tuple) else 0
            if first < -min(lengths):
                raise PositionError(
                    f"Position {first} is outside the prompt",
                    f"edit of {edit.at}; the prompt has {min(lengths)} tokens",
                )

    def warn(self, edits: Sequence[Edit]) -> None:
        """Says which edits named positions that no run had, as destinations or as sources."""
        for edit in edits if self.count else ():
            missed = missed_places(edit, self.longest)
            if missed:
                warnings.warn(f"The edit of {edit.at} changed nothing at {missed}: no run had that", stacklevel=5)


def missed_places(edit: Edit, positions: int) -> list[int]:
    """The positions that an edit names by number, as destinations or as sources, and that no run of so many had."""
    source = edit.at.unit.source if edit.at.unit is not None else None
    sources = edit.method.sources if isinstance(edit.method, Knockout) else (source,)
    own = edit.positions if isinstance(edit.positions, tuple) else ()
    return [place for place in (*own, *sources) if place is not None and place >= positions]


def _length(cache: Any, came: int) -> int:
    """How many positions a cache holds; states that count none hold those that came in this context."""
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):
        return came


def _padding(mask: Any) -> tuple[int, ...]:
    """How many positions of each row are padding, from the attention mask that the model is called with."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return ()
    seen = mask.bool()
    padding = (~seen).sum(-1)
    if not torch.equal(seen, torch.arange(mask.shape[1], device=mask.device) >= padding[:, None]):
        raise EditError(
            "A model under edits was called with an attention mask that hides more than padding on the left",
            None,
            "Pad on the left, or hide positions with Edit.knockout.",
        )
    return tuple(padding.tolist())
