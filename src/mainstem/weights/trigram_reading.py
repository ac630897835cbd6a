"""All heads of a model by one skip trigram; scores and null are in `mainstem.analysis.trigram_heads`."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from mainstem.analysis import warnings as warn
from mainstem.analysis.false_discovery import RATE, q_values
from mainstem.analysis.readout import require_linear
from mainstem.analysis.token_vectors import Read
from mainstem.analysis.trigram_heads import ROLES, HeadTrigrams, head_trigrams
from mainstem.errors import UsageError
from mainstem.results.reading import CheckSummary
from mainstem.results.trigram import TrigramHeadRow, TrigramReading
from mainstem.targets import parse_token
from mainstem.units import Unit
from mainstem.weights.circuit_reading import token_embedding
from mainstem.whole_numbers import whole_number

if TYPE_CHECKING:
    from mainstem.session import Model


def read_trigram(
    model: "Model", source: str, destination: str, out: str, *, offset: int = 0, top: int = 10
) -> TrigramReading:
    """All heads, ranked by a skip trigram.

    Args:
        model: the model.
        source: what is looked at, text of one token or `id:7042`.
        destination: what looks at it, likewise.
        out: what is then predicted, likewise.
        offset: destination minus source, for rotary embedding.
        top: how many heads a table shows.

    Raises:
        TokenError, UsageError, PositionError: if an argument is wrong.
        LevelRefusedError: if the model has no heads, or the embedding or the readout cannot be read.
        CertificateError: if the factored weights are not those of the model.
    """
    if whole_number("top", top) < 1:
        raise UsageError("No heads are to be shown", "top", "Give 1 or more.")
    weights = model.weights
    weights.require_heads()
    factors = model.weights_check
    require_linear(model.anatomy.readout)
    embedded, reads = token_embedding(model), Read(model.anatomy.readout, model.anatomy.sizes.d_model)
    sizes = (len(embedded), len(embedded), len(reads))
    texts = (source, destination, out)
    first, second, third = (parse_token(text, model.tokenizer, n) for text, n in zip(texts, sizes, strict=True))
    rows: list[tuple[Unit, HeadTrigrams, int]] = []
    for sublayer in dict.fromkeys(head.sublayer for head in weights.heads):
        if sublayer not in weights.qk_refusals:
            qk, ov = weights.qk(sublayer, offset), weights.ov(sublayer)
            found = head_trigrams(qk, ov, embedded, reads, (first, second, third))
            heads = [head for head in weights.heads if head.sublayer == sublayer]
            rows += [(head, found, i) for i, head in enumerate(heads)]
    listed = _rows(rows)
    return TrigramReading(
        provenance=model.provenance(),
        warnings=[w.as_dict() for w in warn.tied_tables_warning(model.anatomy.tied)],
        model=model.summary,
        source=model.token(first),
        destination=model.token(second),
        out=model.token(third),
        ids=[first, second, third],
        offset=offset,
        rate=RATE,
        found=[row.head for row in listed if row.score > 0 and row.q <= RATE],
        heads=listed,
        top=top,
        factors=CheckSummary(**asdict(factors)),
        notes=_notes(model),
    )


def _rows(found: list[tuple[Unit, HeadTrigrams, int]]) -> list[TrigramHeadRow]:
    if not found:
        return []
    reached = torch.stack([trigrams.reached[i] for _, trigrams, i in found]).cpu()
    p, weakest = reached.max(-1)
    q = q_values(p)
    rows = [
        TrigramHeadRow(
            head=str(head),
            qk=float(trigrams.qk[i]),
            ov=float(trigrams.ov[i]),
            score=float(trigrams.score[i]),
            source_rank=int(trigrams.source_rank[i]),
            out_rank=int(trigrams.out_rank[i]),
            p=float(p[n]),
            weakest=ROLES[int(weakest[n])],
            q=float(q[n]),
        )
        for n, (head, trigrams, i) in enumerate(found)
    ]
    return sorted(rows, key=lambda row: row.score, reverse=True)


def _notes(model: "Model") -> list[str]:
    notes = [
        "Scales of norms are left out, and so are biases; QK entries are above the mean source, OV entries above the "
        "mean output; ratios are in units of each table's root mean square.",
        "Only the direct path from the embedding to the head and from the head to the logits: heads beyond the first "
        "layer read what others wrote, too.",
    ]
    notes += [f"{unit} is left out: {refusal}" for unit, refusal in model.weights.qk_refusals.items()]
    return notes + list(model.weights.approximations)
