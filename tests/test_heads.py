"""Heads by behaviour: laws of the probes, planted heads that must be found alone, models without any, bad requests."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from zoo import build

import mainstem
from mainstem.analysis.attending import REACH, copied_share, looks_first, probes
from mainstem.analysis.false_discovery import p_values, q_values
from mainstem.cli import run
from mainstem.errors import LevelRefusedError, PairError, PromptError, UnitError, UsageError
from mainstem.lab.repeated import PERIOD, RandomTokens
from mainstem.report import as_html, as_json, as_text
from mainstem.weights.head_ablation import take_out
from mainstem.weights.head_reading import read_heads

VOCABULARY, CONTEXT, HEADS = 64, 128, 4
TOKEN, POSITION = slice(0, 64), slice(64, 192)
PREVIOUS, COPIED, JUNK = slice(192, 256), slice(256, 320), slice(320, 336)
WIDTH, D_HEAD = 336, 128


class Attention(nn.Module):
    """Four heads that attend everywhere alike and write noise, until some are planted."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, HEADS * D_HEAD, bias=False) for _ in range(3))
        self.output = nn.Linear(HEADS * D_HEAD, WIDTH, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in (self.query.weight, self.key.weight, self.output.weight):
                weight.zero_()
            self.value.weight.normal_(generator=generator)
            self.output.weight[JUNK] = 0.01 * torch.randn(16, HEADS * D_HEAD, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, D_HEAD)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def plant(self, head: int, query: slice, key: slice, moved: slice, shift: int = 0) -> None:
        """A head that matches one-hot codes in two parts of the stream, and moves the token it finds."""
        rows = slice(head * D_HEAD, (head + 1) * D_HEAD)
        size = query.stop - query.start
        code = torch.eye(size) * math.sqrt(30 * math.sqrt(D_HEAD))
        for weight in (self.query.weight, self.key.weight, self.value.weight):
            weight[rows] = 0
        self.output.weight[:, rows] = 0
        self.query.weight[rows, query][:size] = code.roll(-shift, 0)
        self.key.weight[rows, key][:size] = code
        self.value.weight[rows, TOKEN][:VOCABULARY] = torch.eye(VOCABULARY)
        self.output.weight[moved, rows][:, :VOCABULARY] = torch.eye(VOCABULARY)


class TwoLayers(nn.Module):
    """Attention alone, twice; `planted`: L0H1 is a previous-token head, L1H2 an induction head that reads it."""

    def __init__(self, planted: bool, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.first, self.second = Attention(), Attention()
        self.unembedding = nn.Linear(WIDTH, vocabulary, bias=False)
        with torch.no_grad():
            for weight in (self.tokens.weight, self.places.weight, self.unembedding.weight):
                weight.zero_()
            self.tokens.weight[:, TOKEN] = torch.eye(VOCABULARY)[:vocabulary]
            self.places.weight[:, POSITION] = torch.eye(CONTEXT)
            self.unembedding.weight[:, COPIED] = 12 * torch.eye(VOCABULARY)[:vocabulary]
            if planted:
                self.first.plant(1, POSITION, POSITION, PREVIOUS, shift=1)
                self.second.plant(2, TOKEN, PREVIOUS, COPIED)
        self.eval()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        x = x + self.first(x)
        return self.unembedding(x + self.second(x))


@pytest.fixture(scope="module")
def planted():
    return mainstem.open(TwoLayers(planted=True))


@pytest.fixture(scope="module")
def reading(planted):
    return read_heads(planted, examples=4, verify=True, draws=2)


# --- laws -------------------------------------------------------------------------------------------------


@given(st.integers(0, 99))
def test_measures_of_copies_share_out_a_pattern(seed):
    """With a period of 25 the offsets are all places before a destination but the first and its own block's."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.randperm(1000, generator=generator)[:PERIOD]
    ids = torch.cat([torch.tensor([5000]), block, block, block])
    pattern = torch.rand(len(ids), len(ids), generator=generator).tril()
    pattern = pattern / pattern.sum(1, keepdim=True)
    measures, sink = probes(ids)["copies"](pattern)
    rows = pattern[1 + PERIOD :]
    everything = float(measures.sum()) + sink
    assert everything < 1 + 1e-5
    reached = torch.zeros_like(rows, dtype=torch.bool)
    for row in range(len(rows)):
        place = row + 1 + PERIOD
        for copy in range(place - PERIOD, 0, -PERIOD):
            reached[row, max(1, copy - REACH) : min(place, copy + REACH + 1)] = True
    assert everything == pytest.approx(float((rows * reached).sum(1).mean() + rows[:, 0].mean()), abs=1e-5)


def test_a_pattern_on_one_offset_has_one_measure():
    ids = torch.tensor([9, *range(30), *range(30)])
    for offset in (-1, 0, 1, 5):
        pattern = torch.zeros(61, 61)
        for place in range(31, 61):
            pattern[place, max(place - 30 + offset, 0)] = 1
        measures, _ = probes(ids)["copies"](pattern)
        wanted = torch.zeros(2 * REACH + 1)
        wanted[offset + REACH] = 29 / 30 if offset < 0 else 1.0  # before the first copied token is the first position
        assert torch.allclose(measures, wanted, atol=1e-6)


def test_looking_first():
    pattern = torch.eye(5)
    assert looks_first(pattern) == 0
    pattern[3:] = torch.tensor([1.0, 0, 0, 0, 0])
    assert looks_first(pattern) == 0.5


def test_copying_goes_from_minus_one_to_one_and_forgets_the_scale():
    attended = torch.arange(6)
    logits = torch.eye(6)
    mean = torch.zeros(6)
    assert float(copied_share(logits, mean, attended)[0]) == 1
    assert float(copied_share(-logits, mean, attended)[0]) == -1
    noisy = torch.rand(6, 6, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(copied_share(noisy, mean + 0.2, attended), copied_share(7 * noisy, 7 * mean + 1.4, attended))
    assert float((copied_share(noisy, mean, attended) + 1).sum() / 2) == pytest.approx(1)  # shares of all tokens


def test_false_discoveries_are_as_many_as_promised():
    generator = torch.Generator().manual_seed(0)
    null, scores = torch.randn(4000, generator=generator), torch.randn(500, generator=generator)
    assert int((q_values(p_values(scores, null)) <= 0.05).sum()) <= 2
    scores[:20] = 9.0
    found = q_values(p_values(scores, null)) <= 0.05
    assert bool(found[:20].all()) and int(found[20:].sum()) <= 5


# --- planted heads ----------------------------------------------------------------------------------------


def test_the_planted_heads_are_found_and_nothing_else(reading):
    assert reading.get("prefix").found() == ["L1H2"]
    assert reading.get("previous").found() == ["L0H1"]
    for name in ("legacy", "duplicate", "first"):
        assert reading.get(name).found() == []
    assert reading.get("prefix").heads[0].score > 0.99
    assert reading.get("previous").heads[0].score > 0.99


def test_the_planted_induction_head_copies(reading):
    best = reading.get("copying-alone").heads[0]
    assert (best.head, best.found) == ("L1H2", True) and best.score == pytest.approx(1)


def test_repeats_are_known_and_only_through_the_planted_heads(reading):
    assert reading.loss["repeated"] < 0.05 < 1 < reading.loss["first"]
    for name, head in (("prefix", "L1H2"), ("previous", "L0H1")):
        rows = [row for row in reading.ablations if row.behaviour == name]
        assert [row.method for row in rows] == ["mean", "zero", "resample"]
        for row in rows:
            assert row.heads == [head] and row.repeated > 1
            assert max(map(abs, row.control.repeated)) < 1e-3 * row.repeated


def test_controls_are_of_the_same_layers_and_not_found(planted):
    row = take_out(planted, "prefix", ["L1H2"], ["L0H0", "L1H0", "L1H2"], RandomTokens.of(planted.encoder), 3)[0]
    assert row.control.heads == [["L1H0"]] * 3


def test_the_model_is_left_as_it_was(planted):
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        before = planted.module(ids)
        read_heads(planted, examples=2)
        assert torch.equal(before, planted.module(ids))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in planted.module.modules())


def test_uniform_attention_is_at_the_null():
    found = read_heads(mainstem.open(TwoLayers(planted=False)), examples=2, verify=True)
    for one in found.behaviours:
        assert one.found() == []
    for row in found.get("prefix").heads:
        assert row.excess == pytest.approx(0, abs=1e-6) and 0.01 < row.score < 0.1
    assert found.ablations == [] and sum("none was taken out" in note for note in found.notes) == 2


def test_an_induction_head_without_its_previous_token_head_is_none():
    module = TwoLayers(planted=True)
    with torch.no_grad():
        module.first.output.weight[PREVIOUS] = 0
    found = read_heads(mainstem.open(module), examples=2)
    assert found.get("prefix").found() == [] and found.get("previous").found() == ["L0H1"]


# --- other structures and bad requests --------------------------------------------------------------------


def test_one_seed_one_result(planted):
    first, second = (read_heads(planted, examples=2) for _ in range(2))
    assert first.behaviours == second.behaviours


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_fused_and_written_out_attention_have_the_same_scores(family):
    models = [mainstem.open(build(family, attn_implementation=kind)) for kind in ("sdpa", "eager")]
    cores = [next(write.attention for write in one.anatomy.writes if write.attention) for one in models]
    assert [core.fused for core in cores] == [True, False]
    first, second = (read_heads(one, examples=2) for one in models)
    for one, other in zip(first.behaviours, second.behaviours, strict=True):
        assert {row.head: row.score for row in one.heads} == pytest.approx(
            {row.head: row.score for row in other.heads}, abs=1e-5
        )


def test_models_without_heads_are_refused():
    for family, reason in (("mamba", "no attention"), ("bert", "not causal")):
        with pytest.raises(LevelRefusedError, match=reason):
            read_heads(mainstem.open(build(family)))


def test_a_context_too_short(planted, monkeypatch):
    monkeypatch.setattr("mainstem.weights.head_reading.context_length", lambda module: 100)
    with pytest.raises(PromptError, match="101 tokens, and the model's context is 100"):
        read_heads(planted)


def test_heads_that_do_not_exist(planted):
    with pytest.raises(UnitError, match="no head L7H0.*from L0H0 to L1H3"):
        read_heads(planted, ["L7H0"])
    with pytest.raises(UnitError, match="no head"):
        read_heads(planted, ["L0.attn"])


def test_a_vocabulary_too_small():
    with pytest.raises(PairError, match="25 different random tokens .* vocabulary of 24"):
        read_heads(mainstem.open(TwoLayers(planted=False, vocabulary=24)))


def test_too_few_examples(planted):
    with pytest.raises(UsageError):
        read_heads(planted, examples=1)


def test_listing_some_heads_keeps_their_ranks(planted, reading):
    some = read_heads(planted, ["L1H2", "L0H3"], examples=4)
    assert some.heads == ["L1H2", "L0H3"] and some.get("prefix").heads == reading.get("prefix").heads
    text = as_text(some)
    assert "L0H3" in text and "L0H2" not in text


# --- the default model ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_induction_heads_of_the_default_model(demo_model):
    found = demo_model.heads(examples=3)
    prefix = found.get("prefix")
    assert len(prefix.found()) >= 8 and prefix.heads[0].score > 0.8 and prefix.null["q95"] < 0.05
    assert found.get("legacy").found() == [] and "L16H0" in found.get("previous", "text").found()
    assert found.loss["repeated"] < 0.25 * found.loss["first"]
    assert found.in_context is not None and found.in_context.high < 0
    assert [warning["code"] for warning in found.warnings] == ["sink"]


# --- documents --------------------------------------------------------------------------------------------


def test_documents(reading):
    text, page, document = as_text(reading), as_html(reading), json.loads(as_json(reading))
    assert document["schema"] == "mainstem/heads/1" and document["tokens"]["period"] == PERIOD
    assert "Prefix matching on random repeated tokens" in text and "Heads taken out" in text
    assert page.count("<svg") == len(reading.behaviours) and "L1H2" in page
    cells = reading.cells()
    assert len(cells) == len(reading.behaviours) * 8 and set(cells[0]) >= {"behaviour", "data", "head", "score", "q"}
    assert "heads" not in reading.about()["behaviours"][0]


def test_parquet(reading):
    pq = pytest.importorskip("pyarrow.parquet")
    import io

    from mainstem.report.parquet import as_parquet

    table = pq.read_table(io.BytesIO(as_parquet(reading)))
    assert table.num_rows == len(reading.cells())
    assert json.loads(table.schema.metadata[b"mainstem"])["schema"] == "mainstem/heads/1"
    assert table.column("head").to_pylist()[0] == reading.behaviours[0].heads[0].head


def test_the_command_refuses_an_address_before_it_opens_a_model(capsys):
    assert run(["heads", "--head", "17.4", "--model", "/nowhere"]) == 2
    assert "not the address of a unit" in capsys.readouterr().err
