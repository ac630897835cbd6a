"""Outlier features by the published criterion: counts, shares, signs, quartiles; and the sections of the report."""

import json
import math

import pytest
import torch
from zoo import build

import mainstem
from mainstem.analysis.outliers import Criterion, OutlierCounts, variance_ranking
from mainstem.basis.kept_sections import Finished, KeptSections, identity
from mainstem.basis.outlier_reading import outlier_section
from mainstem.basis.reference import reference
from mainstem.causal.stream_points import StreamPoint
from mainstem.causal.stream_statistics import PointOutliers
from mainstem.causal.stream_watch import Rows, Seen
from mainstem.errors import UsageError
from mainstem.lab.texts import Text, open_text
from mainstem.report import as_html, as_json, as_text
from mainstem.report.rotation_figure import coordinates
from mainstem.results.basis_outliers import EmergenceSection

WIDTH = 40


class Characters:
    """A tokenizer of characters."""

    def __call__(self, text):
        return {"input_ids": [ord(character) % 64 for character in text]}

    def convert_ids_to_tokens(self, token):
        return self.decode([token])

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def decode(self, ids, **options):
        return "".join(chr(64 + int(token)) for token in ids)


def small(tokens, seed):
    return torch.rand(tokens, WIDTH, generator=torch.Generator().manual_seed(seed)) * 3.4


def counted(shares, layers, magnitude=6.0, tokens=100):
    """Counts where dimension 7 is at -8 at a share of the positions of each place."""
    counts = OutlierCounts(layers, WIDTH, magnitude)
    for place, share in enumerate(shares):
        x = small(tokens, place)
        x[: round(share * tokens), 7] = -8.0
        counts.add([place], x[None])
    return counts


def test_a_dimension_that_is_large_in_many_layers_and_at_many_positions_qualifies():
    (one,) = counted([0.5, 0.1, 0, 0, 0, 0], [0, 0, 1, 1, 2, 2]).features(Criterion())
    assert (one.dimension, one.count, one.qualifies, one.one_sided, one.positive) == (7, 60, True, True, 0.0)
    assert one.layers == pytest.approx(1 / 3) and one.positions == pytest.approx(60 / 600)


@pytest.mark.parametrize(
    ("shares", "criterion", "qualifies"),
    [
        ([0.2, 0.2, 0, 0], Criterion(), True),  # 2 of 4 layers, 10 % of positions
        ([0.23, 0, 0, 0], Criterion(), False),  # 5.75 % of positions
        ([0.24, 0, 0, 0], Criterion(), True),  # 25 % of layers, 6 % of positions: both at the threshold
        ([1, 0, 0, 0], Criterion(layers=0.3), False),
        ([0.2, 0.2, 0, 0], Criterion(positions=0.11), False),
    ],
)
def test_each_threshold_decides(shares, criterion, qualifies):
    (one,) = counted(shares, [0, 1, 2, 3]).features(criterion)
    assert one.qualifies is qualifies


def test_the_magnitude_decides_and_is_reached_by_equality():
    assert counted([0.5], [0], magnitude=8.0).values == 50
    assert counted([0.5], [0], magnitude=8.001).values == 0
    assert counted([0.5], [0], magnitude=8.001).features(Criterion()) == []


def test_a_layer_counts_once_over_its_inputs_and_often_means_a_share_of_positions():
    counts = counted([0.5, 0.5, 0.01, 0], [0, 0, 1, 2])
    (one,) = counts.features(Criterion())
    assert one.layers == pytest.approx(2 / 3) and one.layers_often == pytest.approx(1 / 3)


def test_counts_do_not_depend_on_batches():
    x = torch.cat([small(60, 1), small(60, 2) * 4, -small(30, 3) * 3])
    whole, parts = OutlierCounts([0], WIDTH, 6.0), OutlierCounts([0], WIDTH, 6.0)
    whole.add([0], x[None])
    for part in x.split([1, 80, 69]):
        parts.add([0], part[None])
    assert whole.features(Criterion()) == parts.features(Criterion()) != []
    assert whole.values == int((x.abs() >= 6).sum())


def test_what_is_counted_in_units_of_each_token_does_not_depend_on_what_chooses_the_columns():
    x = torch.randn(300, WIDTH, generator=torch.Generator().manual_seed(4))
    x[:, 3] *= 20
    x[5] *= 1e4  # a token that is large as a whole
    x[6] *= 1e-3
    x[9] = 0  # has no units
    scaled = x.double() / x.double().square().mean(1, keepdim=True).sqrt()
    for magnitude in (1.0, 3.0, 5.0):
        outliers = PointOutliers([StreamPoint("embed", "stream", 0, None)], "stream", magnitude, per_rms=True)
        for firsts, part in ((1, x[:200]), (0, x[200:])):
            index = torch.arange(len(part))
            outliers.see([0], Seen(part[None], Rows((1, len(part)), index, firsts, index, index)))
        assert torch.equal(outliers.counts.hits[0], (scaled.abs() >= magnitude).sum(0))
        assert outliers.counts.values > 0 and int(outliers.counts.tokens[0]) == 300


def test_quartiles_are_those_of_the_values_to_two_per_cent():
    x = torch.zeros(4000, WIDTH)
    x[:, 3] = torch.linspace(-40, 60, 4000)
    counts = OutlierCounts([0], WIDTH, 6.0)
    counts.add([0], x[None])
    (one,) = counts.features(Criterion())
    values = x[:, 3][x[:, 3].abs() >= 6]
    expected = values.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    assert list(one.quartiles) == pytest.approx(expected, rel=0.022)
    assert one.positive == pytest.approx(float((values > 0).float().mean())) and not one.one_sided


def test_the_ranking_by_variance_always_finds_some():
    variances = torch.ones(3, WIDTH, dtype=torch.float64)
    variances[:, 9] = 5.0
    dimensions, times = variance_ranking(variances, 2)
    assert int(dimensions[0]) == 9 and float(times[0]) == pytest.approx(5 * WIDTH / (WIDTH + 4))
    assert len(variance_ranking(torch.ones(2, 3), 10)[0]) == 3


# --- in a model -------------------------------------------------------------------------------------------


def planted(seed=1):
    """A model in whose stream dimension 5 is large: its norms have gains of 3 there and 0.2 elsewhere."""
    module = build("llama", seed)
    with torch.no_grad():
        module.model.embed_tokens.weight[:, 5] -= 40.0
        for layer in module.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.fill_(0.2)
                norm.weight[5] = 3.0
    return mainstem.open(module, tokenizer=Characters())


TEXT = Text("planted", "a test", "to be or not to be, that is the question " * 12)


OPTIONS: dict = {"text": TEXT, "tokens": 240, "eval_tokens": 48, "window": 24}


@pytest.fixture(scope="module")
def report():
    model = planted()
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    made = model.basis.report(**OPTIONS)
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
    return made


def test_a_planted_outlier_is_found_and_named(report):
    table = report.outliers.table("input")
    assert [row.dimension for row in table.rows if row.qualifies] == [5]
    assert (table.features, table.one_sided, table.layers_affected) == (1, 1, 1.0)
    assert table.rows[0].by_place == [1.0] * len(table.places) and table.rows[0].quartiles[2] < -6
    assert report.outliers.variance[0].times > 1
    stream = report.outliers.table("stream")
    assert stream.rows[0].dimension == 5 or stream.features == 0  # in units of the root mean square
    d_model = report.model["d_model"]
    assert report.kurtosis.points[1].kurtosis > 0.5 * d_model


def test_a_plain_model_has_none():
    model = mainstem.open(build("llama"), tokenizer=Characters())
    made = model.basis.outliers(text=TEXT, tokens=240, window=24)
    assert made.command == "basis outliers" and made.emergence is None
    assert all(not row.qualifies for table in made.outliers.tables for row in table.rows if table.kind != "stream")


def test_models_are_compared_by_size():
    smaller = mainstem.open(build("llama", layers=2), tokenizer=Characters())
    made = planted().basis.outliers(text=TEXT, others=[lambda: smaller], tokens=120, eval_tokens=48, window=24)
    one, two = made.emergence.models
    assert one.n_layers == 2 < two.n_layers and one.parameters < two.parameters
    assert (one.features, two.features) == (0, 1) and two.values > one.values
    assert all(row.perplexity > 1 and math.isfinite(row.perplexity) for row in (one, two))
    assert two.kurtosis > one.kurtosis and made.text["eval_tokens"] == 48
    for shown in (as_text(made), as_html(made), as_json(made)):
        assert "perplexity" in shown and "per 2,048 tokens" in shown or "values" in shown


@pytest.mark.parametrize("eval_tokens, predicted", [(10, 10), (500, 120)])
def test_perplexities_are_of_as_many_tokens_as_is_said(eval_tokens, predicted):
    said: list[str] = []
    options = {"text": TEXT, "tokens": 120, "eval_tokens": eval_tokens, "window": 24}
    made = planted().basis.outliers(others=[planted], say=said.append, **options)
    assert made.text["eval_tokens"] == predicted and f"Predicting {predicted} tokens" in said


def test_the_report_is_the_composition_of_its_sections(report):
    document = json.loads(as_json(report))
    assert document["schema"] == "mainstem/basis-report/1" and document["text"]["tokens"] == 240
    assert {"kurtosis", "outliers"} <= set(document)
    text, html = as_text(report, 120), as_html(report)
    for shown in (text, html):
        assert "Kurtosis" in shown and "Outlier features" in shown and "1 dimension qualifies (5)" in shown
    assert "<svg" in html and "royalty" in html
    cells = report.cells()
    assert {cell["section"] for cell in cells} >= {"kurtosis", "outliers"}
    assert all(isinstance(cell["value"], float) for cell in cells)


def test_an_interrupted_report_goes_on_from_its_state(report, tmp_path):
    state = tmp_path / "state.json"

    def stop(text):
        if not text.startswith(("Measuring", "Rotating the stream")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planted().basis.report(**OPTIONS, state=state, say=stop)
    said = []
    whole = planted().basis.report(**OPTIONS, state=state, say=said.append)
    assert said and not any(text.startswith(("Measuring the stream", "Rotating the stream")) for text in said)
    said.clear()
    again = planted().basis.report(**OPTIONS, state=state, say=said.append)
    assert not said and again.as_dict() | {"provenance": None} == whole.as_dict() | {"provenance": None}
    assert (whole.sections(), whole.warnings, whole.notes) == (report.sections(), report.warnings, report.notes)


def test_the_state_of_another_report_is_refused(tmp_path):
    state = tmp_path / "state.json"
    model, other = planted(), planted(seed=2)
    on, shorter = (reference(model, TEXT, count, 24) for count in (240, 120))
    kept = KeptSections(state, identity(model, on, eval_tokens=48))
    kept.get("emergence", lambda: Finished(EmergenceSection([]), notes=["a note"]))
    again = KeptSections(state, identity(model, on, eval_tokens=48)).get("emergence", lambda: None)
    assert again == Finished(EmergenceSection([]), [], ["a note"])
    for wrong, named in (
        (identity(model, shorter, eval_tokens=48), "text, tokens"),
        (identity(other, on, eval_tokens=48), "weights"),
        (identity(model, on, eval_tokens=96), "eval_tokens"),
    ):
        with pytest.raises(UsageError, match=f"another report: its {named} differ"):
            KeptSections(state, wrong)
    kind = b'{"kind": "mainstem basis report"'
    hollow = (b"}", b', "of": {}}', b', "of": 1, "sections": {}}', b', "of": {}, "sections": {"emergence": 1}}')
    for content in (b"something else", b"\xff", b"[1]", *(kind + rest for rest in hollow)):
        state.write_bytes(content)
        with pytest.raises(UsageError, match="not the state of a basis report"):
            KeptSections(state, identity(model, on, eval_tokens=48))
    with pytest.raises(UsageError, match="cannot be kept"):
        KeptSections(tmp_path / "nowhere" / "state.json", {})


def test_a_model_with_weights_that_are_no_numbers_knows_its_own_state(tmp_path):
    module = build("llama")
    model = mainstem.open(module, tokenizer=Characters())
    on = reference(model, TEXT, 120, 24)
    with torch.no_grad():
        module.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    kept = KeptSections(tmp_path / "state.json", identity(model, on))
    kept.get("emergence", lambda: Finished(EmergenceSection([])))
    assert KeptSections(tmp_path / "state.json", identity(model, on)).done


@pytest.mark.parametrize("wrong", [Criterion(magnitude=0.0), Criterion(layers=25.0), Criterion(positions=-0.1)])
def test_thresholds_that_mean_nothing_are_refused(wrong):
    with pytest.raises(UsageError, match="0"):
        planted().basis.outliers(text=TEXT, criterion=wrong)


def test_a_text_shorter_than_a_window_is_refused():
    with pytest.raises(UsageError, match="5 tokens, a window 24"):
        planted().basis.report(text=Text("short", "a test", "short"), window=24)


def test_a_rotation_spreads_a_vector_over_the_axes():
    assert coordinates(0) == (1.0, 0.0)
    assert coordinates(45) == pytest.approx((math.sqrt(0.5), math.sqrt(0.5)))


@pytest.mark.slow
def test_dimension_247_of_the_default_model_is_found(demo_model):
    from mainstem.analysis.outliers import PUBLISHED
    from mainstem.basis.measuring import measure_stream

    on = reference(demo_model, open_text("drama"), tokens=1024)
    section = outlier_section(demo_model, measure_stream(demo_model, on), PUBLISHED)
    table = section.table("input")
    (found,) = [row for row in table.rows if row.qualifies]
    assert found.dimension == 247 and found.one_sided and found.layers_often == pytest.approx(0.4)
    assert found.layers >= 0.4 and not section.table("heads").features
    assert any(row.firsts == row.count == 2 for row in section.massive)
