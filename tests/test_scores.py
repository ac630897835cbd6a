"""Every score is its definition: one unit at a time, through the model's own final modules, in float64."""

from functools import cache

import jaxtyping
import pytest
import torch
import zoo
from tiny_models import build
from torch import Tensor

import mainstem
from mainstem.analysis import vocabulary
from mainstem.analysis.attribution import Scored
from mainstem.analysis.decompose import Decomposition
from mainstem.analysis.increase import increases
from mainstem.analysis.parts import Group
from mainstem.analysis.scores import PUBLISHED, RANKINGS, RULES, chosen_groups, require_finite, score_all
from mainstem.errors import ChoiceError, MainstemError, NotFiniteError, UsageError
from mainstem.report.explain_text import SIZES
from mainstem.targets import Target
from mainstem.tracing import Trace
from mainstem.units import Unit

FINAL = {
    "llama": lambda m: (m.model.norm, m.lm_head),
    "gpt2": lambda m: (m.transformer.ln_f, m.lm_head),
    "mixtral": lambda m: (m.model.norm, m.lm_head),
    "in_place": lambda m: (m.norm, m.head),
}
"""The final norm and the unembedding of models whose blocks read the stream itself and add to it plainly."""

NAMES = [pytest.param(name, marks=() if name in ("llama", "in_place") else pytest.mark.slow) for name in FINAL]
SINGLE = {"mixtral"}
"""Families whose kernels know no float64."""


@cache
def trace_of(name: str) -> Trace:
    model = build(name)
    if name not in SINGLE:
        model = model.double()
    return mainstem.open(model).trace(zoo.prompt(9, seed=2)[0].tolist(), positions=(-1,))


@cache
def decomposition(name: str, level: str = "units") -> Decomposition:
    return trace_of(name).decompose(level)


def target_of(name: str, size: int = 1) -> Target:
    return Target(ids=tuple(trace_of(name).logits().topk(size).indices.tolist()), text="the likeliest")


def base_of(name: str, unit: Unit) -> Tensor:
    """The stream that a sublayer reads, by hook-style names."""
    place = "resid_pre" if unit.place == "attn" else "resid_mid"
    return trace_of(name)[f"blocks.{unit.layer}.hook_{place}"][-1]


@torch.no_grad()
def read(name: str, state: Tensor, norm: str, alone: bool = False) -> Tensor:
    """The logits of one state: by the model's own modules, or with the last state's scale; `alone` drops biases."""
    final, head = FINAL[name](trace_of(name).model.module)
    state = state.to(head.weight.dtype)
    if norm == "recompute":
        return head(final(state))
    last = trace_of(name).run.moment().stream
    centre = (lambda x: x - x.mean()) if name == "gpt2" else (lambda x: x)
    gain = final.weight if hasattr(final, "weight") else final.gain
    eps = getattr(final, "eps", getattr(final, "variance_epsilon", 1e-6))
    x = centre(state) * (centre(last).pow(2).mean() + eps).rsqrt() * gain
    if alone:
        return head.weight @ x
    return head(x if getattr(final, "bias", None) is None else x + final.bias)


def by_definition(name: str, group: Group, index: int, target: Target, norm: str) -> dict[str, float]:
    """All scores of one unit, written out."""
    v = group.vectors(torch.tensor([index]))[0]
    m = abs(float(group.coefficients[index]))
    x = base_of(name, group.sublayer or group.units[0])
    ids = list(target.ids)

    def log_p(logits: Tensor) -> float:
        return float(torch.log(logits.softmax(-1)[ids].sum()))

    own = read(name, v, norm, alone=True)
    before, after = log_p(read(name, x, norm)), log_p(read(name, x + v, norm))
    rank = min(sorted(own.tolist(), reverse=True).index(float(own[token])) + 1 for token in ids)
    return {
        "increase": after - before,
        "log-probability": log_p(own),
        "probability-increase": float(torch.tensor(after).exp() - torch.tensor(before).exp()),
        "norm": float(v.norm()) / m,
        "coefficient": m,
        "reciprocal-rank": 1 / rank,
        "coefficient-norm": float(v.norm()),
        "coefficient-rank": m / rank,
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm", ["frozen", "recompute"])
@pytest.mark.parametrize("size", [1, 3])
def test_each_score_is_its_definition(name: str, norm: str, size: int) -> None:
    target = target_of(name, size)
    slack = 1e-4 if name in SINGLE else 1e-6  # stock norms compute in float32 anyway
    for level in ("units", "heads", "attention_neurons"):
        made = decomposition(name, level)
        found = score_all(made, target, PUBLISHED, norm)
        for n, group in enumerate(chosen_groups(made)):
            assert all(len(found[score][n]) == len(group) for score in PUBLISHED)
            for index in range(0, len(group), 1 + len(group) // 7):
                if not float(group.coefficients[index]):  # nothing is written, and its size has no direction
                    continue
                expected = by_definition(name, group, index, target, norm)
                for score, value in expected.items():
                    assert float(found[score][n][index]) == pytest.approx(value, rel=100 * slack, abs=slack), (
                        score,
                        group.units[index],
                    )


@pytest.mark.parametrize("name", ["llama", "gemma2", "softcap"])
@pytest.mark.parametrize("norm", ["frozen", "recompute"])
def test_chunks_and_short_cuts_change_nothing(name: str, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, target = decomposition(name), target_of(name)
    whole = score_all(made, target, PUBLISHED, norm)
    alone = {score: score_all(made, target, [score], norm)[score] for score in PUBLISHED}
    monkeypatch.setattr(vocabulary, "ELEMENTS", 7 * made.moment.anatomy.sizes.d_vocab)
    monkeypatch.setattr(vocabulary, "SPREAD", -1.0)
    plain = score_all(made, target, PUBLISHED, norm)
    for score in PUBLISHED:
        for a, b, c in zip(whole[score], alone[score], plain[score], strict=True):
            assert torch.allclose(a, b, atol=1e-9) and torch.allclose(a, c, atol=1e-9), score


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "olmo2"])
@pytest.mark.parametrize("norm", ["frozen", "recompute"])
def test_increase_is_that_of_the_search(name: str, norm: str) -> None:
    """For contrasts and sets, too, and through post-norms."""
    made = decomposition(name)
    a, b, c = trace_of(name).logits().topk(3).indices.tolist()
    for target in (
        Target(ids=(a,), text="a"),
        Target(ids=(a, c), text="a"),
        Target(ids=(a,), against=(b, c), text="a"),
    ):
        found = score_all(made, target, ["increase"], norm)["increase"]
        for group, scores in zip(chosen_groups(made), found, strict=True):
            values = [Scored(group.units[i], group, i, 0.0) for i in range(0, len(group), 1 + len(group) // 3)]
            expected = increases(made, values, target, norm)
            assert [float(scores[v.index]) for v in values] == pytest.approx(expected, abs=1e-5)


def test_a_contrast_reads_its_own_tokens_alone() -> None:
    made = decomposition("llama")
    a, b = trace_of("llama").logits().topk(2).indices.tolist()
    found = score_all(made, Target(ids=(a,), against=(b,), text="a"), ["log-probability"], "frozen")["log-probability"]
    group = chosen_groups(made)[1]
    own = read("llama", group.vectors(torch.tensor([3]))[0], "frozen", alone=True)
    assert float(found[1][3]) == pytest.approx(float(own[a] - own[b]), abs=1e-7)


def test_probabilities_too_small_for_float32_are_told_apart() -> None:
    """p(w | x) of e^-200 and less: differences of probabilities still order units as their increases do."""
    model = zoo.build("llama").double()
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
    trace = mainstem.open(model).trace(zoo.prompt(9, seed=2)[0].tolist())
    logits = trace.logits().double()
    weak = int(logits.argmin())
    assert float(logits.log_softmax(-1)[weak]) < -200
    made = trace.decompose("neurons")
    found = score_all(
        made, Target(ids=(weak,), text="weak"), ["increase", "probability-increase"], kinds=["ffn_neuron"]
    )
    for increase, difference in zip(found["increase"], found["probability-increase"], strict=True):
        apart = increase.abs() < 5
        assert int(apart.sum()) > 50
        assert torch.equal(increase[apart].argsort(), difference[apart].argsort())
        assert ((increase > 0) == (difference > 0)).all() and float(difference.abs().max()) < 1e-45


# --- requests -----------------------------------------------------------------------------------------------


def test_the_rules_are_those_of_the_reports() -> None:
    assert {name for name, rule in RULES.items() if not rule.signed} == set(SIZES)


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda t: t.explain(score="directs"), ChoiceError, "direct"),
        (lambda t: t.explain(score="additive", norm="recompute"), UsageError, "frozen norm only"),
        (lambda t: t.explain(score="norm", negative=True), UsageError, "is a size"),
        (lambda t: t.explain(target="id:7", against="id:8", score="reciprocal-rank"), UsageError, "rivals"),
        (lambda t: t.explain(score="norm", top=0), UsageError, "at least 1"),
        (
            lambda t: t.explain(score="norm", kinds=["expert_neuron"]),
            UsageError,
            "It has: sublayer, head, .*ffn_neuron",
        ),
        (lambda t: t.scores(Target(ids=(7,)), ["norm"], kinds=["heads"]), ChoiceError, "head"),
        (lambda t: t.scores(Target(ids=(7,)), ["norm"]).top("increase", 3), ChoiceError, "norm"),
        (lambda t: t.scores(Target(ids=(7,)), ["norm"]).top("norm", 3, negative=True), UsageError, "is a size"),
        (lambda t: score_all(t.decompose(), Target(ids=(7,)), ["gradient"]), UsageError, "Trace.scores"),
        (lambda t: t.scores(Target(ids=(7,)), ["integrated-gradients"], steps=0), UsageError, "one step"),
    ],
)
def test_a_wrong_request_is_answered_with_what_to_do(
    ask, error: type[MainstemError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(error, match=words):
        ask(trace_of("llama"))


@pytest.mark.parametrize("score", RANKINGS)
def test_a_ranking_has_no_more_units_than_there_are(score: str) -> None:
    found = trace_of("llama").explain(score=score, kinds=["head"], top=10_000)
    sizes = trace_of("llama").model.anatomy.sizes
    n = sizes.n_layers * sizes.n_heads
    assert len(found.values) == found.search["units"] == n and found.search["kinds"] == {"head": n}
    listed = [value.score for value in found.values]
    assert listed == sorted(listed, reverse=True)


def test_a_model_without_attention_and_mlps_lists_its_sublayers() -> None:
    trace = mainstem.open(zoo.build("mamba")).trace(zoo.prompt(9, seed=2)[0].tolist())
    found = trace.explain(top=2)
    assert found.kinds == ["sublayer"] and {value.kind for value in found.values} == {"sublayer"}
    with pytest.raises(UsageError, match=r"no ffn neurons.*It has: sublayer\."):
        trace.explain(kinds=["ffn_neuron"])
    with pytest.raises(UsageError, match=r"no heads.*It has: sublayer\."):
        trace.explain(kinds=["head"], score="gradient")
    assert [value.score for value in trace.explain(score="gradient", top=2).values][0] > 0


def test_kinds_that_a_model_lacks_are_left_out_beside_others() -> None:
    found = trace_of("llama").explain(score="coefficient", kinds=["expert_neuron", "ffn_neuron"], top=3)
    assert list(found.search["kinds"]) == ["ffn_neuron"]


def test_a_target_beyond_the_first_thousand_has_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from mainstem.explain import explaining

    trace = trace_of("llama")
    weak = int(trace.logits().argmin())
    size = len(trace.logits())
    assert not trace.explain(target=f"id:{weak}", top=1).notes
    monkeypatch.setattr(explaining, "FAR", size - 1)
    assert f"{size:,}th choice of {size:,}" in trace.explain(target=f"id:{weak}", top=1).notes[0]


def test_nan_names_the_unit() -> None:
    made = decomposition("llama")
    broken = [torch.zeros(len(g)) for g in chosen_groups(made)]
    broken[1][5] = torch.nan
    with pytest.raises(NotFiniteError, match=str(chosen_groups(made)[1].units[5])):
        require_finite(chosen_groups(made), broken, "norm")
