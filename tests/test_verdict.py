"""Ablation takes out exactly what it names, and a verdict can come out each way."""

import pytest
import torch
import zoo

import mainstem
from mainstem.causal.ablation import AblatedRuns
from mainstem.causal.controls import Pool, units_of
from mainstem.causal.neuron_map import Ablation, NeuronMap
from mainstem.causal.outcomes import NAMED, RANDOM, Control
from mainstem.causal.reference import observe, reference_text
from mainstem.causal.verdict import Question, judge, verify
from mainstem.errors import ChoiceError, LevelRefusedError, UnitError, UsageError
from mainstem.model.discovery import discover
from mainstem.run.inputs import base_arguments
from mainstem.session import Model
from mainstem.targets import Target
from mainstem.units import Unit

FAMILIES = ["llama", "gpt2", "gpt_neox", "gemma2", "qwen3", "falcon", "mixtral", "qwen2_moe"]


def _runs(model, position: int = 8):
    anatomy = discover(model)
    ids = zoo.prompt(9, seed=1)
    return AblatedRuns(model, anatomy, ids, position, **base_arguments(model)), NeuronMap(anatomy), anatomy, ids


def _zeroed_by_weights(model, anatomy, ids, unit: Unit, position: int) -> torch.Tensor:
    """The logits at the last position when the unit's column of the output matrix is zero, so that it never writes."""
    write = next(w for w in anatomy.writes if w.unit == unit.sublayer and w.projection is not None and w.source)
    column = int(write.attention.channels[unit.head_index, unit.neuron]) if write.attention else unit.neuron
    matrix = write.projection.factors[0]
    kept = matrix[:, column].clone()
    with torch.no_grad():
        matrix[:, column] = 0
        found = model(input_ids=ids, **base_arguments(model)).logits[0, position]
        matrix[:, column] = kept
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_taking_a_unit_out_everywhere_is_zeroing_its_column(family: str) -> None:
    model = zoo.build(family)
    runs, neurons, anatomy, ids = _runs(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    units = [Unit.attention_neuron(1, 1, 3)]
    if not any(w.experts for w in anatomy.writes):
        units.append(Unit.ffn_neuron(1, 5))
    for unit in units:
        expected = _zeroed_by_weights(model, anatomy, ids, unit, 8)
        found = runs.logits([neurons.ablation([unit], everywhere=True)])[0]
        assert float((found - runs.clean).norm()) > 1e-5 * float(runs.clean.norm())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_at_the_destination_alone_is_what_a_hook_at_that_position_does() -> None:
    model = zoo.build("llama")
    runs, neurons, _, ids = _runs(model, position=5)
    unit = Unit.head(0, 2)
    width = model.config.hidden_size // model.config.num_attention_heads

    def silence(module, args):
        z = args[0].clone()
        z[:, 5, 2 * width : 3 * width] = 0
        return (z,)

    handle = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(silence)
    expected = model(input_ids=ids, use_cache=False).logits[0, 5]
    handle.remove()
    here, everywhere = runs.logits([neurons.ablation([unit]), neurons.ablation([unit], everywhere=True)])
    torch.testing.assert_close(here, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(here, everywhere, atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_an_experts_neuron_is_taken_out_where_its_expert_is_chosen(family: str) -> None:
    model = zoo.build(family)
    runs, neurons, anatomy, ids = _runs(model)
    trace = Model(mainstem.open(model).loaded).trace(ids[0].tolist())
    group = next(g for g in trace.decompose("neurons").groups if g.kind == "expert_neuron" and not g.units[0].shared)
    unit = group.units[2]
    change = runs.logits([neurons.ablation([unit])])[0] - runs.clean
    assert float(change.norm()) > 0
    elsewhere = next(e for e in range(64) if not any(g.kind == "expert_neuron" and g.units[0].expert == e
                     and g.sublayer == group.sublayer for g in trace.decompose("neurons").groups))  # fmt: skip
    idle = Unit.expert_neuron(unit.layer or 0, elsewhere, 2)
    torch.testing.assert_close(runs.logits([neurons.ablation([idle])])[0], runs.clean, rtol=1e-4, atol=1e-5)


def test_rows_of_a_batch_are_runs_of_their_own() -> None:
    model = zoo.build("llama")
    runs, neurons, *_ = _runs(model)
    sets = [neurons.ablation([Unit.ffn_neuron(0, i), Unit.attention_neuron(1, 0, i)]) for i in range(5)]
    together = runs.logits(sets)
    for row, one in zip(together, sets, strict=True):
        torch.testing.assert_close(row, runs.logits([one])[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_many_runs_begin_at_the_destination_and_are_the_same(family: str) -> None:
    model = zoo.build(family)
    whole, neurons, anatomy, ids = _runs(model, position=6)
    late = AblatedRuns(model, anatomy, ids, 6, many=True, **base_arguments(model))
    units = [Unit.attention_neuron(0, 0, 1), Unit.attention_neuron(1, 1, 3)]
    if not any(w.experts for w in anatomy.writes):
        units.append(Unit.ffn_neuron(1, 5))
    sets = [neurons.ablation([unit]) for unit in units]
    sets += [Ablation(), neurons.ablation(units), neurons.ablation(units[:1], everywhere=True)]
    means = neurons.all_but(sets[0], observe(model, anatomy, ids, **base_arguments(model)).mean())
    expected = whole.logits([*sets, means])
    torch.testing.assert_close(late.logits([*sets, means]), expected, rtol=1e-4, atol=1e-5)
    assert late._replay is not None and late._replay.by_suffix and not late._replay.notes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_replacement_puts_the_value_in() -> None:
    model = zoo.build("llama")
    runs, neurons, anatomy, ids = _runs(model)
    reference = observe(model, anatomy, ids, **base_arguments(model))
    own = {site: value[-1] for site, value in reference.values.items()}  # the destination's own values
    everything = neurons.all_but(Ablation(), own)
    torch.testing.assert_close(runs.logits([everything])[0], runs.clean, rtol=1e-4, atol=1e-5)
    means = neurons.all_but(Ablation(), reference.mean())
    assert not torch.allclose(runs.logits([means])[0], runs.clean, atol=1e-3)


def test_experts_that_the_model_has_not_are_refused() -> None:
    neurons = NeuronMap(discover(zoo.build("mixtral")))
    for address in ("L0E99N1", "L0E1N99999"):
        with pytest.raises(UnitError):
            neurons.ablation([Unit.parse(address)])
    with pytest.raises(LevelRefusedError):
        neurons.ablation([Unit.write(0, "mlp")])


@pytest.mark.parametrize("address", ["L9N0", "L0N99999", "L0H77.0", "L0H0.9999", "L0E1N1"])
def test_units_that_the_model_has_not_are_refused(address: str) -> None:
    neurons = NeuronMap(discover(zoo.build("llama")))
    with pytest.raises(UnitError):
        neurons.ablation([Unit.parse(address)])


def _control(name: str, drop: float, own: float) -> Control:
    return Control(name, 10, 0.5, 0.4, 0.6, drop, 1.0, own > drop)


def test_a_verdict_comes_out_each_way() -> None:
    beaten = [_control(name, 0.1, 2.0) for name in (*RANDOM, *NAMED)]
    assert judge(2.0, beaten) == "causal and specific"
    assert judge(2.0, [*beaten[:-1], _control(NAMED[2], 3.0, 2.0)]) == "causal"
    assert judge(2.0, [_control(RANDOM[0], 3.0, 2.0), *beaten[1:]]) == "not causal"
    assert judge(2.0, beaten[:3]) == judge(2.0, beaten[:5]) == "causal"  # nothing to be specific against
    assert judge(-0.1, [_control(name, -1.0, -0.1) for name in (*RANDOM, *NAMED)]) == "not causal"


@pytest.mark.parametrize("seed", range(3))
def test_a_ranking_that_says_nothing_is_not_causal(seed: int) -> None:
    model = zoo.build("llama")
    runs, neurons, _, ids = _runs(model)
    trace = mainstem.open(model).trace(ids[0].tolist())
    groups = [g for g in trace.decompose("units").groups if g.kind == "ffn_neuron"]
    generator = torch.Generator().manual_seed(seed)

    def arbitrary(_) -> list:
        return [(groups[i % len(groups)], int(torch.randint(20, (1,), generator=generator))) for i in range(3)]

    others = {name: [1, 2] for name in NAMED}
    best = [int(runs.clean.argmax())]
    made = verify(Question(runs, neurons, groups, best, arbitrary, others, None, 20, False, seed))
    assert made.verdict == "not causal"
    assert made.notes  # that nothing was replaced by a text's values


@pytest.mark.slow
def test_a_set_that_leaves_nothing_to_compare_with_is_not_causal() -> None:
    trace = mainstem.open(zoo.build("llama")).trace(zoo.prompt(9, seed=1)[0].tolist())
    made = trace.verify(Target(ids=(int(trace.logits().argmax()),)), {"ffn": 10_000, "attention": 10_000}, draws=2)
    assert made.verdict == "not causal" and any("more than half" in note for note in made.notes)


def test_controls_are_as_many_and_are_others() -> None:
    trace = mainstem.open(zoo.build("llama")).trace(zoo.prompt(9, seed=1)[0].tolist())
    groups = [g for g in trace.decompose("units").groups if g.kind == "ffn_neuron"]
    pool = Pool(groups, torch.Generator().manual_seed(0))
    chosen = [(groups[0], i) for i in range(len(groups[0]) - 3)] + [(groups[1], 2)]
    for draw in (pool.anywhere, pool.same_layers, pool.norm_matched):
        found = draw(chosen)
        assert not {u for g, i in chosen for u in [g.units[i]]} & set(units_of(found))
        assert len(set(units_of(found))) == len(found)
    assert len(pool.same_layers(chosen)) == 4  # three of the first layer are left, and one of the second
    matched = pool.norm_matched([(groups[1], 2)])
    near = sorted(
        range(len(groups[1])), key=lambda i: abs(float((pool.norms(groups[1])[i] / pool.norms(groups[1])[2]).log()))
    )
    assert matched[0][1] in near[1:21]


def test_bad_requests() -> None:
    model = mainstem.open(zoo.build("llama"))
    trace = model.trace([1, 2, 3])
    target = Target(ids=(5,))
    with pytest.raises(ChoiceError):
        trace.verify(target, {"heads": 3})
    with pytest.raises(UsageError):
        trace.verify(target, {"ffn": 0, "attention": 0})
    with pytest.raises(UsageError):
        trace.verify(target, {"ffn": -1})
    with pytest.raises(ChoiceError):
        trace.verify(target, {"ffn": 1}, score="magic")


def test_the_reference_text_is_there() -> None:
    assert len(reference_text().split()) > 400


@pytest.mark.slow
def test_the_default_model_keeps_paris_in_few_units() -> None:
    model = mainstem.open("demo")
    trace = model.trace("The capital of France is")
    target = model.target(" Paris")
    for score, most in (("increase", 0.05), ("additive", 0.001)):
        made = trace.verify(target, score=score)
        by_name = {control.name: control for control in made.controls}
        assert made.before.probability == pytest.approx(0.77, abs=0.02)
        assert made.ablated["probability"] < most
        assert by_name[RANDOM[0]].min > 0.6
        assert all(by_name[name].beaten for name in RANDOM)
        assert made.verdict != "not causal"
