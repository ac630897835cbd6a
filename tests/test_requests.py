"""Results are documents, and wrong requests are answered with what to do."""

import json
from functools import cache

import jaxtyping
import pytest
import torch
import zoo
from tiny_models import build

import mainstem
from mainstem.errors import (
    ChoiceError,
    MainstemError,
    MetricError,
    NotFiniteError,
    PositionError,
    PromptError,
    TokenError,
    UnitError,
    UsageError,
)
from mainstem.intervene import generating
from mainstem.intervene.attributing import PatchPair
from mainstem.read.describing import describe_anatomy
from mainstem.read.lens_reading import read_lens
from mainstem.report import as_json
from mainstem.session import Model
from mainstem.targets import Target

QUICK = {"llama", "gemma2"}
MODELS = ["llama", "gemma2", "mixtral", "gpt2", "bloom", "in_place", "shared_block", "attributes"]


@cache
def opened(name: str) -> Model:
    return mainstem.open(build(name))


def ids_of(length: int = 9, seed: int = 3) -> list[int]:
    return zoo.prompt(length, seed)[0].tolist()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_an_explanation_is_a_json_document(name: str) -> None:
    document = opened(name).explain(ids_of(), top=4).as_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["certificate"]["holds"]
    assert len(document["values"]) == 4
    assert sum(v for k, v in document["account"].items() if k != "total") == pytest.approx(document["account"]["total"])


def saturated() -> Model:
    """A model whose softcap is reached: logits are +-cap to the last bit, and no bound on what passes it is finite."""
    module = zoo.build("gemma2")
    with torch.no_grad():
        module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight * 1e4)
    return mainstem.open(module)


REQUESTS = [
    {},
    {"negative": True},
    {"norm": "recompute"},
    {"score": "additive"},
    {"score": "direct", "norm": "recompute"},
    {"target": "id:7", "against": "id:9"},
    {"kinds": ["head", "attention_neuron", "sublayer"], "exhaustive": True},
]


@pytest.mark.slow
def test_documents_are_finite_where_a_softcap_saturates() -> None:
    """JSON has no words for NaN and infinity, neither `as_dict` nor what `--format json` prints may need them."""
    model = saturated()
    trace = model.trace(ids_of())
    cap = model.anatomy.readout.softcap
    assert cap is not None and float(trace.logits().max()) == cap
    documents = [trace.explain(top=3, **request) for request in REQUESTS]
    assert all(row.bound is None for row in documents[0].values)
    documents += [read_lens(trace, ["id:7"], norm=norm) for norm in ("frozen", "recompute")]
    documents.append(describe_anatomy(model, ids_of()))
    for document in documents:
        plain = document.as_dict()
        assert json.loads(as_json(document)) == json.loads(json.dumps(plain, allow_nan=False))
    course = [state.course[0].before_softmax for state in documents[-2].states]
    assert max(abs(value) for value in course) > 10 * cap


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda m: m.trace([]), PromptError, "empty"),
        (lambda m: m.trace([5] * 200), PromptError, "200 tokens"),
        (lambda m: m.trace([5, 200]), TokenError, "200"),
        (lambda m: m.trace([5, -1]), TokenError, "-1"),
        (lambda m: m.trace("text"), PromptError, "without a tokenizer"),
        (lambda m: m.trace([5, 6], positions=(2,)), PositionError, "2"),
        (lambda m: m.trace([5, 6]).decompose("heads", -3), PositionError, "0 to 1"),
        (lambda m: m.trace([5, 6]).decompose("head"), ChoiceError, "heads"),
        (lambda m: m.trace([5, 6]).attribute(Target(ids=(7,)), score="directs"), ChoiceError, "direct"),
        (lambda m: m.trace([5, 6]).lens(norm="freeze"), ChoiceError, "frozen"),
        (lambda m: m.trace([5, 6]).explain(kinds=["heads"]), ChoiceError, "head"),
        (lambda m: m.trace([5, 6])["blocks.9.hook_resid_pre"], UnitError, "0 to 2"),
        (lambda m: m.trace([5, 6])["L9.attn"], UnitError, "L9.attn"),
        (lambda m: m.trace([5, 6])["hook_embed"], UnitError, "hook_embed"),
    ],
)
def test_a_wrong_request_is_answered_with_what_to_do(
    ask, error: type[MainstemError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # so that the answer is Mainstem's own
    with pytest.raises(error, match=words) as caught:
        ask(opened("llama"))
    assert caught.value.exit_code == 2
    assert str(caught.value).rstrip().endswith(".")


def test_a_run_that_turns_to_nan_names_the_layer() -> None:
    model = mainstem.open(zoo.build("llama"))
    _ = model.anatomy
    with torch.no_grad():
        model.module.model.layers[1].mlp.down_proj.weight[3, 5] = torch.nan
    with pytest.raises(NotFiniteError, match=r"L1\.mlp"):
        model.trace(ids_of())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.module.modules())


def test_tokens_are_named_by_id_where_there_is_no_tokenizer() -> None:
    model = opened("llama")
    assert model.tokenizer is None
    assert model.target("id:7") == Target(ids=(7,), text="id:7")
    made = model.target(["id:7", "id:8", "id:7"], against=["id:9", "id:3"])
    assert (made.ids, made.against, made.kind) == ((7, 8), (9, 3), "contrast")
    assert (made.text, made.against_texts) == ("id:7 | id:8", ("id:9", "id:3"))
    assert model.explain(ids_of(), target="id:7", against="id:9", top=1).against[0].token == "id:9"
    for text, against in ((" Paris", ()), ("id:7", "London"), (["id:7", "x"], ())):
        with pytest.raises(TokenError, match="without a tokenizer.*id:7042"):
            model.target(text, against)
    for wrong, words in (("id:200", "0 to 199"), ("id:x", "whole number"), ("", "empty")):
        with pytest.raises(TokenError, match=words):
            model.target(wrong)


def letters(seed: int = 3) -> list[list[int]]:
    """A prompt and one that differs in its second token."""
    clean = ids_of(6, seed)
    return [clean, [clean[0], (clean[1] + 1) % 50 + 3, *clean[2:]]]


NUMBERS = [
    (dict(count="3"), "The count is '3'. Give a whole number"),
    (dict(count=2.5), "The count is 2.5"),
    (dict(count=0), "0 tokens cannot be written"),
    (dict(temperature=float("nan")), "temperature of nan has no meaning"),
    (dict(temperature=float("inf")), "temperature of inf has no meaning"),
    (dict(temperature=-1), "temperature of -1 has no meaning"),
    (dict(temperature="warm"), "temperature of 'warm' has no meaning"),
]


@pytest.mark.parametrize(("options", "message"), NUMBERS)
def test_numbers_that_a_generation_cannot_be_made_with(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        opened("llama").generate(ids_of(), **options)


def test_at_a_temperature_next_to_none_the_likeliest_token_is_drawn() -> None:
    model = opened("llama")
    assert model.generate(ids_of(), 3, temperature=1e-320).ids == model.generate(ids_of(), 3).ids
    assert model.generate(ids_of(), 3.0).ids == model.generate(ids_of(), 3).ids  # a float that is whole


def test_several_prompts_where_one_is_wanted() -> None:
    model, (clean, corrupted) = opened("llama"), letters()
    for ask in (
        lambda: model.generate([clean, clean], 2),
        lambda: model.patch([clean, clean], [corrupted, corrupted], "id:7", "id:9"),
        lambda: model.patch_paths([clean, clean], [corrupted, corrupted], answers="id:7", metric="probability"),
        lambda: model.knock_out_attention([clean, clean]),
        lambda: model.edge_scores(PatchPair([clean, clean], corrupted, lambda z: z[:, 7])),
    ):
        with pytest.raises(PromptError, match="There are 2 prompts where one is wanted. Give them one at a time"):
            ask()


SWEEPS = [
    (dict(window=1.5, grid="mlp"), UsageError, "The window is 1.5"),
    (dict(memory="1GB"), UsageError, "The memory is '1GB'"),
    (dict(memory=float("nan")), UsageError, "The memory is nan"),
    (dict(position=1.5), UsageError, "The position is 1.5"),
    (dict(metric=None), MetricError, "None is no metric"),
    (dict(metric=lambda z: 1.0), MetricError, "gives float for logits.*number for each run"),
    (dict(metric=lambda z: z[:, 7].tolist()), MetricError, "gives list for"),
    (dict(metric=lambda z: z[:, 7].numpy()), MetricError, "gives ndarray for"),
    (dict(metric=lambda z: z[:, 7].sum()), MetricError, r"gives a tensor of shape \[\] for"),
    (dict(metric=lambda z: z[:, 7:8]), MetricError, r"gives a tensor of shape \[2, 1\] for"),
]


@pytest.mark.parametrize(("options", "error", "message"), SWEEPS)
def test_what_a_sweep_cannot_be_made_with(options: dict, error, message: str) -> None:
    with pytest.raises(error, match=message):
        opened("llama").patch(*letters(), "id:7", "id:9", **options)


def test_a_metric_of_ones_own_may_change_the_logits_it_gets() -> None:
    model = opened("llama")

    def spoiling(logits: torch.Tensor) -> torch.Tensor:
        found = logits[:, 7] - logits[:, 9]
        logits.zero_()
        return found

    own, named = (model.patch(*letters(), "id:7", "id:9", metric=metric) for metric in (spoiling, "logit-difference"))
    assert torch.allclose(own.values, named.values, atol=1e-5) and own.error == named.error
    assert own.metric.endswith("spoiling")


def test_one_text_stands_for_a_list_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened("llama")
    one, listed = (model.patch(*letters(), "id:7", "id:9", grid="neurons", units=u) for u in ("L1N1", ["L1N1"]))
    assert one.rows == listed.rows == ("L1N1",)
    monkeypatch.setattr(generating, "_likelihood", lambda model, ids, text, edits: text)
    assert model.compare(letters()[0], count=1, continuations=" Rome").continuations == [" Rome"]


def test_a_model_that_overflows_is_refused_with_the_module_and_what_to_do() -> None:
    module = zoo.build("llama", dtype=torch.float16)
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight.mul_(1e5)
    with pytest.raises(NotFiniteError, match=r"\(model\.layers\.1\.mlp\.down_proj\).*--dtype float32"):
        mainstem.open(module).explain(ids_of(), target="id:7")
