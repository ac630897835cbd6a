"""Circuits of a head between tokens: exact searches, planted ground truth, path expansion, refusals."""

import json

import handmade
import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.analysis import token_vectors
from mainstem.analysis.head_circuits import HeadCircuits, forced
from mainstem.analysis.turned_tables import RATE, level
from mainstem.analysis.vocabulary_table import VocabularyTable
from mainstem.errors import CertificateError, ChoiceError, LevelRefusedError, UnitError, UsageError
from mainstem.lab.planted_circuits import FORCED, SKIP_TRIGRAMS, PlantedCircuits
from mainstem.model.discovery import probe_ids
from mainstem.report import as_html, as_json, as_text
from mainstem.session import open as open_model
from mainstem.weights import circuit_reading
from mainstem.weights.circuit_reading import circuits_of, read_circuits
from mainstem.weights.expanding import path_expansion

TOKENS = [2, 4, 5, 2, 7, 3, 8, 8]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def planted():
    return open_model(PlantedCircuits())


@pytest.fixture(scope="module")
def many_tokens():
    return open_model(PlantedCircuits(d_vocab=320))


class AttentionOnly(handmade.Block):
    """Grouped-query attention with an output bias behind an RMS norm, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        del self.mlp, self.norm2

    def forward(self, x, mask):
        return x + self.attention(self.norm1(x), mask)


@pytest.fixture(scope="module")
def expansion():
    model = open_model(handmade.Model(AttentionOnly, 2).eval())
    return path_expansion(model.trace(list(range(5, 15))))


# --- tables -------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 700), st.integers(1, 40), st.integers(1, 5), st.integers(1, 60), st.integers(0, 99))
def test_the_largest_entries_are_those_of_the_whole_table(rows, columns, rank, count, seed):
    sizes = normal(rows, 1, seed=seed + 2).exp() ** 2  # norms that differ, so that some of it is excluded
    table = VocabularyTable(normal(rows, rank, seed=seed) * sizes, normal(columns, rank, seed=seed + 1))
    whole, found = table.rows @ table.columns.T, table.top(count)
    expected = whole.flatten().topk(min(count, whole.numel())).values
    assert torch.allclose(found.values, whole[found.rows, found.columns])
    assert len(set(zip(found.rows.tolist(), found.columns.tolist(), strict=True))) == len(expected)
    assert bool(((found.values - expected).abs() <= found.slack + 1e-12).all())
    assert table.size == pytest.approx(float(whole.pow(2).mean().sqrt()))


def test_norms_exclude_most_of_a_table_whose_rows_differ():
    sizes = torch.linspace(1, 100, 3000, dtype=torch.float64)[:, None] ** 2
    found = VocabularyTable(normal(3000, 4) * sizes, normal(500, 4, seed=1)).top(5)
    assert found.computed < 0.5


def test_a_rotation_keeps_norms_and_moves_entries():
    table = VocabularyTable(normal(50, 6), normal(40, 6, seed=1))
    turned = table.rotated(torch.Generator().manual_seed(0))
    assert torch.allclose(turned.rows.norm(dim=-1), table.rows.norm(dim=-1))
    assert not torch.allclose(turned.rows @ turned.columns.T, table.rows @ table.columns.T)


def shares_above(tables: list[VocabularyTable], rate: float) -> float:
    """How many tables have an entry above their level."""
    return sum(float((t.rows @ t.columns.T).max()) > level(t, rate) for t in tables) / len(tables)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "rank", "spread"), [(24, 24, 0.0), (40, 4, 1.0)])
def test_tables_that_mean_nothing_pass_their_level_at_the_rate(size, rank, spread):
    sizes = (spread * normal(size, 1)).exp()
    tables = [VocabularyTable(normal(size, rank, seed=2 * i) * sizes, normal(size, rank, seed=2 * i + 1))
              for i in range(200)]  # fmt: skip
    assert RATE / 4 < shares_above(tables, RATE) < RATE + 3 * (RATE * (1 - RATE) / 200) ** 0.5
    assert 0.1 < shares_above(tables, 0.3) < 0.3 + 3 * (0.3 * 0.7 / 200) ** 0.5


def test_a_turned_table_passes_its_level_at_the_rate():
    table, generator = VocabularyTable(normal(80, 6), normal(80, 6, seed=1)), torch.Generator().manual_seed(0)
    drawn = [table.rotated(generator) for _ in range(200)]
    assert {round(level(one), 6) for one in drawn[:3]} == {round(level(table), 6)}
    above = sum(float((one.rows @ one.columns.T).max()) > level(table) for one in drawn)
    assert RATE / 4 < above / 200 < RATE + 3 * (RATE * (1 - RATE) / 200) ** 0.5


def test_a_table_of_one_direction_has_nothing_above_its_level():
    assert (
        shares_above([VocabularyTable(normal(9, 1, seed=i), normal(9, 1, seed=i + 50)) for i in range(20)], 0.05) == 0
    )


def random_circuits(seed: int) -> HeadCircuits:
    tables = [VocabularyTable(normal(400, 3, seed=seed + i), normal(400, 3, seed=seed + i + 9)) for i in (0, 1)]
    return HeadCircuits(*tables, torch.linalg.eigvals(tables[1].columns.mT @ tables[1].rows))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 99))
def test_the_strongest_skip_trigrams_are_those_of_all_sources(seed):
    circuits = random_circuits(seed)
    qk, ov = ((table.rows @ table.columns.T) / table.size for table in (circuits.qk, circuits.ov))
    scores = qk.amax(0).clamp_min(0) * ov.amax(0).clamp_min(0)
    found = circuits.skip_trigrams(5)
    assert [one.score for one in found] == pytest.approx(scores.topk(5).values.tolist(), rel=1e-5)
    assert [one.source for one in found] == scores.topk(5).indices.tolist()


def test_the_strongest_skip_trigrams_are_found_where_norms_differ_much():
    sizes = [(2 * normal(3000, 1, seed=i)).exp() for i in range(4)]
    qk, ov = (VocabularyTable(normal(3000, 3, seed=i) * sizes[i], normal(3000, 3, seed=i + 1) * sizes[i + 1])
              for i in (0, 2))  # fmt: skip
    scores = ((qk.rows @ qk.columns.T).amax(0) / qk.size) * ((ov.rows @ ov.columns.T).amax(0) / ov.size)
    found = HeadCircuits(qk, ov, torch.zeros(3).cdouble()).skip_trigrams(7)
    assert [one.source for one in found] == scores.topk(7).indices.tolist()


@given(st.integers(0, 99))
def test_two_skip_trigrams_force_two_more_as_strong(seed):
    circuits, first, second = random_circuits(seed), (3, 10, 20), (3, 11, 21)
    size = abs(circuits.score(*first) * circuits.score(*second))
    others = forced(first, second)
    assert others == ((3, 10, 21), (3, 11, 20))
    assert abs(circuits.score(*others[0]) * circuits.score(*others[1])) == pytest.approx(size)
    assert forced(first, (4, 11, 21)) == forced(first, (3, 11, 20)) == ()


# --- planted circuits ---------------------------------------------------------------------------------------


def found_trigrams(model, head: str) -> set[tuple[int, int, int]]:
    """Skip trigrams of a head whose two entries are above the levels of their tables."""
    r = read_circuits(model, head)
    return {
        (row.id, destination.id, out.id)
        for row in r.trigrams
        for destination in row.destinations
        for out in row.outs
        if destination.ratio > r.qk.level and out.ratio > r.ov.level
    }


def found_copying(model) -> set[str]:
    return {str(head) for head in model.weights.heads if circuits_of(model, head).copying > 0.5}


def check_planted(model) -> None:
    assert found_trigrams(model, "L0H0") == {*SKIP_TRIGRAMS, *FORCED}
    assert found_copying(model) == {"L0H1"}
    for head in ("L0H2", "L1H0", "L1H1", "L1H2"):
        assert found_trigrams(model, head) == set()


@pytest.mark.parametrize("seed", range(4))
def test_planted_skip_trigrams_and_the_copying_head_are_found_and_nothing_else(seed):
    check_planted(open_model(PlantedCircuits(seed)))


def test_a_wrong_head_label_fails(planted, monkeypatch):
    ov, qk = planted.weights.ov, planted.weights.qk
    wrong = {"L0H0": "L0H2", "L0H1": "L0H0", "L0H2": "L0H1"}
    kind = type(planted.weights)
    monkeypatch.setattr(kind, "ov", lambda self, head: ov(wrong.get(str(head), head)))
    monkeypatch.setattr(kind, "qk", lambda self, head, offset=0: qk(wrong.get(str(head), head), offset))
    with pytest.raises(AssertionError):
        check_planted(planted)


def test_a_transposed_ov_fails(planted, monkeypatch):
    kind, ov = type(planted.weights), planted.weights.ov
    monkeypatch.setattr(kind, "ov", lambda self, head: ov(head).T)
    with pytest.raises((AssertionError, UsageError)):
        check_planted(planted)
    with pytest.raises(CertificateError, match="sum to the logits"):
        path_expansion(planted.trace(TOKENS))


def test_a_head_that_copies_does_so_by_eigenvalue_and_by_rank(planted):
    copying = read_circuits(planted, "L0H1").copying
    assert (copying.eigenvalues, copying.median_rank, copying.among_top) == (pytest.approx(1), 1, 1)
    assert abs(read_circuits(planted, "L0H2").copying.eigenvalues) < 0.2


def test_a_skip_trigram_can_be_asked_for(planted):
    asked = read_circuits(planted, "L0H0", ("id:2", "id:5", "id:9")).asked
    assert asked is not None and (asked.source_rank, asked.out_rank) == (1, 1)
    other = read_circuits(planted, "L0H0", ("id:4", "id:5", "id:9")).asked
    assert other is not None and other.qk < 0


# --- all heads by a skip trigram ----------------------------------------------------------------------------


@pytest.mark.parametrize("trigram", [(3, 8, 14), (2, 5, 9), (1, 2, 3)])
def test_all_heads_have_the_scores_of_their_tables(planted, trigram):
    reading = planted.skip_trigram(*(f"id:{token}" for token in trigram))
    assert {row.head for row in reading.heads} == {str(head) for head in planted.weights.heads}
    source, destination, out = trigram
    for row in reading.heads:
        circuits = circuits_of(planted, row.head)
        assert row.score == pytest.approx(circuits.score(*trigram), rel=1e-4, abs=1e-5)
        if abs(row.score) > 1e-3:
            scores = [
                [circuits.score(token, destination, out) for token in range(24)],
                [circuits.score(source, token, out) for token in range(24)],
                [circuits.score(source, destination, token) for token in range(24)],
            ]
            own = circuits.score(*trigram)
            reached = [sum(score >= own - 1e-5 for score in column) / 24 for column in scores]
            assert row.p == pytest.approx(max(reached))


def test_a_planted_skip_trigram_is_first_and_24_tokens_are_too_few_to_find_it(planted):
    reading = planted.skip_trigram("id:3", "id:8", "id:14")
    first = reading.heads[0]
    assert (first.head, first.source_rank, first.out_rank) == ("L0H0", 1, 1)
    assert first.p == pytest.approx(1 / 24) and first.q > reading.rate and reading.found == []


@pytest.mark.parametrize("trigram", SKIP_TRIGRAMS)
def test_a_planted_skip_trigram_is_found_among_more_tokens_and_in_no_other_head(many_tokens, trigram):
    reading = many_tokens.skip_trigram(*(f"id:{token}" for token in trigram))
    assert reading.found == ["L0H0"]
    first = reading.heads[0]
    assert first.p <= 2 / 320 and first.q <= reading.rate < reading.heads[1].q


@pytest.mark.parametrize("trigram", [(2, 5, 14), (3, 9, 14), (20, 30, 40)])
def test_what_was_not_planted_is_found_in_no_head(many_tokens, trigram):
    assert many_tokens.skip_trigram(*(f"id:{token}" for token in trigram)).found == []


def test_both_ends_of_the_stream_are_read_in_chunks(monkeypatch):
    """With norms and multipliers, against the tables whole; a chunk is smaller than the vocabulary."""
    monkeypatch.setattr(token_vectors, "VOCABULARY_CHUNK", 64)
    for family in ("gpt2", "granite"):
        model = open_model(zoo.build(family))
        embedded = circuit_reading.token_embedding(model)
        reads = token_vectors.Read(model.anatomy.readout, model.anatomy.sizes.d_model)
        axes = torch.eye(model.anatomy.sizes.d_model, dtype=torch.float64)
        for side in (embedded, reads):
            whole = side @ axes
            assert len(side) == len(whole) > 128
            assert torch.allclose(
                side.gram, whole.T @ whole / len(whole), rtol=1e-4, atol=1e-6 * float(side.gram.max())
            )
            assert torch.allclose(side.vector(7), whole[7])
        assert torch.allclose(embedded.mean, (embedded @ axes).mean(0))
        norm = next(read.norm for read in model.anatomy.reads if "value" in read.roles)
        rows = embedded @ axes
        assert torch.allclose(embedded.scaled(norm.scale) @ axes, rows * norm.scale(rows))


def test_a_head_that_copies_from_everywhere_has_its_destination_weakest(planted):
    rows = {row.head: row for row in planted.skip_trigram("id:6", "id:6", "id:6").heads}
    assert rows["L0H1"].out_rank == 1 and rows["L0H1"].p < 0.2
    rows = {row.head: row for row in planted.skip_trigram("id:6", "id:7", "id:6").heads}
    assert rows["L0H1"].weakest != "out" and rows["L0H1"].p > 0.9


def test_a_reading_of_all_heads_is_reported(planted):
    reading = planted.skip_trigram("id:3", "id:8", "id:14", top=2)
    document = json.loads(as_json(reading))
    assert document["schema"] == "mainstem/trigram/1" and len(document["heads"]) == 6
    for text in (as_text(reading), as_html(reading)):
        assert "L0H0" in text and "0 of 6 heads" in text
    assert len(list(reading.cells())) == 6
    with pytest.raises(UsageError):
        planted.skip_trigram("id:3", "id:8", "id:14", top=0)


# --- path expansion -----------------------------------------------------------------------------------------


def test_paths_sum_to_the_logits(expansion):
    paths = expansion.paths()
    assert len(paths) == 25
    assert expansion.error(list(paths.values())) < 1e-4
    assert expansion.error(expansion.orders()) < 1e-4
    second = sum(part for path, part in paths.items() if len(path) == 2)
    assert torch.allclose(second, expansion.orders()[2], atol=1e-9)


def test_biases_of_values_begin_paths_at_their_heads():
    module = handmade.Model(AttentionOnly, 2).eval()
    for number, attention in enumerate(part for part in module.modules() if isinstance(part, handmade.Attention)):
        attention.value.bias = torch.nn.Parameter(normal(attention.value.out_features, seed=number).float())
    expansion = path_expansion(open_model(module).trace(list(range(5, 15))))
    paths = expansion.paths()
    assert expansion.error(list(paths.values())) < 1e-4
    assert sum(paths[(head,)] for layer in expansion.layers for head in layer.heads) == pytest.approx(
        expansion.orders()[1], abs=1e-9
    )
    assert max(float(layer.bias.norm()) for layer in expansion.layers) > 0.1


def test_a_path_that_is_left_out_is_missed(expansion):
    paths = expansion.paths()
    strongest = max((path for path in paths if path), key=lambda path: float(paths[path].abs().max()))
    assert expansion.error([part for path, part in paths.items() if path != strongest]) > 1e-3


def test_a_virtual_head_is_the_path_through_both(expansion):
    first, second = expansion.layers[0].heads[1], expansion.layers[1].heads[2]
    virtual = expansion.virtual(second, first)
    written = virtual.pattern @ expansion.embedding @ virtual.ov.dense().T
    assert torch.allclose(expansion._read(written), expansion.paths()[(first, second)], atol=1e-8)
    assert virtual.pattern.triu(1).abs().max() == 0
    with pytest.raises(LevelRefusedError, match="No virtual head"):
        expansion.virtual(first, second)


def test_losses_by_order_end_at_the_models_own(expansion):
    ids = torch.tensor(range(5, 15))
    losses = expansion.losses(ids)
    own = torch.nn.functional.cross_entropy(expansion.logits[:-1], ids[1:])
    assert len(losses) == 3 and losses[-1] == pytest.approx(float(own), abs=1e-4)


# --- warnings -----------------------------------------------------------------------------------------------


def codes(model, head: str) -> set[str]:
    return {warning["code"] for warning in read_circuits(model, head).warnings}


def test_tied_embeddings_are_warned_of(planted):
    assert "tied" not in codes(planted, "L0H2")
    module = PlantedCircuits()
    module.unembedding.weight = module.tokens.weight
    model = open_model(module)
    assert "tied" in codes(model, "L0H2")
    assert [w["code"] for w in model.skip_trigram("id:1", "id:2", "id:3").warnings] == ["tied"]


def test_a_head_that_looks_at_the_first_position_is_warned_of(planted, monkeypatch):
    assert "sink" not in codes(planted, "L0H2")
    monkeypatch.setattr(circuit_reading, "_first_share", lambda model, head: 0.9)
    assert "sink" in codes(planted, "L0H2")


def test_what_a_head_gives_to_the_first_position_is_read_from_its_pattern(planted):
    """Of the copying head, whose scores are 1 for the token itself and 0 for others, by hand."""
    ids = probe_ids(planted.module)[0]
    weights = (ids[:, None] == ids[None]).double().exp().tril()
    pattern = weights / weights.sum(1, keepdim=True)
    expected = float(pattern[len(ids) // 2 :, 0].mean())
    assert circuit_reading._first_share(planted, planted.weights.heads[1]) == pytest.approx(expected, rel=1e-5)


# --- refusals and reports -----------------------------------------------------------------------------------


def test_wrong_requests_are_refused(planted):
    with pytest.raises(UnitError, match="no head L0H9"):
        read_circuits(planted, "L0H9")
    with pytest.raises(UnitError, match="no head L7H0"):
        read_circuits(planted, "L7H0")
    with pytest.raises(UnitError, match="is no head"):
        read_circuits(planted, "L0.attn")
    with pytest.raises(ChoiceError):
        read_circuits(planted, "L0H0", embedding="norm")
    with pytest.raises(UsageError, match="all three"):
        read_circuits(planted, "L0H0", ("id:2",))


def test_models_with_mlps_have_no_path_expansion():
    model = open_model(handmade.Model().eval())
    with pytest.raises(LevelRefusedError, match="nothing but attention"):
        path_expansion(model.trace([5, 6, 7]))


def test_zero_weights_are_refused():
    module = PlantedCircuits()
    torch.nn.init.zeros_(module.layers[1].output.weight)
    with pytest.raises((UsageError, LevelRefusedError)):
        read_circuits(open_model(module), "L1H0")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_library_models_have_circuits(family):
    model = open_model(zoo.build(family))
    reading = read_circuits(model, model.weights.heads[-1], embedding="normed", top=3)
    assert len(reading.entries) == 6 and reading.factors.holds
    assert any("direct path" in note for note in reading.notes)


def test_state_space_models_have_no_heads():
    with pytest.raises(LevelRefusedError, match="no heads"):
        read_circuits(open_model(zoo.build("mamba")), "L0H0")


def test_reports_say_the_same(planted):
    reading = read_circuits(planted, "L0H0", ("id:2", "id:5", "id:9"))
    document = json.loads(as_json(reading))
    assert document["schema"] == "mainstem/circuits/1" and document["asked"]["source_rank"] == 1
    for text in (as_text(reading), as_html(reading)):
        assert "id:9" in text and "QK circuit" in text
    assert len(list(reading.cells())) == len(document["entries"])
