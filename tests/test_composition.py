"""Laws of factored weights and of composition: norms, spectra, both nulls, the erratum, refusals."""

import gc
import weakref
from dataclasses import asdict

import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st

from mainstem.analysis.composition import (
    compositions,
    rotation_deviation,
    shared_directions,
    squared,
    squared_without,
    stack,
)
from mainstem.analysis.factored import Factored
from mainstem.analysis.weights_certificate import check_weights
from mainstem.errors import ChoiceError, LevelRefusedError, PositionError, UnitError, UsageError
from mainstem.session import open as open_model
from mainstem.units import Unit
from mainstem.weights import composition_factors

FAMILIES = ("llama", "gpt_bigcode", "gpt2", "gemma2", "qwen3", "olmo2", "gpt_neox", "falcon", "granite", "gpt_oss")
"""Grouped and multi-query attention, fused projections, LayerNorm, norms after sublayers and of queries and keys,
partial rotary embedding, parallel blocks, multipliers, sinks."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def units(count: int, layers: int) -> list[Unit]:
    return [Unit.head(i * layers // count, i % max(count // layers, 1)) for i in range(count)]


def spectra(count: int, rank: int, d_model: int, seed: int) -> torch.Tensor:
    """Random rows, each unit with singular values of its own."""
    basis = torch.linalg.qr(normal(count, d_model, rank, seed=seed)).Q.mT
    values = normal(count, rank, seed=seed + 1).abs() ** 2
    return values[..., None] * basis


# --- factored matrices --------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(0, 100))
def test_a_factored_matrix_answers_as_the_whole_one(rank, seed):
    a = Factored(normal(9, rank, seed=seed), normal(rank, 9, seed=seed + 1))
    b = Factored(normal(9, 3, seed=seed + 2), normal(3, 9, seed=seed + 3))
    assert torch.allclose((a @ b).dense(), a.dense() @ b.dense())
    assert (a @ b).rank == min(rank, 3)
    assert torch.allclose(a.norm(), a.dense().norm())
    assert torch.allclose(a.trace(), a.dense().trace())
    assert torch.allclose(a.T.dense(), a.dense().T)
    assert torch.allclose(a.singular_values(), torch.linalg.svdvals(a.dense())[:rank], atol=1e-10)
    u, s, vh = a.svd()
    assert torch.allclose(u @ torch.diag(s) @ vh, a.dense())
    assert torch.allclose(a.narrow().T @ a.narrow(), a.dense().T @ a.dense())
    whole = torch.linalg.eigvals(a.dense())
    assert torch.allclose(a.eigenvalues().sum(), whole.sum(), atol=1e-8)
    assert torch.allclose(a.eigenvalues().abs().sort().values, whole.abs().sort().values[-rank:], atol=1e-6)


def test_eigenvalues_of_no_square_are_refused():
    with pytest.raises(UsageError, match="Only square"):
        Factored(normal(4, 2), normal(2, 5)).eigenvalues()


def test_the_cyclic_rule_holds_for_traces_and_not_for_norms():
    """The erratum of "A Mathematical Framework for Transformer Circuits"."""
    q, k, o, v = (normal(8, 40, seed=seed) for seed in range(4))
    one, shifted = Factored(q.T, k) @ Factored(o.T, v), Factored(k, o.T) @ Factored(v, q.T)
    assert torch.allclose(one.trace(), shifted.trace())
    assert float(one.norm() / shifted.norm()) > 2


# --- compositions -------------------------------------------------------------------------------------------


def test_all_pairs_at_once_are_the_pairs_one_by_one():
    readers, writers = stack(units(6, 3), normal(6, 4, 30)), stack(units(5, 5), normal(5, 3, 30, seed=1))
    found = squared(readers, writers)
    for i in range(6):
        for j in range(5):
            expected = (readers.rows[i] @ writers.rows[j].T).norm() ** 2
            assert float(found[i, j]) == pytest.approx(float(expected), rel=1e-9)
    directions = torch.linalg.qr(normal(30, 3, seed=5)).Q
    left = [stack(side.units, side.rows - side.rows @ directions @ directions.T) for side in (readers, writers)]
    assert torch.allclose(squared_without(found, readers, writers, directions), squared(*left), atol=1e-10)
    for side, made in zip((readers, writers), left, strict=True):
        assert torch.allclose(side.without(directions).norms, made.norms)
        assert torch.allclose(side.without(directions).fourth, made.fourth)


def test_a_random_rotation_has_the_mean_and_deviation_of_the_formula():
    d_model, draws = 24, 4000
    reader, writer = stack(units(1, 1), spectra(1, 4, d_model, 0)), stack(units(1, 1), spectra(1, 3, d_model, 7))
    rotations = torch.linalg.qr(normal(draws, d_model, d_model, seed=3))
    turned = rotations.Q * rotations.R.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    seen = (reader.rows @ turned @ writer.rows.mT).pow(2).sum((1, 2))
    deviation = float(rotation_deviation(reader, writer))
    assert float(seen.mean()) == pytest.approx(1 / d_model, abs=4 * deviation / draws**0.5)
    assert float(seen.std()) == pytest.approx(deviation, rel=0.08)


def test_random_weights_of_matched_spectra_are_at_the_null():
    count, layers, d_model = 48, 6, 64
    readers = stack(units(count, layers), spectra(count, 8, d_model, 1))
    writers = stack(units(count, layers), spectra(count, 8, d_model, 2))
    layer = torch.tensor([unit.layer for unit in readers.units])
    order, distance = (layer[:, None] - layer[None]).sign(), (layer[:, None] - layer[None]).abs()
    table = compositions("k", readers, writers, order, distance, squared(readers, writers))
    excess = table.strength.pow(2)[table.causal] - 1 / d_model
    # pairs share units, so the standard error is that of as many means as there are readers
    by_reader = torch.stack([(row.pow(2) - 1 / d_model).mean() for row in table.strength])
    assert abs(float(by_reader.mean())) < 3 * float(by_reader.std()) / count**0.5
    assert abs(float(excess.mean())) < 3 * float(by_reader.std()) / count**0.5
    assert int((table.q[table.causal] <= 0.05).sum()) == 0
    assert int((table.q_below[table.causal] <= 0.05).sum()) == 0
    assert shared_directions([readers, writers]).shape[1] == 0


def test_a_planted_pair_is_first_above_every_acausal_one():
    count, layers, d_model = 60, 6, 64
    read, written = (normal(count, 8, d_model, seed=seed) for seed in (1, 2))
    ends = (55, 3)
    read[ends[0]] = written[ends[1]]
    readers, writers = stack(units(count, layers), read), stack(units(count, layers), written)
    layer = torch.tensor([unit.layer for unit in readers.units])
    order, distance = (layer[:, None] - layer[None]).sign(), (layer[:, None] - layer[None]).abs()
    table = compositions("k", readers, writers, order, distance, squared(readers, writers))
    assert table.top(1) == [ends]
    assert float(table.z[ends]) > 2 * float(table.z[table.top(2)[1]])
    assert float(table.z[ends]) > float(table.z[table.acausal].max())
    same = (table.distance >= 4) & table.acausal  # its band: four or five layers apart
    assert float(table.p[ends]) == pytest.approx(1 / (1 + int(same.sum())))
    assert int((table.q[table.causal] <= 0.05).sum()) == 0  # one pair cannot beat as many as there are


def test_a_direction_that_all_share_is_taken_out():
    read, written = (normal(30, 4, 64, seed=seed) for seed in (1, 2))
    common = normal(64, seed=3)
    common = common / common.norm()
    read, written = (rows + 20 * normal(30, 4, seed=5)[..., None] * common for rows in (read, written))
    readers, writers = stack(units(30, 3), read), stack(units(30, 3), written)
    directions = shared_directions([readers, writers])
    assert directions.shape[1] == 1
    assert abs(float(directions[:, 0] @ common)) > 0.99
    assert float(squared(readers, writers).mean()) > 10 / 64
    assert float(squared_without(squared(readers, writers), readers, writers, directions).mean()) < 1.3 / 64


def test_a_norm_of_zero_is_marked_and_never_not_a_number():
    rows = normal(4, 3, 16)
    rows[2] = 0
    readers, writers = stack(units(4, 4), rows), stack(units(4, 4), normal(4, 3, 16, seed=1))
    layer = torch.arange(4)
    order, distance = (layer[:, None] - layer[None]).sign(), (layer[:, None] - layer[None]).abs()
    table = compositions("v", readers, writers, order, distance, squared(readers, writers))
    for column in (table.strength, table.z, table.p, table.q):
        assert bool(torch.isfinite(column).all())
    assert not bool(table.defined[2].any())
    with pytest.raises(UsageError, match="not defined"):
        table.place(readers.units[2], writers.units[0])


# --- the weights of models ----------------------------------------------------------------------------------


def opened(family: str, **options):
    return open_model(zoo.build(family, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_factored_weights_give_what_the_model_computes(family):
    model = opened(family)
    assert len(model.weights.heads) == 12
    assert model.weights_check.holds
    assert model.weights_check.worst < 1e-6


def test_a_head_with_anothers_keys_and_a_forgotten_gain_fail(monkeypatch):
    model = opened("llama")
    weights = model.weights
    trace = model.trace(zoo.prompt(5)[0].tolist(), positions=range(5))
    moments = [trace.run.moment(position) for position in range(5)]
    unit = weights.heads[0].sublayer
    index = next(i for i in model.anatomy.writes_of(unit) if model.anatomy.writes[i].attention is not None)
    operands = trace.run.operands(index)
    assert check_weights(weights, unit, operands, moments).holds
    for name, change in {
        "key": lambda rows: rows.roll(1, 0),
        "value": lambda rows: rows * (1 + 0.01 * torch.arange(rows.shape[-1])),
        "outputs": lambda rows: rows.roll(1, 0),
        "query": lambda rows: rows * 1.001,
    }.items():
        plain = getattr(type(weights), name)
        with monkeypatch.context() as patch:
            patch.setattr(type(weights), name, lambda self, *a, plain=plain, change=change: change(plain(self, *a)))
            found = check_weights(weights, unit, operands, moments)
        assert not found.holds
        assert found.where == f"{unit} {'write' if name == 'outputs' else name}"


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])  # of the last, heads share a part of their keys
def test_the_maps_of_all_heads_together_are_those_of_each(family):
    model = opened(family)
    unit = next(unit for unit in model.anatomy.sublayers() if unit.place == "attn")
    index = next(i for i in model.anatomy.writes_of(unit) if model.anatomy.writes[i].attention is not None)
    operands = model.trace(zoo.prompt(5)[0].tolist()).run.operands(index)
    for role in ("query", "key"):
        made = operands.maps[role]
        if isinstance(made, LevelRefusedError):
            continue
        heads = list(range(made.received.shape[0]))
        rows = torch.zeros(made.shape, dtype=torch.float64).reshape(made.positions, -1)
        whole = torch.autograd.functional.jacobian(lambda x, made=made: made.linear(x)[:, 3], rows)
        for head, (used, matrix) in enumerate(made.matrices(heads, 3)):
            expected = torch.zeros_like(whole[head, :, 3])
            expected[:, used] = matrix
            assert torch.equal(expected, whole[head, :, 3])
            assert torch.equal(made.matrices([head], 3)[0][1], matrix)
    assert any(not isinstance(made, LevelRefusedError) for made in operands.maps.values())


def test_rotary_weights_depend_on_the_offset_alone():
    weights = opened("llama").weights
    head = weights.heads[5]
    for offset in (0, 1, 3):
        near = weights.qk(head, offset)
        far = Factored(weights.query(head, offset + 3, 6).mT, weights.key(head, 3, 6))
        assert torch.allclose(near.dense(), far.dense(), atol=1e-6 * float(near.norm()))
    assert float((weights.qk(head, 3).dense() - weights.qk(head, 0).dense()).norm()) > 1e-3


def test_both_ways_of_attention_have_the_same_weights():
    eager, fused = (opened("llama", attn_implementation=way).weights for way in ("eager", "sdpa"))
    for head in eager.heads[::5]:
        assert torch.allclose(eager.qk(head, 2).dense(), fused.qk(head, 2).dense(), atol=1e-9)


def test_neurons_and_sublayers_have_their_rows_and_columns():
    weights = opened("llama").weights
    whole, one = weights.reads("L1.mlp"), weights.reads("L1N7")
    assert set(whole) == set(one) == {"gate", "up"}
    for role, rows in one.items():
        assert torch.equal(rows[0], whole[role][7])
    assert torch.equal(weights.write("L1N7")[:, 0], weights.write("L1.mlp")[:, 7])


def test_what_is_not_there_is_refused():
    weights = opened("llama").weights
    for unit in ("L9H0", "L0H40", "L0.mlp"):
        with pytest.raises(UnitError):
            weights.ov(unit)
    with pytest.raises(UnitError):
        weights.write("L0N99999")
    with pytest.raises(PositionError):
        weights.qk("L0H0", -1)


def test_a_model_without_attention_says_what_it_has():
    model = opened("mamba")
    with pytest.raises(LevelRefusedError, match="mixer"):
        model.composition()
    with pytest.raises(LevelRefusedError, match="no heads"):
        model.weights.ov("L0H0")


def test_a_stream_that_is_normed_on_its_way_is_refused():
    with pytest.raises(LevelRefusedError, match="normed"):
        opened("openai-gpt").composition()


def test_a_models_compositions():
    model = opened("llama")
    found = model.composition(("q", "k", "v", "mlp"), offset=2, top=3)
    assert [(row.kind, row.pairs, row.acausal) for row in found.kinds] == [
        ("q", 48, 48), ("k", 48, 48), ("v", 48, 48), ("mlp", 24, 12),
    ]  # fmt: skip
    assert found.certificate.holds and found.certificate.pairs == 12
    assert found.factors.holds
    pair = next(row for row in found.pairs if row.kind == "k")
    weights = model.weights
    reader, writer = weights.qk(pair.reader, 2), weights.ov(pair.writer)
    alone = (reader.dense() @ writer.dense()).norm() / (reader.dense().norm() * writer.dense().norm())
    assert pair.composition == pytest.approx(float(alone), rel=1e-4)
    assert found.layers["k"][1][0] is not None and found.layers["k"][1][1] is None
    with pytest.raises(ChoiceError):
        model.composition(("x",))
    with pytest.raises(ChoiceError):
        model.composition(writers="people")


@pytest.mark.parametrize(
    ("family", "kinds", "options"),
    [
        ("llama", ("q", "k", "v", "mlp"), {"offset": 1}),
        ("llama", ("mlp",), {"writers": "mlps"}),
        ("gpt2", ("neuron",), {"of": "L0H1"}),
        ("llama", ("v", "k"), {"of": "L2H1", "writers": "neurons"}),
    ],
)
def test_tiles_give_the_same_and_bound_what_is_held(family, kinds, options, monkeypatch):
    """Counted at every stack that is made: it, what it is scaled from, and all that are held beside it."""
    model = opened(family)
    whole = model.composition(kinds, top=4, **options)
    largest = 0
    alive = weakref.WeakSet()

    def counted(units, rows):
        nonlocal largest
        made = stack(units, rows)
        held = sum(other.rows.nbytes for other in alive)
        largest = max(largest, held + rows.nbytes + made.rows.nbytes)
        alive.add(made)
        return made

    monkeypatch.setattr(composition_factors, "stack", counted)
    names = [*kinds, options.get("writers", "heads")]
    gathered = composition_factors.Gathered(model, names, 0, Unit.parse(options["of"]) if "of" in options else None)
    sizes = {name: [gathered._bytes(name, unit) for unit in units] for name, units in gathered.sublayers.items()}
    layer = max(size for many in sizes.values() for size in many)
    everything, limit = sum(map(sum, sizes.values())), 3 * layer
    del gathered
    gc.collect()
    largest = 0
    monkeypatch.setattr(composition_factors, "TOGETHER", limit)
    tiled = model.composition(kinds, top=4, **options)
    assert 0 < largest <= limit < everything
    assert [(row.kind, row.reader, row.writer) for row in tiled.pairs] == [
        (row.kind, row.reader, row.writer) for row in whole.pairs
    ]
    assert tiled.notes == whole.notes
    for one, other in zip(whole.kinds, tiled.kinds, strict=True):
        for name, value in asdict(one).items():
            assert getattr(other, name) == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value)
    for kind, tables in whole.tables.items():
        for one, other in zip(tables, tiled.tables[kind], strict=True):
            assert (one.readers, one.writers) == (other.readers, other.writers)
            assert torch.equal(one.order, other.order) and torch.equal(one.defined, other.defined)
            torch.testing.assert_close(one.strength, other.strength, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(one.q, other.q)
    for kind, one in whole.shared.items():
        assert one.directions == tiled.shared[kind].directions
        assert one.weights == pytest.approx(tiled.shared[kind].weights, rel=1e-4)


# --- neurons ------------------------------------------------------------------------------------------------


def test_few_rows_multiplied_out_are_the_same_as_gram_matrices():
    readers, writers = stack(units(9, 3), normal(9, 2, 12, seed=3)), stack(units(5, 5), normal(5, 4, 12, seed=4))
    by_hand = [[float((r @ w.T).norm() / (r.norm() * w.norm())) for w in writers.rows] for r in readers.rows]
    assert torch.allclose(squared(readers, writers).sqrt(), torch.tensor(by_hand, dtype=torch.float64))
    assert torch.allclose(squared(writers, readers), squared(readers, writers).T)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_neurons_that_read_a_head_and_those_that_it_reads(family):
    model = open_model(zoo.build(family))
    weights = model.weights
    reading = model.composition(("neuron",), of="L0H1", top=3)
    assert reading.of == "L0H1" and reading.certificate.pairs == 3
    for row in reading.pairs:
        rows = torch.cat(list(weights.reads(row.reader).values()))
        wanted = (rows @ weights.ov("L0H1").dense()).norm() / (rows.norm() * weights.ov("L0H1").norm())
        assert row.composition == pytest.approx(float(wanted), rel=1e-4)
    reading = model.composition(("v", "q"), of="L1H1", writers="neurons", top=2)
    row = reading.pairs[0]
    column = weights.write(row.writer)
    wanted = (weights.ov("L1H1").dense() @ column).norm() / (column.norm() * weights.ov("L1H1").norm())
    assert row.reader == "L1H1" and row.composition == pytest.approx(float(wanted), rel=1e-4)


def test_neurons_are_asked_about_one_head():
    model = open_model(zoo.build("llama"))
    with pytest.raises(UsageError, match="one head at a time"):
        model.composition(("neuron",))
    with pytest.raises(UsageError, match="one head at a time"):
        model.composition(("q",), writers="neurons")
    with pytest.raises(UsageError, match="where neurons read or write"):
        model.composition(("q",), of="L0H1")
    with pytest.raises(UsageError, match="is no head"):
        model.composition(("neuron",), of="L0.mlp")
    with pytest.raises(UsageError, match="by themselves"):
        model.composition(("neuron", "q"), of="L0H1")
    with pytest.raises(UsageError, match="queries, keys or values"):
        model.composition(("mlp",), of="L0H1", writers="neurons")
    with pytest.raises(UnitError):
        model.composition(("neuron",), of="L9H99")


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_a_single_head_in_a_single_layer_has_its_circuits(way):
    model = opened("llama", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, attn_implementation=way)
    assert [str(head) for head in model.weights.heads] == ["L0H0"]
    assert model.weights_check.holds
    assert model.trace([5, 6, 7]).decompose("subvalues").certificate.holds
    assert model.head_circuits("L0H0", top=1).qk.size > 0
    found = model.composition()
    assert [(row.pairs, row.acausal) for row in found.kinds] == [(0, 0)] * 3 and found.pairs == []
