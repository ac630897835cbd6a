"""Attention knockout and causal tracing: each cell is the edit it stands for, and the ends are the runs themselves."""

from functools import cache
from statistics import fmean

import handmade
import pytest
import torch
from handmade import Mixing
from torch import Tensor
from zoo import build

import mainstem
from mainstem.causal.causal_tracing import noised, trace_causes
from mainstem.causal.edits import Edit
from mainstem.causal.knockouts import windows
from mainstem.causal.metrics import Metric
from mainstem.errors import ChoiceError, LevelRefusedError, PairError, PositionError, UsageError
from mainstem.intervene.intervening import rows_of
from mainstem.lab.planted import PlantedModel, planted_pairs
from mainstem.session import Model

IDS, OTHER = [17, 4, 33, 60, 8, 25], [17, 51, 33, 60, 70, 25]


@cache
def llama() -> Model:
    """Three layers, four heads."""
    return mainstem.open(build("llama", dtype=torch.float64, attn_implementation="sdpa"))


@cache
def planted() -> Model:
    """The planted circuit."""
    return mainstem.open(PlantedModel())


def log_probability(model: Model, ids: list[int], token: int, *edits: Edit, position: int = -1) -> float:
    """Of a token after a prompt, under edits."""
    with torch.no_grad(), model.edited(*edits):
        result = model.module(torch.tensor([ids]))
    logits: Tensor = result.logits if hasattr(result, "logits") else result
    return float(logits[0, position].double().log_softmax(-1)[token])


# --- knockout -----------------------------------------------------------------------------------------------


def test_windows_are_cut_at_the_ends() -> None:
    assert windows([0, 1, 2, 3], 1) == [[0], [1], [2], [3]]
    assert windows([0, 1, 2, 3], 3) == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]
    assert windows([0, 1, 2, 3], 2) == [[0, 1], [1, 2], [2, 3], [3]]
    assert windows([0, 2, 5], 3) == [[0], [2], [5]]  # layers between have no heads


def test_each_cell_is_its_edits() -> None:
    model = llama()
    made = model.knock_out_attention(IDS, {"two": [1, 2], "itself": [-1]}, "id:9", window=2)
    assert made.sources == ("two", "itself") and made.layers == (0, 1, 2) and made.answer == "id:9"
    for row, sources in enumerate(([1, 2], [5])):
        for layer, own in enumerate(([0, 1], [1, 2], [2])):
            edits = [Edit.knockout(f"L{near}H{h}", sources, 5) for near in own for h in range(4)]
            expected = log_probability(model, IDS, 9, *edits)
            assert float(made.log_probabilities[row, layer]) == pytest.approx(expected, abs=1e-6)
    assert made.plain == pytest.approx(log_probability(model, IDS, 9), abs=1e-6)
    change = float(made.log_probabilities[0, 0].exp() - torch.tensor(made.plain).double().exp())
    assert float(made.changes[0, 0]) == pytest.approx(change / float(torch.tensor(made.plain).exp()), rel=1e-5)


def test_the_planted_answer_is_read_from_its_source_in_its_layer() -> None:
    pair = planted_pairs(1)[0]
    ids, answer = [int(one) for one in pair.clean], int(pair.answers[0])
    letter = (answer - 1) % 12
    source = next(place for place, token in enumerate(ids[:-1]) if place and (token - 1) % 12 == letter)
    made = planted().knock_out_attention(ids, answer=f"id:{answer}", window=1)
    assert made.log_probabilities.shape == (len(ids), 3)
    worst = divmod(int(made.changes.argmin()), 3)
    assert worst == (source, 1) and float(made.changes.min()) < -0.9
    others = made.changes.clone()
    others[source, 1] = 0
    assert float(others.min()) > -0.1  # no other source, and no other layer


@pytest.mark.parametrize(
    ("sources", "options", "error", "message"),
    [
        ({"none": []}, {}, UsageError, "the set 'none'"),
        ({}, {}, UsageError, "needs source positions"),
        ({"far": [9]}, {}, PositionError, "outside the prompt"),
        ({"after": [4]}, {"position": 2}, PositionError, "not attended to from position 2"),
        ({"one": [1]}, {"window": 0}, UsageError, "holds nothing"),
    ],
)
def test_knockouts_that_cannot_be_are_refused(sources, options, error, message: str) -> None:
    with pytest.raises(error, match=message):
        llama().knock_out_attention(IDS, sources, "id:9", **options)


def test_a_model_without_heads_is_refused() -> None:
    with pytest.raises(LevelRefusedError, match="No attention to knock out"):
        mainstem.open(build("mamba")).knock_out_attention(IDS)


# --- causal tracing -----------------------------------------------------------------------------------------


def test_each_restored_cell_is_its_edits() -> None:
    model = llama()
    made = model.causal_trace(IDS, OTHER, "id:9", metric="log-probability", window=3)
    assert set(made.restored) == {"resid", "attn", "mlp"} and made.corruption == "replaced tokens"
    for kind, points in (("resid", ["L1.resid_post"]), ("attn", ["L0.attn", "L1.attn", "L2.attn"])):
        for place in (1, 4):
            edits = [Edit.patch(at, IDS, place) for at in points]
            expected = log_probability(model, OTHER, 9, *edits)
            assert float(made.restored[kind][1, place]) == pytest.approx(expected, abs=1e-6)
    assert made.clean == pytest.approx(log_probability(model, IDS, 9), abs=1e-6)
    assert made.corrupted == pytest.approx(log_probability(model, OTHER, 9), abs=1e-6)
    assert made.total_effect == made.clean - made.corrupted
    assert float(made.restored["resid"][-1, -1]) == pytest.approx(made.clean, abs=1e-6)  # all that is read
    assert torch.allclose(made.indirect_effects("resid")[:, 0], torch.zeros(3).double(), atol=1e-6)  # nothing differed


@pytest.mark.parametrize("position", [-1, -2])
def test_each_restored_cell_of_a_noised_run_is_its_edits(position: int) -> None:
    model = llama()
    rows = rows_of(model, model.inputs(IDS), position)
    draws = noised(rows, [1, 2], 3.0, 2, seed=4)
    probability = Metric("log-probability", (9,))
    with model.edited(Edit.scale("L0.mlp", 0.5)):
        made = trace_causes(rows, draws, probability, ["resid", "mlp"], window=2)

        def restored(*cell: Edit) -> float:
            return fmean(log_probability(model, IDS, 9, *row.edits, *cell, position=position) for row in draws)

        assert made.corrupted == pytest.approx(restored(), abs=1e-9)
        for kind, points in (("resid", ["L1.resid_post"]), ("mlp", ["L1.mlp", "L2.mlp"])):
            assert made.restored[kind].shape == (3, len(IDS) + position + 1)
            for place in (1, 3):
                expected = restored(*(Edit.patch(at, IDS, place) for at in points))
                assert float(made.restored[kind][1, place]) == pytest.approx(expected, abs=1e-9)
    assert made.checked == 4 and made.error < 1e-9
    assert made.restored["resid"][:, 0].tolist() == pytest.approx([made.corrupted] * 3, abs=1e-14)  # nothing to restore


def test_states_are_restored_one_run_at_a_time_where_rows_mix() -> None:
    mixing, plain = (
        mainstem.open(module).causal_trace(IDS, OTHER, "id:9") for module in (Mixing(), handmade.ALL["plain"]())
    )
    assert "every run is made by itself" in mixing.notes[-1] and "by itself" not in "".join(plain.notes)
    for kind, values in plain.restored.items():
        assert torch.allclose(mixing.restored[kind], values, atol=1e-6)


def test_noise_is_seeded_and_averaged_over_draws() -> None:
    model = llama()
    ask = {"subject": [1, -2], "kinds": ["resid"], "metric": "log-probability", "answers": "id:9"}
    one, again = (model.causal_trace(IDS, draws=3, **ask) for _ in range(2))
    assert torch.equal(one.restored["resid"], again.restored["resid"]) and one.corrupted == again.corrupted
    other = model.causal_trace(IDS, draws=2, **ask)
    assert other.corrupted != one.corrupted and one.corruption == "noise of 3 standard deviations at [1, 4], 3 draws"
    assert float(one.restored["resid"][-1, -1]) == pytest.approx(one.clean, abs=1e-6)
    small = model.causal_trace(IDS, noise=1e-7, draws=1, **ask)
    assert small.corrupted == pytest.approx(small.clean, abs=1e-4) and abs(one.total_effect) > 1e-2


def test_tracing_that_cannot_be_is_refused() -> None:
    model = llama()
    for prompt, subject in ((None, ()), (OTHER, (1,))):
        with pytest.raises(UsageError, match="another prompt, or a subject"):
            model.causal_trace(IDS, prompt, subject=subject)
    with pytest.raises(PairError, match="6 tokens and the corrupted one 5"):
        model.causal_trace(IDS, OTHER[1:])
    with pytest.raises(ChoiceError, match="kind of state"):
        model.causal_trace(IDS, OTHER, kinds=["heads"])
    with pytest.raises(UsageError, match="No kind of state.*resid, attn, mlp"):
        model.causal_trace(IDS, OTHER, kinds=[])
    with pytest.raises(UsageError, match="one draw at least"):
        model.causal_trace(IDS, subject=[1], draws=0)
    with pytest.raises(ChoiceError):
        model.causal_trace(IDS, OTHER, kinds=["resid"]).indirect_effects("mlp")


@pytest.mark.slow
def test_the_capital_is_read_from_its_country(demo_model: Model) -> None:
    sets = {"country": [3], "of": [2], "first": [0]}
    made = demo_model.knock_out_attention("The capital of France is", sets, " Paris", window=9)
    fall = dict(zip(made.sources, made.changes.min(-1).values.tolist(), strict=True))
    assert fall["country"] < -0.5 and fall["country"] < fall["of"]
    deep = made.layers[int(made.changes[0].argmin())]
    assert deep > 10
