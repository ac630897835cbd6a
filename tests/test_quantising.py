"""What quantisers do to a whole model: rows against full precision, copies in other bases, requests that are wrong."""

import json
import math

import pytest
import zoo
from tiny_models import worded, words

import mainstem
from mainstem.analysis.quantizers import QUANTISERS
from mainstem.basis.quantising import chosen_quantisers, quantise, rotated_copy
from mainstem.errors import ChoiceError, RefusedError, TextError, UsageError
from mainstem.lab.texts import Text
from mainstem.report import as_html, as_json, as_text
from mainstem.results.basis_quantisers import AS_IT_IS, FULL, CloserRow
from mainstem.results.basis_report import BasisReport
from mainstem.session import Model

CHOSEN = ("absmax", "vector-wise", "llm.int8", "w4a4", "w4a4-smoothquant")
WINDOW = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Model:
    return worded(tmp_path_factory.mktemp("models") / "words")


@pytest.fixture(scope="module")
def report(tiny: Model) -> BasisReport:
    return quantise(tiny, CHOSEN, texts=[words(0), words(1, "more")], tokens=64, window=WINDOW, thresholds=[3.0])


def test_every_run_has_a_row_on_every_text_against_full_precision(report: BasisReport) -> None:
    section = report.quantisers
    assert section is not None
    names = [FULL, *CHOSEN, "llm.int8 at 3"]
    assert [(row.text, row.quantiser) for row in section.rows] == [(t, n) for t in ("words", "more") for n in names]
    for row in section.rows:
        assert row.tokens == 60 and row.basis == AS_IT_IS
        assert row.low <= row.change <= row.high and row.kl_low <= row.kl <= row.kl_high
        full = next(r for r in section.rows if r.text == row.text)
        assert row.change == pytest.approx(math.log(row.perplexity / full.perplexity), abs=1e-9)
        assert (row.kl == 0 and row.flips == 0) if row.quantiser == FULL else row.kl > 0


def test_what_is_taken_out_is_counted_and_helps(report: BasisReport) -> None:
    section = report.quantisers
    assert section is not None
    kept = {row.quantiser: row.kept for row in section.layers if row.layer == "L0.attn query"}
    assert kept["llm.int8"] == 1 / 64 and kept["vector-wise"] == 0
    assert kept["llm.int8 at 3"] >= kept["llm.int8"]
    errors = {row.quantiser: row.relative_error for row in section.layers if row.layer == "L0.attn query"}
    assert errors["llm.int8"] < errors["vector-wise"] < errors["w4a4"]
    assert {row.role for row in section.layers} == {
        *("attn query", "attn key", "attn value", "attn out", "mlp gate", "mlp up", "mlp out")
    }
    pair = next(row for row in section.closer if row.second == "vector-wise")
    assert pair.first == "llm.int8" and pair.closer == "llm.int8"


def test_a_difference_that_may_be_zero_has_no_winner() -> None:
    assert CloserRow("t", "a", "b", -0.1, -0.3, 0.1).closer is None
    assert CloserRow("t", "a", "b", 0.2, 0.1, 0.3).closer == "b"


def test_all_that_is_no_embedding_is_quantised_and_counted(report: BasisReport, tiny: Model) -> None:
    section = report.quantisers
    assert section is not None
    inside = sum(p.numel() for n, p in tiny.module.named_parameters() if p.dim() == 2 and "layers" in n)
    assert section.parameters == section.matrices == inside and section.left == []


def test_a_rotated_copy_is_compared_with_the_model_as_it_is(tiny: Model) -> None:
    section = quantise(tiny, ["absmax"], texts=[words(0)], tokens=48, window=WINDOW, rotation="random").quantisers
    assert section is not None
    other = "rotated"
    rows = {(row.basis, row.quantiser): row for row in section.rows}
    assert list(rows) == [(b, q) for b in (AS_IT_IS, other) for q in (FULL, "absmax")]
    assert abs(rows[other, FULL].change) < 1e-5 and rows[other, FULL].kl < 1e-6
    errors = {(row.basis, row.layer): row.relative_error for row in section.layers}
    assert errors[other, "L0.attn query"] < errors[AS_IT_IS, "L0.attn query"]  # one large input, spread
    assert [(row.first, row.second) for row in section.closer] == [(f"absmax, {other}", "absmax")]


def test_a_document_and_a_page_hold_every_number(report: BasisReport) -> None:
    document = json.loads(as_json(report))
    assert document["command"] == "basis quantise"
    own = document["quantisers"]
    assert {row["quantiser"] for row in own["rows"]} == {FULL, *CHOSEN, "llm.int8 at 3"}
    assert own["closer"][0]["closer"] in ("llm.int8", "absmax", None)
    assert any(cell["section"] == "quantisers" and cell["quantity"] == "kl" for cell in report.cells())
    page, table = as_html(report), as_text(report, 200)
    for part in ("KL to full precision on more", "Errors along the layers", "llm.int8 at 3"):
        assert part in page
    for part in ("Quantisers on words", "Closer to full precision", "w4a4-smoothquant"):
        assert part in table


def test_requests_that_are_wrong_are_refused(tiny: Model) -> None:
    with pytest.raises(ChoiceError, match=r"llm\.int8"):
        quantise(tiny, ["llm-int8"])
    with pytest.raises(UsageError, match="above zero"):
        quantise(tiny, thresholds=[0.0])
    with pytest.raises(UsageError, match="No text"):
        quantise(tiny, texts=[])
    with pytest.raises(TextError):
        quantise(tiny, texts=[words(0, n=5)], window=WINDOW)
    with pytest.raises(UsageError, match=r"same name \(words\)"):  # their rows could not be told apart
        quantise(tiny, texts=[words(0), words(1)], window=WINDOW)
    assert list(chosen_quantisers()) == list(QUANTISERS)


def test_one_token_has_no_interval_and_one_quantiser_no_rival(tiny: Model) -> None:
    table = as_text(quantise(tiny, ["absmax"], texts=[words(0)], tokens=2, window=2))
    assert "– to –" not in table and "farthest" not in table and "absmax is this far from full precision" in table


def test_a_copy_that_turns_while_it_runs_is_refused_in_words_of_its_own() -> None:
    with pytest.raises(RefusedError, match=r"turns back and forth while it runs.*post_attention_layernorm.*own basis"):
        rotated_copy(mainstem.open(zoo.build("gemma2", layers=1)), "hadamard")


def test_a_model_that_is_quantised_already_is_refused(tiny: Model) -> None:
    tiny.module.is_quantized = True
    try:
        with pytest.raises(RefusedError, match="quantised already"):
            quantise(tiny, ["absmax"], texts=[words(0)], window=WINDOW)
    finally:
        del tiny.module.is_quantized


def test_edits_that_hold_outside_do_not_reach_the_runs(tiny: Model) -> None:
    options = {"texts": [words(0)], "tokens": 32, "window": WINDOW}
    plain = tiny.basis.quantisers(["absmax"], **options)
    with tiny.edited(mainstem.Edit.zero("L0.mlp")):
        within = tiny.basis.quantisers(["absmax"], **options)
    assert within.quantisers == plain.quantisers


def test_a_rotation_is_learned_on_another_text_than_it_is_judged_on(tiny: Model, monkeypatch) -> None:
    read: list[str] = []
    own = Text.ids
    monkeypatch.setattr(Text, "ids", lambda self, *given: read.append(self.name) or own(self, *given))
    rows = quantise(tiny, ["absmax"], texts=[words(0)], tokens=32, rotation="learned").quantisers.rows
    assert read == ["words", "reference"] and {row.basis for row in rows} == {AS_IT_IS, "rotated"}
