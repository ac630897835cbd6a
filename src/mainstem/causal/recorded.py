"""What the blocks of an unchanged run returned, and runs in which their calls are skipped and return it again.

The proof: with all blocks skipped, the logits must be bitwise what they were; and each block, computed with all before
it skipped, must return bitwise what it returned. The last block comes first, after a run of other tokens, so what a
block reads of earlier ones besides its input (a state that a module keeps) would be stale, and would show. A run that
resumes at a block therefore computes what the unchanged run did: what each block reads of skipped blocks is as it was
in the proof, and what it reads of computed ones is as in any run.

A block may also compute some rows of a batch only, and return for the others what it always did: rows that nothing is
changed in yet.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.causal.block_output import BlockOutput, block_output
from mainstem.causal.changes import Pass, copied_by_token
from mainstem.causal.row_batches import alike
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Replacement, Site, Tap, around_call, replaced_calls, tapped
from mainstem.model.outputs import logits_of
from mainstem.model.trees import leaves_of, map_leaves
from mainstem.run.memory import LiveBytes

LOGITS_COPIES = 4
"""How many times the logits may be there at once: scaled, capped, in another dtype, taken out."""


class RecordedBlocks:
    """The blocks of one unchanged run.

    Args:
        model: the module; it is left as it was.
        anatomy: its anatomy.
        ids: [1, pos] the prompt.
        position: the destination, counted from 0.
        sites: where changes will be made.
        forward: further arguments of the forward call.

    Attributes:
        logits: [d_vocab] of the run at the destination.
        begun: for each site how many blocks had returned when it was reached.
        values: [pos, entry] what was at each site.
        end_only: whether logits can be made of the last position alone.
        run_bytes: the most bytes of tensors alive at once in such a run, what is kept not counted.
        whole_bytes: the same in a run that makes the logits of all positions, beside those of another.
        fault: why blocks cannot be skipped; None: they can.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        anatomy: Anatomy,
        ids: Int[Tensor, "1 pos"],
        position: int,
        sites: Iterable[Site],
        **forward: Any,
    ) -> None:
        self.model, self.ids, self.forward = model, ids, forward
        self.readout = anatomy.readout.input_site
        self.calls = [(block.path, block.call) for block in anatomy.blocks]
        self.begun: dict[Site, int] = {}
        self.values: dict[Site, Tensor] = {}
        self.trees: dict[int, Any] = {}
        self.outputs: list[BlockOutput] = []
        self.end_only = False
        live = LiveBytes()
        before_logits: list[int] = []
        self.entered: dict[tuple[str, int], int] = {}
        taps = [tap for site in dict.fromkeys(sites) for tap in (*self._counting(site), self._looking(site, live))]
        with live:
            logits = self._run(
                ids, self.trees, [*taps, (self.readout, lambda leaves: before_logits.append(live.peak))], live.kept
            )
        self.logits = logits[0, position].clone()
        self.fault = self._prove(logits)
        self.run_bytes, self.whole_bytes = live.peak, live.peak + logits.nbytes
        if self.end_only and before_logits:
            self.run_bytes = before_logits[0] + LOGITS_COPIES * self.logits.nbytes

    def _looking(self, site: Site, live: LiveBytes) -> tuple[Site, Tap]:
        def tap(leaves: list[Any]) -> None:
            self.begun[site] = len(self.trees)
            self.values[site] = live.kept(copied_by_token(leaves[site.slot], site, Pass(1, self.ids.shape[1]))[1][0])

        return site, tap

    def _counting(self, site: Site) -> list[tuple[Site, Tap]]:
        """Taps that note how many blocks had returned at earlier calls of a module inside a block."""

        def noting(call: int) -> Tap:
            return lambda leaves: self.entered.__setitem__((site.path, call), len(self.trees))

        under = any(site.path.startswith(f"{path}.") for path, _ in self.calls)
        return [(Site(site.path, call, "input"), noting(call)) for call in range(site.call if under else 0)]

    def site(self, site: Site, block: int) -> Site:
        """Where a site is in a run that begins at a block: calls of modules inside skipped blocks are not made."""
        skipped = sum(self.entered.get((site.path, call), block) < block for call in range(site.call))
        return replace(site, call=site.call - skipped)

    @property
    def none(self) -> list[int]:
        """No rows of any block."""
        return [0] * len(self.calls)

    def inside(self, site: Site) -> bool:
        """Whether a site is inside a block's call, and not at its boundary."""
        return any(site.path.startswith(f"{p}.") or (site.path == p and bool(site.function)) for p, _ in self.calls)

    @property
    def nbytes(self) -> int:
        """The memory of what is kept."""
        kept = [*leaves_of(self.trees), *self.values.values()]
        return sum(leaf.nbytes for leaf in kept if isinstance(leaf, Tensor))

    def skipping(self, computed: Sequence[int], batch: int = 1, position: int = 0) -> AbstractContextManager[None]:
        """A forward pass of `batch` rows from a position on, in which blocks compute their first rows only.

        Args:
            computed: how many rows each block computes; the others get what the unchanged run had.
            batch: the number of rows.
            position: the first position.
        """

        def replacement(output: BlockOutput, rows: int) -> Replacement:
            def new(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
                if not rows:
                    return output.rows(batch, position)
                args, kwargs = output.first_rows((args, kwargs), batch, rows)
                return output.joined(forward(*args, **kwargs), batch, position)

            return new

        partly = {
            call: replacement(output, rows)
            for call, output, rows in zip(self.calls, self.outputs, computed, strict=False)
            if rows < batch
        }
        return replaced_calls(self.model, partly)

    @torch.no_grad()
    def _run(
        self,
        ids: Tensor,
        trees: dict[int, Any],
        taps: Sequence[tuple[Site, Tap]] = (),
        keep: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> Tensor:
        """The logits of a run, in which `trees` gets copies of what blocks return, after `keep` has seen them."""

        def keeping(index: int) -> Callable[[Any], None]:
            def leave(output: Any) -> None:
                trees[index] = _copied(output, keep)

            return leave

        with ExitStack() as stack:
            for i, (path, call) in enumerate(self.calls):
                stack.enter_context(around_call(self.model, path, call, _ignored, keeping(i)))
            stack.enter_context(tapped(self.model, list(taps)))
            return logits_of(self.model(input_ids=ids, **self.forward))

    @torch.no_grad()
    def _prove(self, logits: Float[Tensor, "1 pos d_vocab"]) -> str | None:
        """Why blocks cannot be skipped; None: they can."""
        if not self.calls:
            return "no block is a module"
        try:
            self.outputs = self._axes()
            with self.skipping(self.none):
                again = logits_of(self.model(input_ids=self.ids, **self.forward))
            if not torch.equal(again, logits):
                return "the logits depend on more than what blocks return"
            self.end_only = self._end_only(logits)
            last_first = reversed(range(len(self.calls)))  # so that what earlier blocks left is still stale
            wrong = next((i for i in last_first if not self._alone(i)), None)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model says to being run like this, it is the finding
            return said(error)
        return None if wrong is None else f"block {wrong} alone does not return what it did"

    def _axes(self) -> list[BlockOutput]:
        """What blocks returned, with the axes of rows and positions, from a run of two rows of one other token."""
        shapes: dict[int, Any] = {}
        self._run(self.ids[:, -1:].expand(2, -1).contiguous(), shapes)
        return [block_output(self.trees[i], shapes[i], self.ids.shape[1]) for i in range(len(self.calls))]

    def _end_only(self, whole: Float[Tensor, "1 pos d_vocab"]) -> bool:
        """Whether logits can be made of the last position alone."""
        try:
            with self.skipping(self.none), tapped(self.model, [end_only(self.readout, *self.ids.shape)]):
                logits = logits_of(self.model(input_ids=self.ids, **self.forward))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a model that cannot be run like this is run in another way
            return False
        return logits.shape[1] == 1 and alike(logits[0, -1], whole[0, -1])

    @torch.no_grad()
    def _alone(self, index: int) -> bool:
        """Whether a block returns bitwise the same where it alone is computed; the run ends there."""
        path, call = self.calls[index]
        seen: list[Any] = []

        def leave(output: Any) -> None:
            if output is not None:
                seen.extend(leaves_of(_copied(output)))
                raise _EnoughError

        computed = [int(i == index) for i in range(len(self.calls))]
        with around_call(self.model, path, call, _ignored, leave), self.skipping(computed), suppress(_EnoughError):
            self.model(input_ids=self.ids, **self.forward)
        pairs = zip(seen, leaves_of(self.trees[index]), strict=True)
        return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


class _EnoughError(Exception):
    """Ends a run whose rest is of no interest."""


def end_only(site: Site, batch: int, positions: int) -> tuple[Site, Tap]:
    """A tap that lets only the last position through to the unembedding."""

    def tap(leaves: list[Any]) -> list[Any] | None:
        leaf = leaves[site.slot]
        axis = 0 if site.positions_first else 1
        if leaf.dim() != 3 or leaf.shape[axis] != positions or leaf.shape[1 - axis] != batch:
            return None
        new = list(leaves)
        new[site.slot] = leaf.narrow(axis, positions - 1, 1)
        return new

    return site, tap


def said(error: Exception) -> str:
    """An error of the model's as a reason."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _ignored(inputs: Any) -> None:
    """Nothing is to be done before a call."""


def _copied(tree: Any, keep: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    return map_leaves(lambda leaf: keep(leaf.clone()) if isinstance(leaf, Tensor) else leaf, tree)
