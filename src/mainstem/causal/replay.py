"""Many runs of one prompt, each with changes of its own, computed only as far as the changes reach.

A run differs from the unchanged one from the first changed block on and, in a causal model, from the first changed
position on. So the calls of earlier blocks are skipped (`mainstem.causal.recorded`), and earlier positions are left
out, their keys and values given by the model's own cache. All the rest (masks, position embeddings, what happens
between blocks, the final norm, the unembedding) is left to the model's own forward: there is no code per family. Runs
that begin alike are rows of one batch, each computed from its own first block on, and logits are made of the
destination alone.

Nothing is taken on trust. Skipping blocks proves itself bitwise when a `Replay` is made. Each batch then begins and
ends with a row without changes, which must get the unchanged run's logits to rounding, and every change must be
reached. What fails is switched off and said in `notes`, down to one full forward for each run.

Earlier positions come from the model's cache, and not from keys and values put in at the attention calls, because those
calls are seen in fused attention only, while the cache works for every kind; with it the model itself numbers positions
and makes masks, and recurrent layers keep their states in it.

Cost: about 5 forwards to begin with, and, where the model's cache cannot be cut, a run of the positions before each
first position. Memory: what each block returned, once.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.causal.changes import Change, Pass, change_taps
from mainstem.causal.edited import edits_of, part_of
from mainstem.causal.grouping import Batch, Start, batches
from mainstem.causal.prefixes import Prefixes
from mainstem.causal.recorded import RecordedBlocks, end_only, said
from mainstem.causal.row_batches import alike
from mainstem.errors import NotFiniteError, RunError, UsageError
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.model.outputs import logits_of
from mainstem.run.capture import capture

DEFAULT_MEMORY = 2**30
"""The bytes that runs may take beside the model, if nothing else is asked for."""

LARGEST_BATCH = 128
"""The most rows of a batch, whatever the memory: more are not faster, and what an interruption loses is one batch."""

Changes = Sequence[Change]
"""What is changed in one run; here every change lists its positions, counted from 0."""


class Replay:
    """Runs of one prompt with changes.

    Args:
        model: the module; it is left as it was.
        anatomy: its anatomy.
        ids: [1, pos] the prompt.
        position: the destination whose logits are wanted, from 0; a causal model's prompt is cut after it.
        sites: where there will be changes.
        memory: the bytes that all this may take beside the model. What one run takes is measured: the most bytes of
            tensors that are alive at once in a plain run, and the bytes that the model's cache of a prefix holds.
        reserved: the bytes of these that the caller takes.
        forward: further arguments of the forward call.

    Attributes:
        clean: [d_vocab] the unchanged run's logits.
        notes: what is switched off, and why.

    Raises:
        NotFiniteError: if the unchanged run's logits are not finite; names the layer.
        UsageError: if the memory is too small for one run.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        anatomy: Anatomy,
        ids: Int[Tensor, "1 pos"],
        position: int,
        sites: Iterable[Site],
        memory: int = DEFAULT_MEMORY,
        reserved: int = 0,
        **forward: Any,
    ) -> None:
        self.model, self.anatomy, self.forward = model, anatomy, forward
        self.prompt = ids.shape[1]
        self.ids = ids[:, : position + 1] if anatomy.causal else ids
        self.position = position
        self.notes: list[str] = []
        with part_of(model, self.prompt):
            self.blocks = RecordedBlocks(model, anatomy, self.ids, position, sites, **forward)
            self.clean = self.blocks.logits
            self._require_finite(self.clean[None], [()])
            self.prefixes = Prefixes(model, self.ids, forward) if anatomy.causal and self.blocks.fault is None else None
        widest = max((value.nbytes for value in self.blocks.values.values()), default=0)
        cached = self.prefixes.nbytes if self.prefixes else 0
        self.row_bytes = self.blocks.run_bytes + widest + 2 * cached + self.ids.nbytes
        self.room = memory - reserved - self.blocks.nbytes - cached
        needed = max(3 * self.row_bytes, self.blocks.whole_bytes)
        if self.room < needed:
            least = memory - self.room + needed
            raise UsageError(f"{memory:,} bytes are too few for a run", None, f"Allow {least:,} or more.")
        self.resumes = self.blocks.fault is None
        self.by_suffix = self.prefixes is not None and self.prefixes.usable
        self.end_only = self.blocks.end_only and anatomy.causal
        self.late = self.resumes and not edits_of(model)  # an edit of a run holds for all rows of every block
        self.in_batches = True
        if not self.resumes:
            self.notes.append(f"runs are computed from the first block on: {self.blocks.fault}")
        elif not self.by_suffix:
            why = "the model makes no cache to go on from" if anatomy.causal else "the model is not causal"
            self.notes.append(f"runs are computed from the first position on: {why}")

    def start(self, changes: Changes) -> Start:
        """Where a run with these changes may begin."""
        block = min(self.blocks.begun[change.site] for change in changes)
        return Start(min(_first_position(change) for change in changes), block)

    def plan(self, runs: Mapping[int, Changes]) -> list[Batch]:
        """The batches in which these runs, by number, are made."""
        starts = {i: self.start(changes) for i, changes in runs.items()}
        largest = min(self.room // self.row_bytes - 2, LARGEST_BATCH) if self.in_batches else 1
        shape = (len(self.blocks.calls), self.ids.shape[1])
        return batches(starts, *shape, largest, self.resumes, self.by_suffix, self.late)

    def logits(
        self, runs: Mapping[int, Changes], done: Container[int] = ()
    ) -> Iterator[tuple[tuple[int, ...], Float[Tensor, "run d_vocab"]]]:
        """The destination's logits, batch by batch: numbers of runs, and a row for each.

        Args:
            runs: what is changed in each.
            done: runs whose logits are not wanted; batches, and so roundings, are as if they were.

        Raises:
            NotFiniteError: if a run's logits are not finite; names the first layer that is not.
        """
        pending = self.plan(runs)
        while pending:
            batch = pending.pop(0)
            if all(i in done for i in batch.runs):
                continue
            changes = [runs[i] for i in batch.runs]
            rows = self._checked(changes, batch.start)
            if rows is None:  # something was switched off: what is left is planned anew
                pending = self.plan({i: runs[i] for left in (batch, *pending) for i in left.runs})
                continue
            self._require_finite(rows, changes)
            yield batch.runs, rows

    @torch.no_grad()
    def alone(self, changes: Changes) -> Float[Tensor, " d_vocab"]:
        """The destination's logits of one run by a full forward, nothing skipped and nothing left out."""
        with part_of(self.model, self.prompt), tapped(self.model, change_taps(changes, Pass(1, self.ids.shape[1]))):
            return logits_of(self.model(input_ids=self.ids, **self.forward))[0, self.position].clone()

    def _checked(self, changes: Sequence[Changes], start: Start) -> Tensor | None:
        """The logits of one batch, an unchanged row with it; None if that came out wrong and something was given up."""
        if not self.in_batches:
            return self._run(changes, start)
        rows, fault = self._tried([(), *changes, ()], start)
        if rows is not None:
            return rows[1:-1]
        sound = all(self._tried(alone, start)[0] is not None for alone in ([()], changes[:1]))
        if sound and len(set(self._begins(changes, start))) > 1:
            self.late = False
            self.notes.append(f"all rows of a batch are computed from one block on: {fault}")
        elif sound:
            self.in_batches = self.by_suffix = False
            self.notes.append(f"every run is made by itself: {fault}")
        elif self.by_suffix and start.position:
            self.by_suffix = False
            self.notes.append(f"runs are computed from the first position on: {fault}")
        elif self.resumes and start.block:
            self.resumes = self.late = False
            self.notes.append(f"runs are computed from the first block on: {fault}")
        elif self.end_only:
            self.end_only = False
            self.notes.append(f"logits are computed at all positions: {fault}")
        else:
            raise RunError(f"The prompt cannot be run again: {fault}")
        return None

    def _tried(self, changes: Sequence[Changes], start: Start) -> tuple[Tensor | None, str]:
        """The logits of a batch, or None and what is wrong, with the rows that have no changes above all."""
        try:
            rows = self._run(changes, start)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model says to being run like this, it is the finding
            return None, said(error)
        if not all(made or alike(row, self.clean) for row, made in zip(rows, changes, strict=True)):
            return None, "a row without changes does not get what the prompt gets alone"
        return rows, ""

    def _begins(self, changes: Sequence[Changes], start: Start) -> list[int]:
        """The first block that each row computes: its own, where rows can come late, and they are in this order."""
        begins = [start.block]
        for made in changes:
            begins.append(max(begins[-1], self.start(made).block) if made and self.late else begins[-1])
        return begins[1:]

    @torch.no_grad()
    def _run(self, changes: Sequence[Changes], start: Start) -> Float[Tensor, "run d_vocab"]:
        with part_of(self.model, self.prompt):
            return self._run_part(changes, start)

    def _run_part(self, changes: Sequence[Changes], start: Start) -> Float[Tensor, "run d_vocab"]:
        """From a block and a position on."""
        batch, positions = len(changes), self.ids.shape[1] - start.position
        begins = self._begins(changes, start)
        if batch in (positions, self.ids.shape[1]):  # axes of rows and of positions would look alike
            begins = [start.block] * batch
        computed = [sum(begin <= i for begin in begins) for i in range(len(self.blocks.calls))]
        reached: set[Site] = set()
        taps = self._taps(changes, start, computed, reached)
        forward = dict(self.forward)
        if start.position:
            assert self.prefixes is not None
            forward |= self.prefixes.after(start.position, batch, computed)
        if self.end_only:
            taps.append(end_only(self.anatomy.readout.input_site, batch, positions))
        ids = self.ids[:, start.position :].expand(batch, -1).contiguous()
        with self.blocks.skipping(computed, batch, start.position), tapped(self.model, taps):
            logits = logits_of(self.model(input_ids=ids, **forward))
        if len(logits) != batch:
            raise RunError(f"{len(logits)} rows come out of {batch}")
        if missed := {change.site for made in changes for change in made} - reached:
            raise RunError("A value that is to be changed is not computed", str(next(iter(missed))))
        return logits[:, -1 if self.anatomy.causal else self.position].clone()

    def _taps(
        self, changes: Sequence[Changes], start: Start, computed: Sequence[int], reached: set[Site]
    ) -> list[tuple[Site, Tap]]:
        """Taps for the changes of all rows, with as many rows as each site has; `reached` gets those that fire."""
        by_site: dict[Site, list[Change]] = {}
        for row, made in enumerate(changes):
            for change in made:
                by_site.setdefault(change.site, []).append(replace(change, row=row))
        taps = []
        for site, own in by_site.items():
            rows = computed[self.blocks.begun[site]] if self.blocks.inside(site) else len(changes)
            here = self.blocks.site(site, start.block)
            now = Pass(rows, self.ids.shape[1] - start.position, start.position)
            moved = [replace(change, site=here) for change in own]
            taps += [(here, _noting(site, tap, reached)) for _, tap in change_taps(moved, now)]
        return taps

    def _require_finite(self, rows: Tensor, changes: Sequence[Changes]) -> None:
        for row, made in zip(rows, changes, strict=True):
            if not bool(torch.isfinite(row).all()):
                raise NotFiniteError(
                    f"A run gives NaN or infinity{' after a change' if made else ''}", self._first(made)
                )

    def _first(self, changes: Changes) -> str:
        """The first sublayer whose write is not finite."""
        taps = change_taps(changes, Pass(1, self.ids.shape[1]))
        end = torch.tensor([[self.position]], device=self.ids.device)
        with part_of(self.model, self.prompt):
            captured = capture(self.model, self.anatomy, self.ids, end, edits=taps, reads=False, **self.forward)
        found = next((i for i in captured.order if not bool(torch.isfinite(captured.writes[i]).all())), None)
        return "the unembedding" if found is None else str(self.anatomy.writes[found].unit)


def _noting(site: Site, tap: Tap, reached: set[Site]) -> Tap:
    def noting(leaves: list[Any]) -> list[Any] | None:
        reached.add(site)
        return tap(leaves)

    return noting


def _first_position(change: Change) -> int:
    assert change.positions is not None and not isinstance(change.positions, str)
    return min(change.positions)
