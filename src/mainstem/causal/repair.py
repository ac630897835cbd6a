"""Direct, total and repaired: what a unit gives to a logit by itself, and what removing it takes away in the end.

    direct      what the unit's write, carried to the final stream with all scales frozen, gives to the target's logit
                under the frozen final norm: direct logit attribution of what is removed
    total       the target's logit minus that of the run in which the unit is removed at the destination, the rest free
    readout     the part of it that comes from the final norm's new scale, and from a softcap
    downstream  the rest: what later layers (and norms between the unit and the stream) do otherwise

so that total = direct + downstream + readout, exactly. A negative downstream part for a positive direct one is repair:
later layers make good what was removed (McGrath et al. 2023, "The Hydra effect"; Rushing and Nanda 2024, "Explorations
of self-repair in language models", where the final norm's scale is told apart too). Removing by the mean or by values
of other tokens removes the difference to these, and direct is that of the difference.

With w the target's direction under the frozen norm, and dx the change of the final stream in the real run, direct +
downstream = w . dx; and direct = w . tail(dy), with dy the change of the write in the same run. One row of a batch for
each unit and draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis.attribution import functional
from mainstem.analysis.decompose import Decomposition
from mainstem.causal.changes import Pass, copied_by_token
from mainstem.causal.edited_rows import EditedRows, Row
from mainstem.causal.edits import Edit
from mainstem.errors import ChoiceError, TargetError, UsageError
from mainstem.model.hooks import Site, Tap
from mainstem.points import Point
from mainstem.targets import Target
from mainstem.units import Unit

Removal = Literal["zero", "mean", "resample"]
REMOVALS: tuple[Removal, ...] = get_args(Removal)


@dataclass(frozen=True)
class Effect:
    """What one unit gives, in logits of the target; see the module for the columns."""

    unit: str
    direct: float
    downstream: float
    readout: float
    total: float

    @property
    def repaired(self) -> float:
        """The share of the direct effect that later layers make good; negative where they add to it."""
        return -self.downstream / self.direct if self.direct else 0.0


@dataclass(frozen=True)
class Repairs:
    """Effects of several units on one target.

    Attributes:
        effects: one for each unit, in the order in which they were named.
        removal: what was put in a unit's place: `zero`, `mean` or `resample`.
        draws: how many runs each effect is the mean of.
        target: its text.
        logit: of the target (or the difference to its rivals) in the unchanged run.
        position: the destination, counted from 0.
        norm: the convention of `direct`.
        provenance: versions, model, dtype, seed and date, where a session made it.
    """

    effects: list[Effect]
    removal: Removal
    draws: int
    target: str
    logit: float
    position: int
    norm: str = "frozen"
    provenance: Any = None


def repair(
    rows: EditedRows,
    decomposition: Decomposition,
    target: Target,
    units: Sequence[Unit],
    removal: Removal = "zero",
    reference: Any = None,
    draws: int = 5,
    seed: int = 0,
) -> Repairs:
    """Removes each unit at the destination, in a run of its own.

    Args:
        rows: makes runs of the prompt.
        decomposition: of the same run and destination, of any level.
        target: a token, a set, or either against rivals.
        units: whatever can be edited.
        removal: `zero`, `mean` over the reference, or `resample` from it.
        reference: where the last two take values from, as an edit's source.
        draws: how many values `resample` takes.
        seed: of the draws.

    Raises:
        ChoiceError, UsageError: for an unknown removal, no unit, no draw or no reference.
        TargetError: if the target has no logit of its own at one destination.
        UnitError, LevelRefusedError, EditError: if a unit cannot be removed so.
    """
    if removal not in REMOVALS:
        raise ChoiceError("removal", removal, REMOVALS)
    if not units or draws < 1:
        raise UsageError("Repair needs a unit and a draw", None, "Name one unit at least.")
    if removal != "zero" and reference is None:
        raise UsageError(f"Removal by {removal} needs a reference", None, "Give a text or token ids, or use zero.")
    if not target.ids:
        raise TargetError("Repair is about logits of tokens", target.text, "Name a token or a set of tokens.")
    direction = functional(decomposition, target, "direct").direction
    draws = draws if removal == "resample" else 1
    edits = [_edit(unit, removal, reference, seed + n, rows.position) for unit in units for n in range(draws)]
    seen = _Seen(rows, [unit for unit in units for _ in range(draws)])
    logits = _target_logit(rows.logits([Row(edits=[edit]) for edit in edits], seen.watch), target)
    clean = float(_target_logit(rows.clean[None], target))
    direct = torch.stack([direction @ change for change in seen.carried(decomposition)])
    linear = seen.stream_changes() @ direction
    total = clean - logits.to(linear)
    columns = torch.stack([direct, linear - direct, total - linear, total], -1)
    means = columns.reshape(len(units), draws, 4).mean(1).tolist()
    effects = [Effect(str(unit), *row) for unit, row in zip(units, means, strict=True)]
    return Repairs(effects, removal, draws, target.text, clean, rows.position)


class _Seen:
    """What runs left at the destination: the final stream, and the writes that the removed units belong to."""

    def __init__(self, rows: EditedRows, units: Sequence[Unit]) -> None:
        self.rows, self.final = rows, rows.anatomy.spine_sites[-1]
        self.writes = [rows.anatomy.writes_of(unit.sublayer) for unit in units]
        sites = [rows.anatomy.writes[i].site for own in self.writes for i in own]
        self.kept: dict[Site, list[Tensor]] = {site: [] for site in dict.fromkeys([self.final, *sites])}
        self.clean = {site: value[rows.position].double() for site, value in rows.values(list(self.kept)).items()}

    def watch(self, now: Pass) -> list[tuple[Site, Tap]]:
        """Taps that keep them."""

        def keep(site: Site) -> Tap:
            def tap(leaves) -> None:
                self.kept[site] += (
                    copied_by_token(leaves[site.slot], site, now)[1][:, self.rows.position].double().unbind(0)
                )

            return tap

        return [(site, keep(site)) for site in self.kept]

    def stream_changes(self) -> Float[Tensor, "run d_model"]:
        """The clean run's final stream minus that of each run."""
        return self.clean[self.final] - torch.stack(self.kept[self.final])

    def carried(self, decomposition: Decomposition) -> list[Float[Tensor, " d_model"]]:
        """For each run what its unit wrote, in the final stream."""
        anatomy, found = self.rows.anatomy, []
        for run, own in enumerate(self.writes):
            total = torch.zeros_like(self.clean[self.final])
            for i in own:
                tail, site = decomposition.maps[anatomy.write_nodes[i]], anatomy.writes[i].site
                if tail is not None:
                    total = total + tail((self.clean[site] - self.kept[site][run])[None, None])[0, 0]
            found.append(total)
        return found


def _edit(unit: Unit, removal: Removal, reference: Any, seed: int, position: int) -> Edit:
    at = Point("write", unit)
    if removal == "zero":
        return Edit.zero(at, position)
    if unit.source is not None:
        raise UsageError(
            f"{unit} is a weight of a pattern, which other prompts do not have", None, "Remove it by zero."
        )
    return Edit.mean(at, reference, position) if removal == "mean" else Edit.resample(at, reference, seed, position)


def _target_logit(logits: Float[Tensor, "run d_vocab"], target: Target) -> Float[Tensor, " run"]:
    """Of its tokens (mean over a set), minus the mean of its rivals."""
    own = logits.double()[:, list(target.ids)].mean(-1)
    return own - logits.double()[:, list(target.against)].mean(-1) if target.against else own
