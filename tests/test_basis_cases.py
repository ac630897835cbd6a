"""The cases of outliers and of the privileged basis, run whole on a tiny model with one planted dimension."""

import pytest
from tiny_models import worded, words

from mainstem.basis.reference import reference
from mainstem.experiments import outliers, privileged_basis
from mainstem.experiments.outcome import Experiment
from mainstem.report import as_html, as_json, as_text

OUTLIER = 5


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Experiment]:
    model = worded(tmp_path_factory.mktemp("models") / "words", gain=8.0)  # six sigma in a random basis is rare

    def small(model, text, tokens):
        return reference(model, words(0, n=200), min(tokens, 128), 32)

    with pytest.MonkeyPatch.context() as patch:
        for module in (outliers, privileged_basis):
            patch.setattr(module, "reference", small)
        patch.setattr(type(model.basis), "rotate", _on_words(type(model.basis).rotate))
        return {name: module.run(model, quick=True) for name, module in MODULES.items()}


MODULES = {"outliers": outliers, "privileged-basis": privileged_basis}


def _on_words(rotate):
    return lambda self, kind, tokens, say: rotate(self, kind, text=words(1, n=200), tokens=64, window=32, say=say)


def _findings(case: Experiment) -> dict[str, str]:
    return {claim.claim: claim.finding for claim in case.claims}


def test_the_planted_dimension_is_found_and_matters(made) -> None:
    case = made["outliers"]
    few = case.claims[0]
    assert few.finding == "reproduced" and few.measured.startswith(f"1 of 64: {OUTLIER} ")
    assert len(case.claims) == len(_findings(case)), "two claims with the same words"
    assert all(claim.null and claim.measured for claim in case.claims)


def test_a_rotated_model_is_the_same_model(made) -> None:
    case = made["privileged-basis"]
    claim = next(claim for claim in case.claims if "rotated model" in claim.claim)
    assert claim.finding == "reproduced"
    assert claim.values["float64 with casts lifted"] == pytest.approx(0, abs=1e-10)


@pytest.mark.parametrize("name", MODULES)
def test_cases_are_rendered(made, name) -> None:
    case = made[name]
    page, table = as_html(case), as_text(case, 120)
    assert all(claim.finding in page and claim.finding in table for claim in case.claims)
    assert f'"command": "reproduce {name}"' in as_json(case)
