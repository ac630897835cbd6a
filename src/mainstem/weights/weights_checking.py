"""The certificate of a model's factored weights: some attention sublayers, rebuilt from a run of the model itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mainstem.analysis.certificate import Check
from mainstem.analysis.weights_certificate import check_weights
from mainstem.causal.edited import unedited
from mainstem.errors import CertificateError
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
        found = [_check(model, unit, trace, moments) for unit in chosen]
    worst = max(found, key=lambda check: check.worst)
    failed = next((check for check in found if not check.holds), worst)
    if not failed.holds:
        what = "Factored weights do not give what the model computed"
        raise CertificateError(what, failed.where, None, failed.worst, failed.tolerance)
    return Check(sum(check.checked for check in found), worst.worst, worst.tolerance, True)


def _check(model: "Model", unit: Unit, trace, moments) -> Check:
    index = next(i for i in model.anatomy.writes_of(unit) if model.anatomy.writes[i].attention is not None)
    return check_weights(model.weights, unit, trace.run.operands(index), moments)
