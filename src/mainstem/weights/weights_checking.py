"""The certificate of a model's factored weights: some attention sublayers, rebuilt from a run of the model itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mainstem.analysis.certificate import Check
from mainstem.analysis.weights_certificate import check_weights
from mainstem.causal.edited import unedited
from mainstem.errors import CertificateError, LevelRefusedError
from mainstem.run.inputs import base_arguments
from mainstem.run.operands import AttentionOperands, operands_of
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.session import Model

SUBLAYERS = 3
"""How many sublayers are checked: the first, the last and those evenly between."""


def weights_certificate(model: "Model", ids: Sequence[int]) -> Check:
    """Queries, keys, values and writes of some sublayers, rebuilt from the weights, against a run on `ids`.

    Raises:
        CertificateError: if they are not what the model computed; names the sublayer and the side.
        LevelRefusedError: if the model has no heads.
    """
    weights = model.weights
    weights.require_heads()
    sublayers = list(dict.fromkeys(head.sublayer for head in weights.heads))
    step = max((len(sublayers) - 1) / (SUBLAYERS - 1), 1)
    chosen = [sublayers[round(i * step)] for i in range(min(SUBLAYERS, len(sublayers)))]
    with unedited(model.module):
        trace = model.trace(ids, positions=range(len(ids)))
        moments = [trace.run.moment(position) for position in range(len(ids))]
        writes = [_attention_write(model, unit) for unit in chosen]
        operands = operands_of(model.module, model.anatomy, writes, trace.inputs.ids, **base_arguments(model.module))
    found = [
        check_weights(weights, unit, _had(operands[write]), moments) for unit, write in zip(chosen, writes, strict=True)
    ]
    worst = max(found, key=lambda check: check.worst)
    failed = next((check for check in found if not check.holds), worst)
    if not failed.holds:
        what = "Factored weights do not give what the model computed"
        raise CertificateError(what, failed.where, None, failed.worst, failed.tolerance)
    return Check(sum(check.checked for check in found), worst.worst, worst.tolerance, True)


def _attention_write(model: "Model", unit: Unit) -> int:
    writes = model.anatomy.writes
    return next(i for i in model.anatomy.writes_of(unit) if writes[i].attention is not None)


def _had(operands: AttentionOperands | LevelRefusedError) -> AttentionOperands:
    if isinstance(operands, LevelRefusedError):
        raise operands
    return operands
