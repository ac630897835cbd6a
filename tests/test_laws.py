"""Laws of decompositions, attributions and lenses, on tiny models of every shape of stream."""

from functools import cache

import handmade
import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import build
from torch import Tensor

import mainstem
from mainstem.analysis.attribution import Attribution, attribute
from mainstem.analysis.decompose import LEVELS, Decomposition
from mainstem.analysis.increase import increases
from mainstem.analysis.recomputed import direct_recomputed
from mainstem.targets import Target
from mainstem.tracing import Trace
from mainstem.units import Unit

NAMES = [
    "llama",
    "gpt2",
    "gemma2",
    "mixtral",
    "olmo2",
    "gpt_neox",
    "granite",
    "openai-gpt",
    "channel_gates",
    "mixed_back",
    "in_place",
]


QUICK = {"llama", "gemma2", "mixed_back", "softcap", "narrow_embedding"}


def named(names: list[str]) -> pytest.MarkDecorator:
    marks = {name: () if name in QUICK else pytest.mark.slow for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[name]) for name in names])


@cache
def trace_of(name: str) -> Trace:
    model = build(name)
    return mainstem.open(model).trace(zoo.prompt(9, seed=2)[0].tolist(), positions=(-1,))


@cache
def decomposition(name: str, level: str) -> Decomposition:
    return trace_of(name).decompose(level)


def target_of(name: str) -> Target:
    return Target(ids=(int(trace_of(name).logits().argmax()),), text="the likeliest")


def same(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return bool((a.double() - b.double()).norm() <= tolerance * b.double().norm())


# --- parts add up -------------------------------------------------------------------------------------------


@named(NAMES)
def test_the_parts_of_every_level_sum_to_the_stream(name: str) -> None:
    for level in LEVELS:
        made = decomposition(name, level)
        assert same(made.total(), made.moment.stream), level
        assert made.certificate is not None
        assert made.certificate.holds and made.certificate.relative_error < 1e-5
        assert made.certificate.tolerance < 1e-3
        assert made.certificate.parts == len(made) == sum(len(group.units) for group in made.groups)


@named(NAMES)
def test_each_unit_has_one_part(name: str) -> None:
    """Addresses are unique: a lookup by address finds one part (roundings of one sublayer may be several)."""
    for level in LEVELS:
        units = [u for g in decomposition(name, level).groups if g.kind not in ("bias", "rounding") for u in g.units]
        assert len(units) == len(set(units)), level


def summed(name: str, level: str, key) -> dict[Unit, Tensor]:
    """The parts of a level summed by what `key` makes of their unit; None leaves a part out."""
    out: dict[Unit, Tensor] = {}
    for group in decomposition(name, level).groups:
        vectors = group.vectors(torch.arange(len(group)))
        for unit, vector in zip(group.units, vectors, strict=True):
            place = key(unit)
            if place is not None:
                out[place] = out[place] + vector if place in out else vector
    return out


@named(NAMES)
def test_subvalues_and_attention_neurons_of_a_head_sum_to_the_head(name: str) -> None:
    def head(unit: Unit) -> Unit | None:
        return None if unit.head_index is None else Unit.head(unit.layer or 0, unit.head_index, unit.nth)

    heads = summed(name, "heads", head)
    assert heads
    for level in ("subvalues", "attention_neurons"):
        finer = summed(name, level, head)
        assert finer.keys() == heads.keys()
        assert all(same(finer[unit], heads[unit], 1e-4) for unit in heads), level


@named(NAMES)
def test_finer_parts_sum_to_their_sublayer(name: str) -> None:
    def sublayer(unit: Unit) -> Unit | None:
        return None if unit.kind in ("rounding",) else unit.sublayer

    whole = summed(name, "sublayers", sublayer)
    for level in LEVELS[1:]:
        finer = summed(name, level, sublayer)
        assert finer.keys() == whole.keys()
        assert all(same(finer[unit], whole[unit], 1e-4) for unit in whole), level


# --- groups -------------------------------------------------------------------------------------------------


@named(NAMES)
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6), level=st.sampled_from(LEVELS))
def test_groups_answer_alike_in_every_form(name: str, seed: int, level: str) -> None:
    """Inner products, sums and raw parts agree with the vectors themselves."""
    made = decomposition(name, level)
    direction = torch.randn(made.moment.stream.shape, generator=torch.Generator().manual_seed(seed)).double()
    for group in made.groups:
        vectors = group.vectors(torch.arange(len(group)))
        size = vectors.norm(dim=-1) * direction.norm() + 1e-12
        assert ((group.dot(direction) - vectors @ direction).abs() <= 1e-9 * size).all()
        assert (group.total() - vectors.sum(0)).norm() <= 1e-9 * (vectors.norm(dim=-1).sum() + 1e-12)
        some = torch.tensor([seed % len(group)])
        assert torch.allclose(group.vectors(some)[0], vectors[some[0]])


# --- attribution --------------------------------------------------------------------------------------------


def before_softcap(name: str) -> Tensor:
    """The model's own logits; where it caps them, what it capped."""
    cap = (
        getattr(trace_of(name).model.module.config, "final_logit_softcapping", None)
        if name not in handmade.ALL
        else None
    )
    logits = trace_of(name).logits().double()
    return logits if cap is None else cap * torch.atanh(logits / cap)


def explained(made: Attribution) -> float:
    """All scores, and what the readout's own constants add."""
    return float(sum(s.sum() for s in made.scores)) + sum(made.functional.constants.values())


@named(NAMES)
def test_direct_scores_sum_to_the_models_logit(name: str) -> None:
    target = target_of(name)
    for level in ("sublayers", "units", "attention_neurons"):
        made = attribute(decomposition(name, level), target)
        assert explained(made) == pytest.approx(float(before_softcap(name)[target.ids[0]]), abs=1e-3), level
        assert made.unexplained == pytest.approx(0, abs=1e-3)


@named(NAMES)
def test_additive_scores_sum_to_the_models_log_probability(name: str) -> None:
    """log p + log V, by the model's own logits."""
    logits, target = trace_of(name).logits().double(), target_of(name)
    likely = target.ids[0]
    for ids in ((likely,), (likely, int(logits.argmin()), 3)):
        made = attribute(decomposition(name, "units"), Target(ids=ids, text="a set"), "additive")
        expected = logits[list(ids)].logsumexp(0) - logits.logsumexp(0) + torch.tensor(len(logits) / len(ids)).log()
        assert explained(made) == pytest.approx(float(expected), abs=1e-3)


@named(NAMES)
def test_a_contrast_sums_to_the_difference_of_logits(name: str) -> None:
    logits = before_softcap(name)
    a, b, c = logits.topk(3).indices.tolist()
    made = attribute(decomposition(name, "units"), Target(ids=(a,), against=(b, c), text="a"))
    assert explained(made) == pytest.approx(float(logits[a] - (logits[b] + logits[c]) / 2), abs=1e-3)


# --- scores by definition, by the model's own final modules ------------------------------------------------

FINAL = {
    "llama": lambda m: (m.model.norm, m.lm_head),
    "gpt2": lambda m: (m.transformer.ln_f, m.lm_head),
    "mixtral": lambda m: (m.model.norm, m.lm_head),
    "qwen2_moe": lambda m: (m.model.norm, m.lm_head),
    "in_place": lambda m: (m.norm, m.head),
}
"""The final norm and the unembedding of models whose blocks read the stream itself."""


def by_definition(name: str, states: Tensor) -> Tensor:
    norm, head = FINAL[name](trace_of(name).model.module)
    with torch.no_grad():
        return head(norm(states.float())).double()


def base_of(name: str, unit: Unit) -> Tensor:
    """The stream that a sublayer reads, by hook-style names."""
    if unit.layer is None:
        return torch.zeros_like(trace_of(name).run.moment().stream)
    place = "resid_pre" if unit.place == "attn" else "resid_mid"
    return trace_of(name)[f"blocks.{unit.layer}.hook_{place}"][-1]


@pytest.mark.parametrize("name", FINAL)
def test_recomputed_attribution_is_the_difference_that_a_part_makes(name: str) -> None:
    """z_t(x + v) - z_t(x), and what the differences leave out of the logit is the remainder."""
    target = target_of(name)
    made = decomposition(name, "units")
    found = direct_recomputed(made, target)
    total = 0.0
    for group, scores in zip(made.groups, found.scores, strict=True):
        total += float(scores.sum())
        if group.kind in ("bias", "rounding", "embedding"):
            continue
        base = base_of(name, (group.sublayer or group.units[0]).sublayer)
        some = torch.arange(0, len(group), max(1, len(group) // 5))
        with_part = by_definition(name, base.double() + group.vectors(some))
        expected = (with_part - by_definition(name, base[None]))[:, target.ids[0]]
        assert torch.allclose(scores[some], expected, atol=1e-4), group.units[0]
    logit = float(trace_of(name).logits()[target.ids[0]])
    bias = trace_of(name).model.anatomy.readout.bias
    constant = 0.0 if bias is None else float(bias[target.ids[0]])
    assert found.remainder == pytest.approx(logit - total - constant, abs=1e-3)


@pytest.mark.parametrize("name", FINAL)
@pytest.mark.parametrize("norm", ["recompute", "frozen"])
def test_the_increase_is_the_definitions(name: str, norm: str) -> None:
    """log p(t | x + v) - log p(t | x); frozen: with the final state's scale on both sides."""
    target, made = target_of(name), decomposition(name, "units")
    values = attribute(made, target).top(6) + attribute(made, target).top(3, negative=True)
    values = [v for v in values if v.group.kind not in ("bias", "rounding", "embedding", "sublayer")]
    found = increases(made, values, target, norm)
    for value, increase in zip(values, found, strict=True):
        base = base_of(name, value.unit.sublayer).double()
        states = torch.stack([base, base + value.vector()])
        logits = by_definition(name, states) if norm == "recompute" else frozen(name, made, states)
        log_p = logits.log_softmax(-1)[:, target.ids[0]]
        assert increase == pytest.approx(float(log_p[1] - log_p[0]), abs=1e-4), value.unit


def frozen(name: str, made: Decomposition, states: Tensor) -> Tensor:
    """The final norm with the scale of the last state, written out for the two kinds of norm."""
    norm, head = FINAL[name](trace_of(name).model.module)
    centre = (lambda x: x - x.mean(-1, keepdim=True)) if name == "gpt2" else (lambda x: x)
    gain = norm.weight if hasattr(norm, "weight") else norm.gain
    eps = (
        next(e for e in (getattr(norm, n, None) for n in ("eps", "variance_epsilon")) if e)
        if name != "in_place"
        else 1e-6
    )
    scale = (centre(made.moment.stream.double()).pow(2).mean() + eps).rsqrt()
    x = centre(states) * scale * gain.double()
    x = x + norm.bias.double() if getattr(norm, "bias", None) is not None else x
    with torch.no_grad():
        return x @ head.weight.double().T


# --- lens ---------------------------------------------------------------------------------------------------


@named([*NAMES, "softcap", "narrow_embedding", "no_final_norm", "cohere", "inline_norms"])
@pytest.mark.parametrize("norm", ["recompute", "frozen"])
def test_the_last_lens_is_the_models_own_prediction(name: str, norm: str) -> None:
    states = trace_of(name).lens(norm=norm)
    logits = trace_of(name).logits()
    assert torch.allclose(states.logits[-1].double(), logits.double(), atol=2e-4)
    assert torch.allclose(states.log_probabilities[-1].double(), logits.double().log_softmax(-1), atol=2e-4)
    assert states.units[0].kind == "embedding" and len(states.units) == len(states.logits)
    assert torch.allclose(states.log_probabilities.exp().sum(-1).double(), torch.ones(1).double(), atol=1e-5)


@named(NAMES)
def test_increases_along_the_stream_sum_to_the_log_probability(name: str) -> None:
    states = trace_of(name).lens()
    ids = torch.tensor([3, int(trace_of(name).logits().argmax())])
    course = states.course(ids)
    assert torch.allclose(course.increases().sum(0), course.log_probabilities[-1], atol=1e-4)
    assert (
        course.ranks[-1] == torch.tensor([int((states.logits[-1] > states.logits[-1, i]).sum()) + 1 for i in ids])
    ).all()
