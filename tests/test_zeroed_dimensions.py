"""Dimensions taken out where matrices read the stream: laws, a naive loop, a planted outlier, hostile requests."""

import json
import math
from dataclasses import replace

import handmade
import pytest
import torch
from report_samples import NASTY
from torch import nn

import mainstem
from mainstem.analysis.top_mass import pattern_measures
from mainstem.basis.ablating import WHERES, _measured
from mainstem.basis.ablation_rows import verdicts
from mainstem.causal.changes import Pass, change_taps
from mainstem.causal.evaluation import Evaluation, evaluate
from mainstem.causal.head_changes import received
from mainstem.causal.stream_statistics import PointMoments
from mainstem.causal.stream_watch import watch
from mainstem.causal.top_attention import top_attention
from mainstem.causal.zeroed_dimensions import (
    at_mean,
    changed_run,
    nearest_dimensions,
    random_dimensions,
    read_inputs,
    subtracted,
    zeroed,
)
from mainstem.errors import ChoiceError, RefusedError, TextError, UsageError
from mainstem.lab.texts import Text
from mainstem.model.hooks import tapped
from mainstem.model.outputs import logits_of
from mainstem.report import as_html, as_json, as_text
from mainstem.run.windows import windows
from mainstem.session import Model

WIDTH, LENGTH = handmade.WIDTH, 24


def ids(n=LENGTH, seed=0):
    return torch.randint(handmade.VOCABULARY, (n,), generator=torch.Generator().manual_seed(seed))


def opened(name="plain"):
    return mainstem.open(handmade.ALL[name]())


@pytest.fixture(scope="module")
def plain():
    return opened()


def logits(model, changes=()):
    return changed_run(model.module, changes)(ids()[None])


def moments_of(model, inputs, cut):
    made = PointMoments([each.point for each in inputs])
    with torch.no_grad():
        watch(model.module, lambda ids: model.module(input_ids=ids), made.points, cut, [made])
    return made


# --- laws -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["attention", "everywhere"])
@torch.no_grad()
def test_taking_out_no_dimension_changes_no_bit(plain, where):
    nothing = torch.tensor([], dtype=torch.long)
    assert torch.equal(logits(plain, zeroed(read_inputs(plain.anatomy, where), nothing)), logits(plain))


@pytest.mark.parametrize("name", ["plain", "in_place", "parallel", "shared_block", "einsum_sinks", "post_norm"])
@torch.no_grad()
def test_zeroing_every_dimension_gives_matrices_zeros_to_read(name):
    """At attention's inputs: as if its query, key and value matrices were zero, for these models have no bias there."""
    model = opened(name)
    inputs = read_inputs(model.anatomy, "attention")
    found = logits(model, zeroed(inputs, torch.arange(WIDTH)))
    before = logits(model)
    blank = handmade.ALL[name]()
    for module in blank.modules():
        for own in ("query", "key", "value"):
            if isinstance(getattr(module, own, None), nn.Linear):
                getattr(module, own).weight.zero_()
        if hasattr(module, "qkv"):
            module.qkv.zero_()
    torch.testing.assert_close(found, logits_of(blank(input_ids=ids()[None])))
    assert not torch.allclose(found, before)
    assert torch.equal(logits(model), before)


@torch.no_grad()
def test_everything_zeroed_leaves_the_same_logits_for_every_token(plain):
    """The unembedding reads zeros, too."""
    found = logits(plain, zeroed(read_inputs(plain.anatomy, "everywhere"), torch.arange(WIDTH)))
    assert not found.any()


def test_what_is_read_everywhere_holds_what_attention_reads(plain):
    attention, everywhere = (read_inputs(plain.anatomy, where) for where in ("attention", "everywhere"))
    assert [each.point.name for each in attention] == [f"L{i}.attn.input" for i in range(handmade.LAYERS)]
    assert set(attention) < set(everywhere)
    assert everywhere[-1].point.name == "unembed.input"
    assert len(attention[0].sites) == 3  # query, key and value matrices


@torch.no_grad()
def test_a_mean_in_its_own_place_changes_a_constant_dimension_by_nothing(plain):
    """After one run the mean of one token's first position is what was there; by place it is put back there alone."""
    inputs = read_inputs(plain.anatomy, "attention")[:1]
    moments = moments_of(plain, inputs, windows(ids().tolist(), LENGTH))
    dimensions = torch.tensor([3, 5])
    seen = {}

    def keep(name):
        return lambda leaves: seen.__setitem__(name, leaves[inputs[0].sites[0].slot].clone())

    for name, changes in {
        "plain": [],
        "mean": at_mean(inputs, dimensions, moments, by_place=False),
        "by place": at_mean(inputs, dimensions, moments, by_place=True),
    }.items():
        with tapped(plain.module, [*change_taps(changes, Pass(1, LENGTH)), (inputs[0].sites[0], keep(name))]):
            plain.module(input_ids=ids()[None])
    before = seen["plain"][0][:, dimensions]
    torch.testing.assert_close(seen["mean"][0][:, dimensions], before.mean(0).expand_as(before))
    torch.testing.assert_close(seen["by place"][0][0, dimensions], before[0])
    torch.testing.assert_close(seen["by place"][0][1:, dimensions], before[1:].mean(0).expand_as(before[1:]))
    others = [i for i in range(WIDTH) if i not in (3, 5)]
    assert torch.equal(seen["mean"][0][:, others], seen["plain"][0][:, others])


@torch.no_grad()
def test_the_norm_that_is_subtracted_is_that_of_the_dimensions(plain):
    inputs = read_inputs(plain.anatomy, "attention")[:1]
    site = inputs[0].sites[0]
    dimensions, others = torch.tensor([1, 2, 3]), torch.tensor([7, 9])
    change = subtracted(inputs, dimensions, others)[0]
    x = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    new = change.new(x, torch.arange(5))
    torch.testing.assert_close((x - new).norm(dim=-1), x[:, 2:].norm(dim=-1))
    assert torch.equal(new[:, 2:], x[:, 2:])
    assert change.site == site and change.entries.tolist() == [7, 9, 1, 2, 3]
    same = x.clone()
    same[:, :2] *= (x[:, 2:].norm(dim=-1) / x[:, :2].norm(dim=-1))[:, None]
    torch.testing.assert_close(change.new(same, torch.arange(5))[:, :2], torch.zeros(5, 2), atol=1e-6, rtol=0)


def test_controls_are_other_dimensions_and_as_many():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.arange(1, 101, dtype=torch.float64)
    taken = [97, 98, 99]
    for _ in range(20):
        for drawn in (random_dimensions(100, taken, generator), nearest_dimensions(sizes, taken, generator)):
            assert len(set(drawn.tolist())) == 3
            assert not set(drawn.tolist()) & set(taken)
        assert min(drawn.tolist()) >= 97 - 20 - 3  # the nearest in size


# --- attention, layer by layer ----------------------------------------------------------------------------


def naive_patterns(model, layer, changes):
    """All patterns of one layer, from a whole run under changes of that layer's reads alone."""
    core = next(w.attention for w in model.anatomy.writes if w.attention is not None and w.unit.layer == layer)
    kept, now = [], Pass(1, LENGTH)

    def look(leaves):
        operands = received(core, leaves, 1, LENGTH)
        kept.extend(operands.of("pattern", 0, head, core.n_heads) for head in range(core.n_heads))

    with tapped(model.module, [*change_taps(changes, now), (core.site, look)]):
        model.module(input_ids=ids()[None])
    return kept


@pytest.mark.parametrize("name", ["plain", "in_place", "parallel", "shared_block", "einsum_sinks", "post_norm"])
@torch.no_grad()
def test_each_layer_by_itself_is_what_a_naive_loop_finds(name):
    model = opened(name)
    inputs = read_inputs(model.anatomy, "attention")
    changes = zeroed(inputs, torch.tensor([0, 5, 9]))
    variants = {"none": [], "zero": changes}
    layers = list(top_attention(model.module, model.anatomy, ids()[None], variants))
    assert len(layers) == handmade.LAYERS
    for layer, (heads, found) in enumerate(layers):
        assert [str(head) for head in heads] == [f"L{layer}H{h}" for h in range(handmade.HEADS)]
        own = [c for c in changes if c.site in inputs[layer].sites]
        regular, zero = naive_patterns(model, layer, []), naive_patterns(model, layer, own)
        expected = torch.stack([pattern_measures(p, r) for p, r in zip(zero, regular, strict=True)])
        torch.testing.assert_close(found["zero"], expected, atol=1e-6, rtol=1e-5)
        plain = torch.stack([pattern_measures(p, p) for p in regular])
        torch.testing.assert_close(found["none"], plain, atol=1e-6, rtol=1e-5)
        assert found["zero"][:, 2].min() > 0 and not found["none"][:, 2].any()


def test_measures_of_patterns():
    pattern = torch.tensor([[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0.25, 0.25]])
    regular = torch.tensor([[1.0, 0, 0], [0.75, 0.25, 0], [0.5, 0.25, 0.25]])
    top, first, moved = pattern_measures(pattern, regular).tolist()
    assert (top, first, moved) == (0.625, 0.375, 0.25)


# --- a planted outlier ------------------------------------------------------------------------------------

PLANTED = 17


class Planted(nn.Module):
    """The plain model with one dimension that is large in every token and that attention reads above all."""

    def __init__(self) -> None:
        super().__init__()
        self.model = handmade.ALL["plain"]()
        with torch.no_grad():
            for block in self.model.blocks:
                for matrix in (block.attention.query, block.attention.key, block.attention.value):
                    matrix.weight[:, [i for i in range(WIDTH) if i != PLANTED]] *= 0.02
                    matrix.weight[:, PLANTED] *= 3
            self.model.tokens.weight[:, PLANTED] += 6.0
            for block in self.model.blocks:
                block.attention.out.weight.mul_(4)

    def forward(self, input_ids, **kwargs):
        return self.model(input_ids, **kwargs)


def taken_out(model, *dimensions, draws=2, **options):
    text = Text("noise", "made by hand", "unused")
    return model.basis.ablations(
        list(dimensions) or None, text=text, tokens=72, window=LENGTH, control_tokens=LENGTH, draws=draws, **options
    )


@pytest.fixture
def encoded(monkeypatch):
    """Every text is 72 random tokens."""
    monkeypatch.setattr(Model, "encode", lambda self, prompt, chat=False: ids(72, 3).tolist())


def test_a_planted_dimension_matters_and_random_ones_do_not(encoded):
    model = mainstem.open(Planted().eval())
    section = taken_out(model, PLANTED, draws=10).ablations
    against = {(v.where, v.control): v for v in section.verdicts}
    rows = {row.what: row for row in section.patterns}
    assert rows["zero"].moved > 4 * rows["random"].moved
    zero = next(r for r in section.runs if (r.where, r.what, r.tokens) == ("attention", "zero", section.control_tokens))
    random = next(r for r in section.runs if (r.where, r.what) == ("attention", "random"))
    assert zero.kl > 4 * random.kl
    assert set(against) == {(w, c) for w in ("attention", "everywhere") for c in ("random", "nearest", "same_norm")}
    other = taken_out(model, PLANTED + 1).ablations
    assert other.patterns[1].moved < rows["zero"].moved / 4


def test_nothing_is_so_many_times_as_much_where_one_of_the_two_lowers_the_perplexity():
    plain, worse, better = (
        Evaluation(torch.full((4,), loss), torch.zeros(4), torch.zeros(4, dtype=torch.bool), torch.ones(4))
        for loss in (2.0, 2.5, 1.5)
    )
    names = [f"{where} {control}" for where in ("attention", "everywhere") for control in ("random 0", "same_norm 0")]
    made = {"nowhere none": plain, "attention zero": better, "everywhere zero": worse} | dict.fromkeys(names, worse)
    made |= {f"{where} nearest 0": better for where in ("attention", "everywhere")}
    times = {(v.where, v.control): v.times for v in verdicts(made)}
    assert times["everywhere", "random"] == pytest.approx(1.0)
    assert times["attention", "random"] is times["attention", "nearest"] is times["everywhere", "nearest"] is None


def test_attentions_inputs_are_measured_also_where_another_matrix_comes_first(encoded):
    """As where the first matrix that reads for attention is a gate of its output: here the query's is called that."""
    model = opened()
    reads = [replace(r, roles=("output_gate",)) if r.roles == ("query",) else r for r in model.anatomy.reads]
    model.anatomy = replace(model.anatomy, reads=tuple(reads))
    inputs = {where: read_inputs(model.anatomy, where) for where in WHERES}
    assert inputs["attention"][0].point not in [each.point for each in inputs["everywhere"]]
    found, _ = _measured(model, inputs, windows(ids(72).tolist(), LENGTH), lambda text: None)
    for number in range(handmade.LAYERS):
        assert found["attention"].points[number].name == f"L{number}.attn.input"
        assert torch.equal(found["attention"].whole(number).mean, found["everywhere"].whole(2 * number).mean)


def test_outliers_are_found_by_the_criterion_or_the_most_varied_are_taken(encoded):
    planted = mainstem.open(Planted().eval())
    report = taken_out(planted)
    assert report.ablations.chosen_by == "outliers"
    assert [row.dimension for row in report.ablations.dimensions] == [PLANTED]
    varied = taken_out(planted, by="variance", count=2)
    assert varied.ablations.chosen_by == "variance" and len(varied.ablations.dimensions) == 2
    assert all(row.change is not None for row in varied.ablations.dimensions)


# --- the result -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reading():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "encode", lambda self, prompt, chat=False: ids(72, 3).tolist())
        return taken_out(mainstem.open(handmade.ALL["plain"]()), 4, 9)


def test_rows_agree_with_runs_made_by_hand(reading, plain):
    section = reading.ablations
    cut = windows(ids(72, 3).tolist(), LENGTH)
    inputs = read_inputs(plain.anatomy, "everywhere")
    with torch.no_grad():
        made = evaluate(
            {
                "plain": changed_run(plain.module, ()),
                "zero": changed_run(plain.module, zeroed(inputs, torch.tensor([4, 9]))),
            },
            cut,
        )
    rows = {(r.where, r.what): r for r in section.runs if r.tokens == section.tokens}
    assert rows["nowhere", "none"].perplexity == pytest.approx(made["plain"].perplexity)
    zero = rows["everywhere", "zero"]
    assert zero.perplexity == pytest.approx(made["zero"].perplexity)
    assert zero.change == pytest.approx(made["zero"].loss - made["plain"].loss)
    assert zero.ratio == pytest.approx(math.exp(zero.change))
    assert zero.low <= zero.change <= zero.high
    assert zero.output_top == pytest.approx(float(made["zero"].top.mean()))
    assert section.tokens == 3 * (LENGTH - 1) and section.control_tokens == LENGTH - 1
    assert section.pattern_tokens == LENGTH - 1


def test_tokens_and_kinds_of_tokens_are_those_of_the_text(reading, plain):
    section, text = reading.ablations, ids(72, 3).tolist()
    for row in section.moved_tokens:
        assert row.token == plain.token(text[row.place])
        assert row.place % LENGTH > 0  # the first token of a window is not predicted
    rises = [row.nats_zeroed - row.nats for row in section.moved_tokens]
    assert rises == sorted(rises, reverse=True)
    groups = {row.group: row for row in section.groups}
    assert groups["new in the window"].tokens + groups["there before in the window"].tokens == section.tokens
    total = sum(row.tokens * row.change for name, row in groups.items() if "window" in name)
    zero = next(r for r in section.runs if (r.where, r.what, r.tokens) == ("attention", "zero", section.tokens))
    assert total / section.tokens == pytest.approx(zero.change)


def test_the_same_seed_gives_the_same_result(reading):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "encode", lambda self, prompt, chat=False: ids(72, 3).tolist())
        again = taken_out(mainstem.open(handmade.ALL["plain"]()), 4, 9)
    assert again.ablations == reading.ablations


def test_it_is_shown_in_every_format(reading):
    document = json.loads(as_json(reading))
    assert document["command"] == "basis ablate" and document["ablations"]["chosen_by"] == "given"
    text, page = as_text(reading, 200), as_html(reading)
    for words in ("Perplexity without them", "The attention softmax without them", "Heads that depend on them"):
        assert words in text and words in page
    words = " ".join(text.split())
    assert "largest weight of the attention softmax" in words and "mass of the output softmax" in words
    assert {row["section"] for row in reading.cells()} == {"ablations"}


def test_tokens_that_look_like_markup_are_shown_as_what_they_are(reading):
    from dataclasses import replace

    rows = [replace(reading.ablations.moved_tokens[0], token=token, before=token) for token in NASTY]
    shown = replace(reading, ablations=replace(reading.ablations, moved_tokens=rows, top=len(rows)))
    assert "<script>" not in as_html(shown).split("<script")[0].replace("<!doctype", "")
    assert "\x1b[31m" not in as_text(shown, 200)


# --- hostile requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dimensions, words",
    [([WIDTH], "no dimension 64"), ([-1], "no dimension -1"), ([3, 3], "named twice"), ([1.5], "1.5"),
     (list(range(40)), "40 dimensions"), ([], "0 dimensions")],
)  # fmt: skip
def test_dimensions_that_cannot_be_are_refused(plain, dimensions, words):
    with pytest.raises(UsageError, match=words):
        plain.basis.ablations(dimensions)


@pytest.mark.parametrize("options", [{"draws": 0}, {"top": 0}, {"control_tokens": 1}, {"count": 0}, {"count": 33}])
def test_numbers_that_cannot_be_are_refused(plain, options):
    with pytest.raises(UsageError):
        plain.basis.ablations(**options)


def test_a_way_to_choose_that_is_none_is_refused(plain):
    with pytest.raises(ChoiceError, match="outliers"):
        plain.basis.ablations(by="outlier")


def test_a_text_shorter_than_a_window_is_refused(plain, monkeypatch):
    monkeypatch.setattr(Model, "encode", lambda self, prompt, chat=False: ids(5).tolist())
    with pytest.raises(TextError, match="5 tokens, a window"):
        plain.basis.ablations([1])


def test_a_model_without_attention_is_refused():
    from zoo import build

    model = mainstem.open(build("mamba"))
    with pytest.raises(RefusedError, match="where attention reads.*with attention"):
        read_inputs(model.anatomy, "attention")


@torch.no_grad()
def test_the_model_is_as_it_was_after_a_run_that_fails(plain, encoded, monkeypatch):
    before = logits(plain)

    def failing(*args, **kwargs):
        raise RuntimeError("planted")

    monkeypatch.setattr("mainstem.causal.top_attention.pattern_measures", failing)
    with pytest.raises(RuntimeError, match="planted"):
        taken_out(plain, 3)
    assert torch.equal(logits(plain), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.module.modules())
    assert not any("forward" in vars(m) for m in plain.module.modules())


# --- the default model ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_default_models_outlier_dimension(demo_model):
    """Attention's patterns fall apart without it, and random dimensions leave them whole."""
    options = {"tokens": 128, "window": 128, "control_tokens": 64, "draws": 2}
    section = demo_model.basis.ablations([247], **options).ablations
    patterns = {row.what: row for row in section.patterns}
    assert patterns["zero"].top < 0.75 * patterns["none"].top
    assert patterns["random"].top == pytest.approx(patterns["none"].top, abs=0.02)
    against = {(v.where, v.control): v for v in section.verdicts}
    assert against["attention", "random"].beats and against["attention", "nearest"].beats
    rows = {r.what: r for r in section.runs if r.where == "attention" and r.tokens == section.tokens}
    assert rows["mean_by_place"].change < rows["zero"].change / 4
