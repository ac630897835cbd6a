"""Direct, downstream and readout add up to the total, which is that of a real run; nothing repairs the last layer."""

from functools import cache

import handmade
import pytest
import torch
from zoo import build

import mainstem
from mainstem.causal.edits import Edit
from mainstem.errors import ChoiceError, TargetError, UnitError, UsageError
from mainstem.lab.planted import D_MODEL, JUNK, PlantedModel
from mainstem.session import Model
from mainstem.tracing import Trace
from mainstem.units import Unit

IDS, REFERENCE = [17, 4, 33, 60, 8, 25], [5, 71, 30, 12, 64, 9, 44, 2]


@cache
def trace(name: str, layers: int = 3) -> Trace:
    """A run of a tiny model in float64."""
    if name in handmade.ALL:
        return mainstem.open(handmade.ALL[name]().double()).trace(IDS)
    return mainstem.open(build(name, layers=layers, dtype=torch.float64)).trace(IDS)


def logit(model: Model, token: int, *edits: Edit) -> float:
    """Of a token after the prompt, under edits."""
    with torch.no_grad(), model.edited(*edits):
        return float(model.module(torch.tensor([IDS])).logits[0, -1, token])


UNITS = ("embed", "L0H1", "L0.mlp", "L1H3", "L1N5", "L1.attn", "L1H0.7", "L2H2", "L2H2@1", "L2N3")


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "gpt2", "granite", "plain", "mixed_back", "softcap"])
def test_direct_is_the_attribution_and_total_a_real_run(name: str) -> None:
    made = trace(name).repair(UNITS, "id:9")
    attributed = {}
    for level in ("sublayers", "heads", "subvalues", "attention_neurons", "neurons"):
        scores = trace(name).attribute(trace(name).model.target("id:9"), level)
        for group, own in zip(scores.decomposition.groups, scores.scores, strict=True):
            attributed |= {str(unit): float(own[i]) for i, unit in enumerate(group.units)}
    for effect in made.effects:
        assert effect.direct == pytest.approx(attributed[effect.unit], abs=1e-5), effect.unit
        removed = logit(trace(name).model, 9, Edit.zero(effect.unit, -1))
        assert effect.total == pytest.approx(logit(trace(name).model, 9) - removed, abs=1e-5)
        assert effect.total == pytest.approx(effect.direct + effect.downstream + effect.readout, abs=1e-12)
    assert max(abs(effect.downstream) for effect in made.effects) > 1e-3


@pytest.mark.parametrize("removal", ["zero", "mean", "resample"])
def test_nothing_after_the_last_sublayer_repairs(removal) -> None:
    one = trace("llama", 1)
    made = one.repair(["L0.mlp", "L0N4", "L0H2"], "id:9", removal=removal, reference=REFERENCE, draws=3)
    last, neuron, head = made.effects
    assert abs(last.downstream) < 1e-6 and abs(neuron.downstream) < 1e-6 and abs(last.direct) > 1e-2
    assert abs(head.downstream) > 1e-4  # the MLP comes after it
    assert abs(last.readout) > 1e-4 and made.norm == "frozen"
    assert made.draws == (3 if removal == "resample" else 1)


def test_without_a_final_norm_and_softcap_the_readout_has_no_part() -> None:
    for effect in trace("no_final_norm").repair(UNITS, "id:9").effects:
        assert abs(effect.readout) < 1e-6 * max(1.0, abs(effect.total))


@pytest.mark.parametrize(("undone", "repaired"), [(1.0, 1.0), (0.25, 0.25), (-0.5, -0.5)])
def test_a_head_that_takes_away_what_an_mlp_wrote_repairs_its_removal(undone: float, repaired: float) -> None:
    module = PlantedModel().double()
    junk = torch.eye(D_MODEL, dtype=torch.float64)[JUNK]
    with torch.no_grad():
        for block in module.blocks:
            block.attention.output.weight.zero_()
            for weight in () if block is module.blocks[0] else (block.mlp.output.weight,):
                weight.zero_()
        head = module.blocks[1].attention  # alone at the first position, so that its pattern is 1
        head.value.weight[: len(junk)], head.output.weight[:, : len(junk)] = junk, -undone * junk.T
    made = mainstem.open(module).trace([3]).repair(["L0.mlp"], "id:9").effects[0]
    assert abs(made.direct) > 1e-2 and made.repaired == pytest.approx(repaired)
    assert made.total == pytest.approx((1 - undone) * made.direct, abs=1e-12)


def test_rivals_make_it_a_difference_of_logits() -> None:
    model = trace("llama").model
    made = trace("llama").repair(["L1H3"], model.target("id:9", "id:11"))
    total = [logit(model, token) - logit(model, token, Edit.zero("L1H3", -1)) for token in (9, 11)]
    assert made.effects[0].total == pytest.approx(total[0] - total[1], abs=1e-6)
    best = trace("llama").repair(["L1H3"])
    assert best.target == f"id:{int(trace('llama').logits().argmax())}"


def test_what_cannot_be_removed_is_refused() -> None:
    one = trace("llama")
    with pytest.raises(ChoiceError, match="removal"):
        one.repair(["L1H3"], "id:9", removal="median")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs a unit"):
        one.repair([], "id:9")
    with pytest.raises(UsageError, match="needs a reference"):
        one.repair(["L1H3"], "id:9", removal="mean")
    with pytest.raises(UsageError, match="weight of a pattern"):
        one.repair(["L1H3@2"], "id:9", removal="mean", reference=REFERENCE)
    with pytest.raises(UnitError):
        one.repair(["L7H3"], "id:9")
    with pytest.raises(TargetError, match="logits of tokens"):
        one.repair([Unit.parse("L1H3")], one.model.target(direction=[1.0] * one.model.anatomy.sizes.d_model))


@pytest.mark.slow
def test_later_layers_repair_an_mlp_and_add_to_the_head_that_reads_the_country(demo_model: Model) -> None:
    head, mlp, last = (
        demo_model.trace("The capital of France is").repair(["L23H4", "L24.mlp", "L29.mlp"], " Paris").effects
    )
    assert head.direct > 1 and head.repaired < 0 and head.total > head.direct
    assert mlp.direct > 0.5 and mlp.repaired > 0.5
    assert abs(last.downstream) < 1e-4 < last.direct
