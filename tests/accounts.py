"""One model's whole account: discovered, run once, decomposed at every level, with every certificate looked at."""

from dataclasses import dataclass, field
from typing import Any

import torch
import zoo
from torch import nn

from mainstem.analysis.certificate import certify, check_reads
from mainstem.analysis.decompose import LEVELS, Decomposition, decompose
from mainstem.causal.labels import check_labels
from mainstem.errors import LevelRefusedError
from mainstem.model.anatomy import Anatomy
from mainstem.model.discovery import discover
from mainstem.run.capture import capture
from mainstem.run.moment import Moment, moment

KINDS = {
    "heads": {"head"},
    "subvalues": {"attention_subvalue"},
    "attention_neurons": {"attention_neuron"},
    "neurons": {"ffn_neuron", "expert_neuron"},
}
"""The kinds of parts that a level adds; `sublayers` and `units` add none of their own."""


@dataclass
class Account:
    """What came out: `exact` levels, `refused` ones with the reason, and certificates that do not hold."""

    anatomy: Anatomy
    exact: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def moment_of(model: nn.Module, anatomy: Anatomy, ids: torch.Tensor, **forward: Any) -> Moment:
    """The last position of one prompt."""
    last = torch.tensor([[ids.shape[1] - 1]])
    return moment(anatomy, capture(model, anatomy, ids, last, **forward), 0, 0, 0)


def refines(decomposition: Decomposition) -> bool:
    """Whether the level's own kind of parts is there (a level that no sublayer has is no success)."""
    level = decomposition.level
    return level not in KINDS or bool({group.kind for group in decomposition.groups} & KINDS[level])


def account(model: nn.Module, length: int = 9, **forward: Any) -> Account:
    """The account of a model at the end of a random prompt; errors of discovery are the caller's."""
    anatomy = discover(model, **forward)
    out = Account(anatomy)
    ids = zoo.prompt(length, seed=1)
    here = moment_of(model, anatomy, ids, **forward)
    for level in LEVELS:
        try:
            decomposition = decompose(here, level)
        except LevelRefusedError as error:
            out.refused[level] = error.reason or error.what
            continue
        certificate = certify(decomposition)
        if not certificate.holds:
            out.failures.append(f"{level}: {certificate.failed}")
        elif refines(decomposition):
            out.exact.add(level)
    for name, check in (
        ("reads", check_reads(decompose(here))),
        ("labels", check_labels(model, anatomy, ids, **forward)),
    ):
        if not check.holds:
            out.failures.append(f"{name}: {check.where} {check.worst:.1e} > {check.tolerance:.1e}")
    return out
