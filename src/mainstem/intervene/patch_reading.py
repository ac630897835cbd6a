"""Patching sweeps of one pair of prompts, or of many, as plain rows: means, intervals, stability.

With several pairs each cell's metric is averaged before it is put between the two unpatched runs' means: a pair on
which the runs hardly differ would otherwise divide by nearly nothing. Intervals are over pairs, by the bootstrap, with
that difference held fixed. Cells of different pairs are the same cell by place. Where a grid has positions these are
the same if all pairs have as many tokens; pairs of different lengths are compared by the roles that all of them name
(`mainstem.lab.roles`), and what has no such role is a column of its own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis import warnings as warn
from mainstem.analysis.statistics import interval, split_half
from mainstem.causal.patching import Direction, Sweep
from mainstem.causal.patching_grids import GRIDS, WITHOUT_POSITIONS
from mainstem.causal.replay import DEFAULT_MEMORY
from mainstem.errors import ChoiceError, MetricError, PairError, TargetError, UsageError
from mainstem.lab.pairs import EncodedPair, PromptPair, Text, encode_pair
from mainstem.results.patch import CellRow, PatchReading, StabilityRow, Table

if TYPE_CHECKING:
    from mainstem.session import Model

ELSEWHERE = "elsewhere"
"""The column of the positions that have no role."""

LISTED = 10


def read_patch(
    model: "Model",
    pairs: Sequence[PromptPair],
    metric: str = "logit-difference",
    grid: str = "resid",
    direction: Direction = "denoising",
    *,
    window: int = 1,
    units: Sequence[str] = (),
    roles: bool = False,
    position: int = -1,
    chat: bool = False,
    memory: int = DEFAULT_MEMORY,
    state: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PatchReading:
    """A sweep of every pair, and what they say together.

    Args:
        model: the model.
        pairs: one or several.
        metric: as `Model.patch`.
        grid: as there.
        direction: as there.
        window: as there.
        units: as there.
        roles: whether columns are the pairs' roles even where all pairs have as many tokens.
        position: as there.
        memory: as there.
        chat: whether to wrap prompts in the model's chat template.
        state: a file to go on from; with several pairs one for each, with the pair's number at its end.
        progress: called with the number of cells done and of all cells, over all pairs.

    Raises:
        PairError: if a pair does not fit, or several have neither the same positions nor a role in common.
        MetricError, TargetError: as `Model.patch`; names the pair.
        ChoiceError, UsageError, CertificateError: as there.
    """
    encoded = encode_pairs(model, pairs, grid, chat, roles)
    columns = _role_columns(model, encoded, shared_roles(pairs, encoded, grid, roles), position)
    sweeps: list[Sweep] = []
    for i, (pair, ids) in enumerate(zip(pairs, encoded, strict=True)):
        own = state if state is None or len(pairs) == 1 else state.with_name(f"{state.name}.{i}")
        try:
            made = model.patch(
                list(ids.clean),
                list(ids.corrupted),
                [f"id:{token}" for token in ids.answers],
                [f"id:{token}" for token in ids.wrong_answers],
                metric=metric,
                grid=grid,
                direction=direction,
                window=window,
                units=units,
                roles=columns[i] if columns else None,
                position=position,
                memory=memory,
                state=own,
                progress=_shared(progress, i, len(pairs)),
            )
        except (MetricError, TargetError) as error:
            raise type(error)(error.what, pair.where or error.where, error.remedy) from error
        sweeps.append(made)
    return _reading(model, pairs, encoded, sweeps, columns, window, chat)


def encode_pairs(
    model: "Model", pairs: Sequence[PromptPair], grid: str, chat: bool = False, roles: bool = False
) -> list[EncodedPair]:
    """The pairs as the model reads them; refuses those that a grid cannot take, without discovering the stream.

    Raises:
        PairError, PromptError, TokenError: if a pair does not fit, or several have no columns in common.
        ChoiceError: if there is no such grid.
        UsageError: if roles are asked of a grid without positions.
    """
    if grid not in GRIDS:
        raise ChoiceError("grid", grid, GRIDS)
    encoder = replace(model.encoder, encode=lambda text: model.encode(text, chat))
    encoded = [encode_pair(pair, encoder) for pair in pairs]
    shared_roles(pairs, encoded, grid, roles)
    return encoded


def shared_roles(
    pairs: Sequence[PromptPair], encoded: Sequence[EncodedPair], grid: str, asked: bool = False
) -> tuple[str, ...]:
    """The roles that a grid has columns for: those that all pairs name; none where its columns are positions.

    Raises:
        PairError: if there are no columns that all pairs have.
        UsageError: if roles are asked of a grid without positions.
    """
    if grid in WITHOUT_POSITIONS:
        if asked:
            raise UsageError(f"The grid {grid} takes no roles", None, "Its cells take all positions.")
        return ()
    lengths = [len(ids.clean) for ids in encoded]
    if len(set(lengths)) == 1 and not asked:
        return ()
    common = tuple(name for name in encoded[0].roles if all(name in ids.roles for ids in encoded))
    if not common:
        raise _without_columns(pairs, lengths, grid, asked)
    return common


def _role_columns(
    model: "Model", encoded: Sequence[EncodedPair], names: Sequence[str], position: int
) -> list[dict[str, list[int]]]:
    """For each pair its columns: the roles, and what is in none of them if every pair has such."""
    columns, rest = [], []
    for ids in encoded if names else ():
        columns.append({name: list(ids.roles[name]) for name in names})
        place = position % len(ids.clean)
        taken = {at for own in columns[-1].values() for at in own}
        rest.append([at for at in range(place + 1 if model.anatomy.causal else len(ids.clean)) if at not in taken])
    return [{**own, ELSEWHERE: more} for own, more in zip(columns, rest, strict=True)] if all(rest) else columns


def _shared(progress: Callable[[int, int], None] | None, pair: int, pairs: int) -> Callable[[int, int], None] | None:
    """The progress over all pairs, if each has as many cells."""
    return None if progress is None else lambda done, of: progress(pair * of + done, pairs * of)


def _without_columns(pairs: Sequence[PromptPair], lengths: Sequence[int], grid: str, asked: bool) -> PairError:
    other = next((i for i, length in enumerate(lengths) if length != lengths[0]), None)
    if other is None or asked:
        return PairError(
            "There is no role that all pairs name", None, 'Give each line "roles": {"subject": "Mary", "end": -1}.'
        )
    commonest = max(set(lengths), key=lengths.count)
    first, second = pairs[0].where or "the first pair", pairs[other].where or f"pair {other + 1}"
    return PairError(
        f"The grid {grid} has positions, and those of the pairs are not the same: {first} has {lengths[0]} tokens, "
        f"{second} has {lengths[other]}",
        None,
        'Give each line "roles", such as {"subject": "Mary", "end": -1}, to compare them by role; or take the grid '
        f"{' or '.join(WITHOUT_POSITIONS)}, or pairs of one length: {lengths.count(commonest)} of the {len(lengths)} "
        f"have {commonest} tokens.",
    )


def _reading(
    model: "Model",
    pairs: Sequence[PromptPair],
    encoded: Sequence[EncodedPair],
    sweeps: Sequence[Sweep],
    roles: Sequence[dict[str, list[int]]],
    window: int,
    chat: bool,
) -> PatchReading:
    first, ids = sweeps[0], encoded[0]
    values = torch.stack([sweep.values for sweep in sweeps])
    clean, corrupted = (_numbers(getattr(sweep, name) for sweep in sweeps) for name in ("clean", "corrupted"))
    effects = _effects(values, clean, corrupted, first.direction)
    several = len(sweeps) > 1
    low, high = _intervals(effects, model.seed) if several else (None, None)
    mean = effects.mean(0)
    template = bool(getattr(model.tokenizer, "chat_template", None))
    return PatchReading(
        provenance=model.provenance(),
        warnings=[w.as_dict() for w in (*warn.chat_warning(template, chat), *_warnings(sweeps, window))],
        model=model.summary,
        pairs=len(sweeps),
        prompt=_prompt(model, pairs[0].clean, ids.clean),
        corrupted=_prompt(model, pairs[0].corrupted, ids.corrupted),
        answers=[model.token(token) for token in ids.answers],
        wrong_answers=[model.token(token) for token in ids.wrong_answers],
        metric=first.metric,
        grid=first.grid,
        direction=first.direction,
        window=window,
        position=first.position,
        rows=list(first.rows),
        columns=list(first.columns) if roles or not several else _columns(model, encoded, first),
        values=_table(values.mean(0)),
        effects=_table(mean),
        low=None if low is None else _table(low),
        high=None if high is None else _table(high),
        clean=float(clean.mean()),
        corrupted_value=float(corrupted.mean()),
        stability=_stability(effects, model.seed) if several else None,
        top=_top(first, values.mean(0), mean, low, high),
        run=sum(sweep.run for sweep in sweeps),
        identical=sum(sweep.identical for sweep in sweeps),
        checked=sum(sweep.checked for sweep in sweeps),
        error=max(sweep.error for sweep in sweeps),
        notes=[*_role_notes(encoded, roles), *dict.fromkeys(note for sweep in sweeps for note in sweep.notes)],
        roles=roles[0] if roles else None,
    )


def _role_notes(encoded: Sequence[EncodedPair], roles: Sequence[dict[str, list[int]]]) -> list[str]:
    if not roles:
        return []
    notes = ["A column is a role: a cell takes all its positions at once."]
    if left := sorted({name for ids in encoded for name in ids.roles} - set(roles[0])):
        notes.append(f"Roles that not all pairs name have no column: {', '.join(left)}.")
    return notes


def _numbers(values: Iterable[float]) -> Float[Tensor, " row"]:
    return torch.tensor(list(values), dtype=torch.float64)


def _effects(
    values: Float[Tensor, "prompt row column"],
    clean: Float[Tensor, " prompt"],
    corrupted: Float[Tensor, " prompt"],
    direction: Direction,
) -> Float[Tensor, "prompt row column"]:
    """How far each pair's cells move its unpatched run, in units of the mean difference of the two."""
    span = clean.mean() - corrupted.mean()
    base = corrupted if direction == "denoising" else clean
    moved = values - base[:, None, None]
    return moved / span if direction == "denoising" else -moved / span


def _intervals(
    effects: Float[Tensor, "prompt row column"], seed: int
) -> tuple[Float[Tensor, "row column"], Float[Tensor, "row column"]]:
    cells = [interval(cell, seed) for cell in effects.flatten(1).T.tolist()]
    shape = effects.shape[1:]
    return _numbers(one.low for one in cells).view(shape), _numbers(one.high for one in cells).view(shape)


def _stability(effects: Float[Tensor, "prompt row column"], seed: int) -> StabilityRow:
    flat = effects.flatten(1).T
    found = split_half(flat[flat.isfinite().all(-1)], seed)
    return StabilityRow(found.half, found.whole, found.splits)


def _warnings(sweeps: Sequence[Sweep], window: int) -> list[warn.Warning]:
    found = [one for text in sweeps[0].warnings for one in warn.window_warning(text, window)]
    if sweeps[0].metric != "kl":
        found += warn.not_clean_warning(sum(sweep.clean <= sweep.corrupted for sweep in sweeps), len(sweeps))
    return found


def _prompt(model: "Model", text: Text, ids: Sequence[int]) -> dict:
    tokens = [model.token(token) for token in ids]
    return {"text": text if isinstance(text, str) else None, "tokens": tokens, "ids": list(ids)}


def _columns(model: "Model", encoded: Sequence[EncodedPair], first: Sweep) -> list[str]:
    """Labels of positions: the token, if all pairs have the same there."""
    if first.grid in WITHOUT_POSITIONS:
        return list(first.columns)
    labels = []
    for at in range(len(first.columns)):
        tokens = {ids[at] for pair in encoded for ids in (pair.clean, pair.corrupted)}
        labels.append(f"{at} {model.token(tokens.pop())}" if len(tokens) == 1 else f"{at} …")
    return labels


def _table(values: Float[Tensor, "row column"]) -> Table:
    return [[None if value != value else value for value in row] for row in values.tolist()]


def _top(
    sweep: Sweep,
    values: Float[Tensor, "row column"],
    effects: Float[Tensor, "row column"],
    low: Float[Tensor, "row column"] | None,
    high: Float[Tensor, "row column"] | None,
) -> list[CellRow]:
    order = effects.abs().nan_to_num(nan=-1.0).flatten().argsort(descending=True, stable=True)[:LISTED].tolist()
    found = []
    for i, j in (divmod(cell, len(sweep.columns)) for cell in order):
        ends = [None if end is None else float(end[i, j]) for end in (low, high)]
        found.append(CellRow(sweep.rows[i], sweep.columns[j], float(values[i, j]), float(effects[i, j]), *ends))
    return found
