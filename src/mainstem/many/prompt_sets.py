"""Every command on many prompts: from a file to what its prompts say together.

The way that all of them share:

    FILE.jsonl or a task  ->  read_pairs, generate     lines as they were written                       (lab)
    PromptPair            ->  check_pairs, gathered    refused by file, line and field before any run   (here)
    each pair             ->  explain, lens, steer     the same entry point as for one prompt           (set_*)
    their results         ->  mean_of, stability_of    means, bootstrap intervals, split-half stability (here)
    Gathered              ->  reading                  all of it as one result                          (here)
    PromptSetReading      ->  set_terminal, set_page   tables, JSON, HTML                               (report)

The prompt of a pair is its clean one; its answers are the target (several make a set), its wrong answers the rivals.
A prompt whose sum certificate does not hold gives no numbers: it is left out of the means, counted and named. Where
another certificate fails (labels, reads) the prompt's numbers count, and it is named. `patch`, which has a sweep of two
prompts for each pair, goes its own way (`mainstem.intervene.patch_reading`) over the same pairs and the same
statistics.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mainstem.analysis.statistics import interval, split_half
from mainstem.analysis.warnings import few_prompts_warning
from mainstem.errors import CertificateError, PairError, PositionError, PromptError, TargetError, TokenError
from mainstem.lab.pairs import PromptPair
from mainstem.results.patch import StabilityRow
from mainstem.results.prompt_set import Mean, PromptRow, PromptSetReading

if TYPE_CHECKING:
    from mainstem.session import Model

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Found:
    """What one prompt gave: numbers and texts of its own, its warnings, its notes, and which certificate failed."""

    own: dict[str, Any]
    result: Any
    warnings: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: str | None = None


@dataclass(frozen=True)
class Gathered:
    """All prompts, and the results of those that count."""

    prompts: list[PromptRow]
    pairs: list[PromptPair]
    found: list[Found]
    warnings: list[dict[str, Any]]
    notes: list[str]


def check_pairs(model: "Model", pairs: Sequence[PromptPair], position: int = -1, chat: bool = False) -> None:
    """Refuses pairs of which one cannot be run, before anything is, and without discovering the stream.

    Raises:
        PairError: if there is none.
        PromptError, PositionError, TokenError, TargetError: names file, line and field.
    """
    if not pairs:
        raise PairError("There is no prompt", None, "Give at least one.")
    for number, pair in enumerate(pairs):
        answers, wrong = as_tokens(pair.answers), as_tokens(pair.wrong_answers)
        for name, tokens, rivals in (("clean", (), ()), ("answers", answers, ()), ("wrong", answers, wrong)):
            try:
                model.check(prompt_of(pair), (position,), chat, tokens, rivals)
            except (PromptError, PositionError, TokenError, TargetError) as error:
                place = f"{place_of(pair, number)}, field '{name}'"
                raise type(error)(
                    error.what, f"{place}, {error.where}" if error.where else place, error.remedy
                ) from error


def prompt_of(pair: PromptPair) -> str | list[int]:
    """The clean prompt, as the entry points take it."""
    return pair.clean if isinstance(pair.clean, str) else list(pair.clean)


def place_of(pair: PromptPair, number: int) -> str:
    """Where a pair comes from: its line, or its number in a task."""
    return pair.where or f"prompt {number + 1}"


def as_tokens(answers: Sequence[str | int]) -> list[str]:
    """Answers as targets are written: literal text, or `id:7042`."""
    return [f"id:{answer}" if isinstance(answer, int) else answer for answer in answers]


def gathered(
    model: "Model",
    pairs: Sequence[PromptPair],
    one: Callable[[PromptPair], Found],
    chat: bool,
    progress: Progress | None,
    position: int = -1,
) -> Gathered:
    """Runs a command's own part on each pair, after all of them were checked.

    Raises:
        PairError, PromptError, PositionError, TokenError, TargetError: as `check_pairs`.
        CertificateError: if the stream is accounted for on no prompt; the last one's.
    """
    check_pairs(model, pairs, position, chat)
    rows, kept, found, refusal = [], [], [], None
    for number, pair in enumerate(pairs):
        try:
            made, failed = one(pair), None
        except CertificateError as error:
            made, failed, refusal = None, str(error), error
        ids = model.encode(prompt_of(pair), chat)
        rows.append(
            PromptRow(
                where=place_of(pair, number),
                tokens=[model.token(token) for token in ids],
                ids=ids,
                answers=[_shown(model, answer) for answer in pair.answers],
                wrong_answers=[_shown(model, answer) for answer in pair.wrong_answers],
                counted=made is not None,
                failed=failed if made is None else made.failed,
                found={} if made is None else made.own,
            )
        )
        if made is not None:
            kept.append(pair)
            found.append(made)
        if progress is not None:
            progress(number + 1, len(pairs))
    if refusal is not None and not found:
        raise refusal
    return Gathered(rows, kept, found, _warnings(found), _notes(rows, found))


def reading(model: "Model", found: Gathered, of: str, options: dict[str, Any], **more: Any) -> PromptSetReading:
    """The result of a command: what is the same for all of them, and `more`, its own."""
    return PromptSetReading(
        provenance=model.provenance(),
        warnings=found.warnings,
        model=model.summary,
        of=of,
        options=options,
        prompts=found.prompts,
        notes=[*found.notes, *more.pop("notes", ())],
        **more,
    )


def _shown(model: "Model", answer: str | int) -> str:
    return model.token(answer) if isinstance(answer, int) else answer


def _warnings(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Each warning once, with the number of prompts that it is about; text and value are the first one's."""
    first: dict[str, dict[str, Any]] = {}
    on: dict[str, int] = {}
    for one in found:
        for code in {warning["code"] for warning in one.warnings}:
            on[code] = on.get(code, 0) + 1
        for warning in one.warnings:
            first.setdefault(warning["code"], warning)
    few = [{**warning.as_dict(), "prompts": len(found)} for warning in few_prompts_warning(len(found))]
    return few + [{**warning, "prompts": on[code]} for code, warning in first.items()]


def _notes(rows: Sequence[PromptRow], found: Sequence[Found]) -> list[str]:
    notes = []
    if len(found) == 1:
        notes.append("One prompt has no interval and no halves: those are over prompts.")
    if failed := [row for row in rows if row.failed is not None]:
        named = "; ".join(f"{row.where}: {row.failed}" + ("" if row.counted else " (left out)") for row in failed)
        notes.append(f"A certificate does not hold on {len(failed)} of {len(rows)} prompts: {named}")
    return notes + list(dict.fromkeys(note for one in found for note in one.notes))


def mean_of(values: Sequence[float], seed: int) -> Mean:
    """The mean over prompts, with its interval where there are several."""
    made = interval(values, seed)
    return Mean(made.mean) if len(values) < 2 else Mean(made.mean, made.low, made.high)


def stability_of(table: Sequence[Sequence[float]], seed: int) -> StabilityRow | None:
    """The split-half stability of rows of numbers, one for each prompt; None where it is undefined."""
    if len(table) < 2 or len(table[0]) < 2:
        return None
    made = split_half(torch.tensor([list(row) for row in table], dtype=torch.float64), seed)
    return None if math.isnan(made.half) else StabilityRow(made.half, made.whole, made.splits)
