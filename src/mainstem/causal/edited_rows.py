"""Runs of prompts of equal length, each changed in its own way, as rows of batches.

A row has token ids, edits and changes (edits at the lower level, of values that are known already). Rows are run
together only if the model gives a row of a batch what it gives it alone, which is tried once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.causal.changes import Change, Pass, change_taps, copied_by_token
from mainstem.causal.edited import edited
from mainstem.causal.edits import Edit
from mainstem.causal.head_changes import HeadChange, head_taps
from mainstem.causal.row_batches import BATCH_ENTRIES, mixes_rows
from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Site, Tap, tapped
from mainstem.model.outputs import logits_of
from mainstem.run.inputs import Inputs

LARGEST_BATCH = 64
"""Rows of one batch at most."""

Watch = Callable[[Pass], list[tuple[Site, Tap]]]
"""Taps that look at a batch after all its changes."""


@dataclass(frozen=True, eq=False)
class Row:
    """One run: `ids` [pos], None for the prompt's own; edits come before changes."""

    ids: Int[Tensor, " pos"] | None = None
    edits: Sequence[Edit] = ()
    changes: Sequence[Change | HeadChange] = ()


class EditedRows:
    """Runs rows.

    Args:
        model: the module; it is left as it was.
        anatomy: its anatomy.
        ids: [pos] the prompt.
        position: the destination whose logits are wanted, from 0.
        inputs_of: makes inputs of what an edit names as its source.
        forward: further arguments of the forward call.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        anatomy: Anatomy,
        ids: Int[Tensor, " pos"],
        position: int,
        inputs_of: Callable[[Any], Inputs],
        **forward: Any,
    ) -> None:
        self.model, self.anatomy, self.ids, self.position = model, anatomy, ids, position
        self.inputs_of, self.forward = inputs_of, forward
        self.clean = self._run([Row()], None)[0]
        self.mixes_rows = mixes_rows(model, ids, position, self.clean, **forward)

    def logits(self, rows: Sequence[Row], watch: Watch | None = None) -> Float[Tensor, "run d_vocab"]:
        """The logits at the destination, one row for each; `watch` makes the taps of each batch."""
        size = 1 if self.mixes_rows else min(LARGEST_BATCH, BATCH_ENTRIES // (len(self.ids) * len(self.clean)))
        size = max(1, size)
        found = [self._run(rows[start : start + size], watch) for start in range(0, len(rows), size)]
        return torch.cat(found) if found else self.clean[None][:0]

    def values(self, sites: Sequence[Site], row: Row | None = None) -> dict[Site, Float[Tensor, "pos entry"]]:
        """What is at some sites in one run."""
        found: dict[Site, Tensor] = {}

        def keep(site: Site, now: Pass) -> Tap:
            def tap(leaves) -> None:
                found[site] = copied_by_token(leaves[site.slot], site, now)[1][0]

            return tap

        self._run([row or Row()], lambda now: [(site, keep(site, now)) for site in sites])
        return found

    @torch.no_grad()
    def _run(self, rows: Sequence[Row], watch: Watch | None) -> Float[Tensor, "run d_vocab"]:
        now = Pass(len(rows), len(self.ids))
        edits = [replace(edit, row=i) for i, row in enumerate(rows) for edit in row.edits]
        changes = [replace(change, row=i) for i, row in enumerate(rows) for change in row.changes]
        taps = [
            *change_taps([change for change in changes if isinstance(change, Change)], now),
            *head_taps([change for change in changes if isinstance(change, HeadChange)], now),
            *(watch(now) if watch is not None else ()),
        ]
        ids = torch.stack([self.ids if row.ids is None else row.ids for row in rows])
        with edited(self.model, self.anatomy, edits, self.inputs_of), tapped(self.model, taps):
            logits = logits_of(self.model(input_ids=ids, **self.forward))
        return logits[:, self.position].clone()
