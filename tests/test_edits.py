"""Laws of edits: what nothing, everything, and an edit and its undoing do, on every family of tiny models."""

import pytest
import torch
import zoo
from torch import nn

import mainstem
from mainstem import Edit, Model, Unit
from mainstem.causal.edit_methods import Method
from mainstem.causal.edited import unedited
from mainstem.errors import (
    CertificateError,
    EditError,
    LevelRefusedError,
    NotFiniteError,
    PositionError,
    RunError,
    UnitError,
)
from mainstem.intervene.attributing import PatchPair
from mainstem.points import Point
from mainstem.run.inputs import CACHES

SOME = ("llama", "gpt2", "qwen3_moe")
"""A family with a gated MLP, one with biases and an embedding of positions, one with experts."""

FAMILIES = (
    *SOME,
    *(
        pytest.param(family, marks=pytest.mark.slow)
        for family in ("gpt_neox", "gemma2", "bloom", "gpt_oss", "mamba", "olmo2", "falcon", "bert", "bart", "xlstm")
    ),
)
LENGTH = 7


def opened(family: str, **options) -> Model:
    return mainstem.open(zoo.build(family, **options))


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    return zoo.prompt(length, seed)[0].tolist()


@torch.no_grad()
def logits(model: Model, ids: list[int], *edits: Edit) -> torch.Tensor:
    with model.edited(*edits):
        return zoo.logits(model.module, torch.tensor([ids]))[0]


def close(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-4) -> bool:
    return float((a - b).norm()) <= rtol * float(b.norm())


def hooks(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_no_edit_changes_nothing_to_the_bit(family: str) -> None:
    model = opened(family)
    before = zoo.logits(model.module, torch.tensor([prompt(0)]))[0]
    assert torch.equal(logits(model, prompt(0)), before)
    logits(model, prompt(0), Edit.zero("embed", 1))
    assert torch.equal(zoo.logits(model.module, torch.tensor([prompt(0)]))[0], before)
    assert hooks(model.module) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_all_writes_of_another_run_give_its_logits(family: str) -> None:
    model = opened(family)
    patches = [Edit.patch(Point("write", unit), prompt(2)) for unit in model.anatomy.sublayers()]
    assert close(logits(model, prompt(1), *patches), logits(model, prompt(2)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_state_of_the_stream_from_another_run_gives_its_logits(family: str) -> None:
    model = opened(family)
    other = logits(model, prompt(2))
    for layer in range(len(model.anatomy.blocks)):
        assert close(logits(model, prompt(1), Edit.patch(f"L{layer}.resid_pre", prompt(2))), other), layer
    assert close(logits(model, prompt(1), Edit.patch("resid_final", prompt(2))), other)
    last = len(model.anatomy.blocks) - 1
    assert close(logits(model, prompt(1), Edit.patch(f"blocks.{last}.hook_resid_post", prompt(2))), other)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_any_write_every_position_reads_the_same(family: str) -> None:
    """The unembedding of nothing: what norms' biases and the head's make of an empty stream."""
    model = opened(family)
    nothing = [Edit.zero(Point("write", unit)) for unit in model.anatomy.sublayers()]
    found = logits(model, prompt(1), *nothing)
    assert not close(found, logits(model, prompt(1)), 1e-2)
    assert close(found, found[:1].expand_as(found))
    assert close(found, logits(model, prompt(2), *nothing))


def identities(model: Model) -> list[str]:
    """A point of every kind that the model has."""
    found = ["L1.resid_pre", "resid_final", "norm"]
    for sublayer in ("L1.attn", "L1.mlp", "L1.mixer"):
        found += [sublayer, f"{sublayer}.input", f"{sublayer}.norm"]
    found += ["L1H1", "L1H1.0", "L1N2", "L1S0N1", *(f"L1H1.{what}" for what in ("query", "key", "value", "pattern"))]
    known = []
    for point in found:
        try:
            with model.edited(Edit.patch(point, prompt(1))):
                known.append(point)
        except (UnitError, LevelRefusedError):
            continue
    assert len(known) > 3
    return known


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_patched_with_itself_is_itself(family: str) -> None:
    model = opened(family)
    clean = logits(model, prompt(1))
    for point in identities(model):
        assert close(logits(model, prompt(1), Edit.patch(point, prompt(1))), clean, 1e-5), point


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_and_its_undoing(family: str) -> None:
    model = opened(family)
    clean = logits(model, prompt(1))
    for point in identities(model):
        if "norm" in point:
            continue
        doubled = logits(model, prompt(1), Edit.scale(point, 2.0))
        assert close(logits(model, prompt(1), Edit.scale(point, 2.0), Edit.scale(point, 0.5)), clean, 1e-5), point
        assert doubled.isfinite().all()


def test_edits_of_one_position_leave_earlier_ones_alone() -> None:
    model = opened("llama")
    clean = logits(model, prompt(1))
    for edit in (
        Edit.zero("L1.attn", 4),
        Edit.zero("L1H1", 4),
        Edit.knockout("L1H1", 2, 4),
        Edit.zero("L1H1.value", 4),
    ):
        found = logits(model, prompt(1), edit)
        assert torch.equal(found[:4], clean[:4]), edit.at
        assert not torch.equal(found[4:], clean[4:]), edit.at


def test_a_source_that_no_head_can_see_is_one_that_the_mask_hides() -> None:
    model = opened("llama", attn_implementation="sdpa")
    heads = [f"L{layer}H{head}" for layer in range(3) for head in range(model.anatomy.sizes.n_heads)]
    found = logits(model, prompt(1), *(Edit.knockout(head, 2, (3, 4, 5, 6)) for head in heads))
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().bool()
    mask[..., 3:, 2] = False
    with torch.no_grad():
        expected = model.module(input_ids=torch.tensor([prompt(1)]), attention_mask=mask, use_cache=False).logits[0]
    assert close(found, expected, 1e-5)
    assert not close(found, logits(model, prompt(1)), 1e-3)


def test_a_weight_of_a_pattern_zeroed_takes_its_subvalue_off_the_head() -> None:
    model = opened("llama")
    trace = model.trace(prompt(1))
    made = trace.decompose("subvalues")
    with model.edited(Edit.zero("L2H1@3", -1)):
        changed = model.trace(prompt(1)).write("L2.attn")[-1]
    difference = trace.write("L2.attn")[-1] - changed
    unit = Unit.parse("L2H1@3")
    ((group, place),) = [(group, place) for group in made.groups for place in group.places(unit)]
    torch.testing.assert_close(difference.double(), group.raw(torch.tensor([place]))[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ("qwen3_moe", "mixtral"))
def test_an_experts_neuron_zeroed_is_the_one_that_ablation_takes_out(family: str) -> None:
    from mainstem.causal.ablation import AblatedRuns
    from mainstem.causal.neuron_map import NeuronMap
    from mainstem.run.inputs import base_arguments

    model, ids = opened(family), prompt(1)
    units = [Unit.expert_neuron(1, expert, 1) for expert in range(4)]
    runs = AblatedRuns(model.module, model.anatomy, torch.tensor([ids]), LENGTH - 1, **base_arguments(model.module))
    expected = runs.logits([NeuronMap(model.anatomy).ablation(units)])[0]
    found = logits(model, ids, *(Edit.zero(str(unit), -1) for unit in units))[-1]
    assert close(found, expected, 1e-5)
    assert not close(found, logits(model, ids)[-1], 1e-6)


# --- batches, dtypes, gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", ("llama", "gpt2", "gemma2"))
def test_each_row_of_a_padded_batch_gets_what_it_gets_alone(family: str) -> None:
    model = opened(family)
    rows = [prompt(1), prompt(2, 5)]
    edits = [
        Edit.zero("L1H1", -2),
        Edit.scale("L0.mlp", 0.5, 1),
        Edit.knockout("L2H0", 1, -1),
        Edit.zero("L1H0.value", 2),
        Edit.add("L1.resid_pre", torch.ones(model.anatomy.sizes.d_model), 0.3, 0),
    ]
    inputs = model.inputs(rows)
    with torch.no_grad(), model.edited(*edits):
        together = model.module(input_ids=inputs.ids, **inputs.forward).logits[:, -1]
    for row, ids in enumerate(rows):
        assert close(together[row], logits(model, ids, *edits)[-1], 1e-4)


def test_an_edit_of_one_row() -> None:
    model = opened("llama", attn_implementation="sdpa")
    ids = torch.tensor([prompt(1), prompt(1)])
    with torch.no_grad(), model.edited(Edit.zero("L1.mlp", row=1), Edit.zero("L1H1.query", row=1)):
        found = zoo.logits(model.module, ids)
    assert close(found[0], logits(model, prompt(1)), 1e-5)
    assert close(found[1], logits(model, prompt(1), Edit.zero("L1.mlp"), Edit.zero("L1H1.query")), 1e-5)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = opened("llama", dtype=dtype, attn_implementation="sdpa")
    rtol = 1e-6 if dtype == torch.float64 else 5e-2
    for point in ("L1.resid_pre", "L1H1", "L1H1.query", "L1H1.pattern", "L1N2", "L1.attn.norm"):
        assert close(logits(model, prompt(1), Edit.patch(point, prompt(1))), logits(model, prompt(1)), rtol), point


def test_gradients_flow_through_an_edit() -> None:
    model = opened("gpt2", dtype=torch.float64)
    vector = torch.zeros(model.anatomy.sizes.d_model, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([prompt(1)])

    def score(added: torch.Tensor) -> torch.Tensor:
        with model.edited(Edit.add("L1.resid_pre", added, 1.0, -1)):
            return model.module(input_ids=ids, use_cache=False).logits[0, -1, 3]

    (slope,) = torch.autograd.grad(score(vector), vector)
    step = torch.randn(vector.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e-4
    with torch.no_grad():
        change = score(vector + step) - score(vector - step)
    torch.testing.assert_close(change, 2 * slope @ step, rtol=1e-3, atol=1e-9)


# --- values from other runs, subspaces ---------------------------------------------------------------------


def test_means_and_draws_are_those_of_the_other_run() -> None:
    model = opened("llama")
    writes = model.trace(prompt(3)).write("L1.mlp")
    with model.edited(Edit.mean("L1.mlp", prompt(3))):
        mean = model.trace(prompt(1)).write("L1.mlp")
    torch.testing.assert_close(mean, writes[1:].mean(0).expand_as(mean))
    drawn = []
    for seed in (0, 0, 1):
        with model.edited(Edit.resample("L1.mlp", prompt(3), seed)):
            drawn.append(model.trace(prompt(1)).write("L1.mlp"))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert all(any(torch.equal(row, write) for write in writes) for row in drawn[0])


def test_a_subspace_and_its_complement() -> None:
    model = opened("llama")
    width = model.anatomy.sizes.d_model
    axes = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    with model.edited(Edit.project_out("L1.mlp", axes)):
        left = model.trace(prompt(1)).write("L1.mlp")
    assert float((left @ axes.T).abs().max()) < 1e-4
    everything = torch.eye(width)
    found = logits(model, prompt(1), Edit.replace_in("L1.resid_pre", everything, prompt(2)))
    assert close(found, logits(model, prompt(2)), 1e-4)


def test_a_frozen_norm_makes_the_model_linear_after_it() -> None:
    model = opened("gpt2", dtype=torch.float64)
    vector = torch.randn(model.anatomy.sizes.d_model, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    frozen = Edit.freeze("norm", prompt(1))
    clean, once, twice = (
        logits(model, prompt(1), Edit.add("resid_final", vector, size), frozen)[-1] for size in (0.0, 1.0, 2.0)
    )
    torch.testing.assert_close(twice - clean, 2 * (once - clean), rtol=1e-6, atol=1e-9)


# --- contexts ------------------------------------------------------------------------------------------------


OTHER = [5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (Edit.scale("L1H1.query", 2.0), Edit.scale("L1H1.query", 0.7)),
        (Edit.knockout("L1H1", 2), Edit.scale("L1H1.value", 0.5, 4)),
        (Edit.freeze("norm", OTHER), Edit.scale("resid_final", 4.0)),
        (Edit.freeze("L1.attn.norm", OTHER), Edit.scale("L1.attn.input", 2.0)),
    ],
    ids=lambda edit: str(edit.at),
)
def test_nested_contexts_are_one_list_of_edits(outer: Edit, inner: Edit) -> None:
    model = opened("llama", attn_implementation="sdpa")
    with model.edited(outer):
        nested = logits(model, prompt(1), inner)
    assert torch.equal(nested, logits(model, prompt(1), outer, inner))
    assert not close(nested, logits(model, prompt(1), outer), 1e-6)


def test_a_frozen_scale_and_what_is_read_after_it() -> None:
    model = opened("llama")
    edits = [Edit.freeze("L1.attn.norm", OTHER), Edit.patch("L1.attn.input", prompt(1))]
    assert close(logits(model, prompt(1), *edits), logits(model, prompt(1)), 1e-6)


def test_a_generation_inside_a_context_is_made_under_its_edits() -> None:
    model = opened("llama")
    vector = torch.randn(model.anatomy.sizes.d_model, generator=torch.Generator().manual_seed(0))
    edits = [Edit.add("L1.resid_pre", vector, 3.0, "generated"), Edit.scale("embed", 3.0, -1)]
    made = model.generate(prompt(1), 4, *edits)
    with model.edited(*edits):
        inside = model.generate(prompt(1), 4)
    assert inside.ids == made.ids and inside.cached and made.cached
    assert made.ids != model.generate(prompt(1), 4).ids


@pytest.mark.parametrize("family", ("qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)))
def test_edits_of_experts_neurons_compose(family: str) -> None:
    model = opened(family)

    def scaled(factor: float) -> list[Edit]:
        return [Edit.scale(f"L1E{expert}N1", factor) for expert in range(4)]

    clean = logits(model, prompt(1))
    assert close(logits(model, prompt(1), *scaled(2.0), *scaled(0.5)), clean, 1e-6)
    assert close(logits(model, prompt(1), *scaled(2.0), *scaled(2.0)), logits(model, prompt(1), *scaled(4.0)), 1e-5)
    none = logits(model, prompt(1), Edit.scale("L1.mlp", 0.0))
    assert close(logits(model, prompt(1), *scaled(5.0), Edit.scale("L1.mlp", 0.0)), none, 1e-6)
    with model.edited(*scaled(2.0), Edit.scale("L0.mlp", 0.5)):
        assert model.trace(prompt(1)).decompose("sublayers").certificate.holds


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_knockout_leaves_a_sink_its_share(dtype: torch.dtype) -> None:
    model = opened("gpt_oss", dtype=dtype)
    clean, eps = logits(model, prompt(1)).float(), torch.finfo(dtype).eps
    nobody = logits(model, prompt(1), Edit.knockout("L1H0", 99)).float()
    assert close(nobody, clean, eps)
    if dtype == torch.float32:
        assert not close(logits(model, prompt(1), Edit.knockout("L1H0", 2)), clean, 1e-3)


def test_grouped_heads_are_edited_while_rows_are_padded_and_cached() -> None:
    model = opened("llama", attn_implementation="sdpa")
    rows, token = [prompt(1), prompt(2, 5)], 3
    edits = [Edit.scale("L1H1.value", -4.0), Edit.knockout("L2H0", 1)]
    inputs = model.inputs(rows)
    mask = inputs.forward["attention_mask"]
    with torch.no_grad(), model.edited(*edits):
        first = model.module(input_ids=inputs.ids, use_cache=True, attention_mask=mask)
        name = next(name for name in CACHES if getattr(first, name, None) is not None)
        longer = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        known = {name: getattr(first, name), "attention_mask": longer, "use_cache": True}
        second = model.module(input_ids=torch.tensor([[token], [token]]), **known)
    for row, ids in enumerate(rows):
        alone = logits(model, [*ids, token], *edits)[-1]
        assert close(second.logits[row, -1], alone, 1e-4), row


def test_dependent_axes_span_what_they_span() -> None:
    model = opened("llama")
    one = torch.randn(1, model.anatomy.sizes.d_model, generator=torch.Generator().manual_seed(0))
    found = logits(model, prompt(1), Edit.project_out("L1.mlp", one.repeat(2, 1)))
    assert close(found, logits(model, prompt(1), Edit.project_out("L1.mlp", one)), 1e-6)


def test_nested_contexts_and_exceptions() -> None:
    model = opened("llama", attn_implementation="sdpa")
    clean = logits(model, prompt(1))
    with model.edited(Edit.scale("L1.mlp", 2.0)):
        outer = zoo.logits(model.module, torch.tensor([prompt(1)]))[0]
        inner = logits(model, prompt(1), Edit.scale("L1.mlp", 0.5))
        assert torch.equal(zoo.logits(model.module, torch.tensor([prompt(1)]))[0], outer)
    assert close(inner, clean, 1e-5) and not close(outer, clean, 1e-3)
    with pytest.raises(ZeroDivisionError), model.edited(Edit.zero("L1H1.query")):
        zoo.logits(model.module, torch.tensor([prompt(1)]))
        raise ZeroDivisionError
    assert torch.equal(logits(model, prompt(1)), clean) and hooks(model.module) == 0 and model.edits == ()


def test_edits_hold_again_after_the_model_itself_was_run() -> None:
    model = opened("llama", attn_implementation="sdpa")
    edits = [Edit.scale("L1.mlp", 2.0), Edit.scale("L1H1.query", 2.0)]
    clean, alone = logits(model, prompt(1)), logits(model, prompt(1), edits[0])
    changed = logits(model, prompt(1), *edits)
    with model.edited(*edits):
        with unedited(model.module):
            assert torch.equal(logits(model, prompt(1)), clean) and model.edits == ()
            assert torch.equal(logits(model, prompt(1), edits[0]), alone)
        assert torch.equal(logits(model, prompt(1)), changed) and model.edits == tuple(edits)
    assert torch.equal(logits(model, prompt(1)), clean) and hooks(model.module) == 0


def test_keys_and_values_are_not_lost_where_later_positions_attend_to_them() -> None:
    model = opened("llama", attn_implementation="sdpa")
    none = [Edit.zero("L1H1", 4)]
    for early in ("L1H1.value", "L1H1.key", "L1.attn.input"):
        both = logits(model, prompt(1), Edit.scale(early, 2.0, 3), *none)
        assert not close(both, logits(model, prompt(1), *none), 1e-6), early
    with pytest.raises(EditError, match="would be lost"):
        logits(model, prompt(1), Edit.scale("L1H1.value", 2.0, 3), Edit.zero("L1H1"))


def test_a_trace_belongs_to_its_edits() -> None:
    model = opened("llama")
    before = model.trace(prompt(1))
    with model.edited(Edit.zero("L1H1")):
        trace = model.trace(prompt(1), positions=(-1, 2))
        assert trace.decompose("heads").certificate.holds
        assert model.labels.holds
        with pytest.raises(RunError, match="edits"):
            before.logits(3)
    trace.logits(2)
    with pytest.raises(RunError, match="edits"):
        trace.logits(3)
    with model.edited(Edit.zero("L1.mlp")), pytest.raises(CertificateError, match="under edits of L1.mlp"):
        model.trace(prompt(1)).decompose("neurons")
    with pytest.raises(RunError, match="edits"), model.edited(Edit.patch("L1.mlp", trace)):
        pass


# --- generation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_generation_under_edits_is_the_same_with_a_cache(family: str) -> None:
    model = opened(family)
    heads = [write for write in model.anatomy.writes if write.attention is not None]
    head = [Edit.scale(f"L{write.unit.layer}H1", 0.5) for write in heads[:1]]
    head += [Edit.knockout(f"L{write.unit.layer}H0", 1) for write in heads[-1:]]
    size = model.anatomy.sizes.d_model
    edits = [Edit.add("L1.resid_pre", torch.ones(size), 0.5, "generated"), Edit.scale("embed", 1.5, -2), *head]
    made = model.generate(prompt(1), 5, *edits)
    assert made.difference is None or made.difference < 1e-3
    assert (made.difference is not None) == model.anatomy.causal and len(made.ids) == len(made.log_probabilities) <= 5
    ids = prompt(1)
    for token in made.ids:  # the law itself: one pass for each token
        with torch.no_grad(), model.edited(*edits, prompt=LENGTH):
            log_p = zoo.logits(model.module, torch.tensor([ids]))[0, -1].double().log_softmax(-1)
        assert int(log_p.argmax()) == token
        ids = [*ids, token]


def test_two_texts_side_by_side() -> None:
    model = opened("llama")
    compared = model.compare(prompt(1), Edit.zero("L1.mlp"), count=4)
    assert compared.edits == ["zero L1.mlp"] and compared.plain.ids == model.generate(prompt(1), 4).ids
    assert compared.same == next(
        (i for i, (a, b) in enumerate(zip(compared.plain.ids, compared.edited.ids, strict=True)) if a != b), 4
    )
    drawn = [model.generate(prompt(1), 6, temperature=2.0).ids for _ in range(2)]
    assert drawn[0] == drawn[1]


# --- what is refused ------------------------------------------------------------------------------------------


REFUSED = [
    ("L9.mlp", UnitError, "no sublayer"),
    ("L9H0", UnitError, "no unit"),
    ("L1H99", UnitError, "no head L1H99"),
    ("L9.resid_pre", UnitError, "no block 9"),
    ("L1.mlp.rounding", UnitError, "can be read, and not edited"),
    ("norm.bias", UnitError, "can be read, and not edited"),
    ("L1.mlp.query", UnitError, "Only a head"),
    ("L1H1.0@2", UnitError, "by itself"),
    ("L1E0N0", UnitError, "no neuron"),
    ("nonsense", UnitError, "not the address"),
]


@pytest.mark.parametrize(("point", "error", "message"), REFUSED)
def test_points_that_cannot_be_edited(point: str, error, message: str) -> None:
    model = opened("llama")
    with pytest.raises(error, match=message):
        logits(model, prompt(1), Edit.zero(point))


def test_edits_that_cannot_be_made() -> None:
    model = opened("llama")
    width = model.anatomy.sizes.d_model
    with pytest.raises(EditError, match=f"3 entries cannot be added.*Give one of {width}"):
        logits(model, prompt(1), Edit.add("L1.mlp", torch.ones(3)))
    with pytest.raises(EditError, match="span nothing here"):
        logits(model, prompt(1), Edit.project_out("L1.mlp", torch.ones(3)))
    with pytest.raises(EditError, match="mean over nothing"):
        logits(model, prompt(1), Edit.mean("L1.mlp", prompt(1)[:1]))
    with pytest.raises(EditError, match="would be lost"):
        logits(model, prompt(1), Edit.zero("L1.mlp"), Edit.patch("L1.mlp", prompt(2)))
    with pytest.raises(EditError, match="would be lost"):
        logits(model, prompt(1), Edit.scale("L1H1", 2.0), Edit.zero("L1.attn"))
    logits(model, prompt(1), Edit.zero("L1.mlp", 1), Edit.patch("L1.mlp", prompt(2), 2))
    logits(model, prompt(1), Edit.zero("L1.mlp"), Edit.scale("L1.mlp", 2.0))
    with pytest.raises(EditError, match="zeroed, scaled, frozen or knocked out"):
        logits(model, prompt(1), Edit.add("L1H1.pattern", torch.ones(1)))
    with pytest.raises(EditError, match="is frozen, and nothing else"):
        logits(model, prompt(1), Edit.zero("L1.attn.norm"))
    with pytest.raises(EditError, match="Only heads attend"):
        Edit.knockout("L1.mlp", 2)
    with pytest.raises(EditError, match="Only patterns and norms"):
        Edit.freeze("L1.mlp", prompt(1))
    for wrong in ("Prompt", "3", [1.7], 1.5, []):
        with pytest.raises(PositionError, match="names no positions"):
            Edit.zero("L1.mlp", wrong)  # type: ignore[arg-type]
    for early, late in (("L1H1.value", "L1H1"), ("L1H1.pattern", "L1.attn"), ("L1H1@2", "L1H1")):
        with pytest.raises(EditError, match="would be lost"):
            logits(model, prompt(1), Edit.scale(early, 2.0), Edit.patch(late, prompt(2)))
        with pytest.raises(EditError, match="would be lost"), model.edited(Edit.patch(late, prompt(2))):
            logits(model, prompt(1), Edit.scale(early, 2.0))
    with pytest.raises(EditError, match="Give the knockout first"):
        logits(model, prompt(1), Edit.scale("L1H1.pattern", 2.0), Edit.knockout("L1H1", 2))
    with pytest.raises(EditError, match="needs that run"):
        Edit.patch("L1.mlp", None)
    with pytest.raises(EditError, match="span no subspace"):
        logits(model, prompt(1), Edit.project_out("L1.mlp", torch.zeros(width)))
    with pytest.raises(EditError, match="no row 5"):
        logits(model, prompt(1), Edit.zero("L1.mlp", row=5))
    with pytest.raises(EditError, match="source has no row 4"):
        logits(model, prompt(1), Edit.patch("L1.mlp", prompt(2), source_row=4))
    with pytest.raises(EditError, match="is no edit"), model.edited("L1H1"):  # type: ignore[arg-type]
        pass
    mask = torch.tensor([[1] * 5 + [0] * 2])
    with pytest.raises(EditError, match="more than padding on the left"), model.edited(Edit.zero("L1.mlp")):
        model.module(input_ids=torch.tensor([prompt(1)]), attention_mask=mask)
    with pytest.raises(PositionError, match="outside the prompt"):
        logits(model, prompt(1), Edit.zero("L1.mlp", -20))
    with pytest.raises(PositionError, match="other run has no position 6"):
        logits(model, prompt(1), Edit.patch("L1.mlp", prompt(2, 5)))
    for edit in (Edit.zero("L1.mlp", 20), Edit.knockout("L1H1", (1, 20)), Edit.zero("L1H1@20")):
        with pytest.warns(UserWarning, match=r"changed nothing at \[20\]"):
            logits(model, prompt(1), edit)
    assert hooks(model.module) == 0


def test_nan_after_an_edit_names_the_layer() -> None:
    model = opened("llama")
    with pytest.raises(NotFiniteError, match="L1.*the edits that hold"):
        model.generate(prompt(1), 3, Edit.add("L1.resid_pre", torch.full((model.anatomy.sizes.d_model,), torch.inf)))
    assert hooks(model.module) == 0


RERUNS = {
    "patch": lambda m, t: m.patch(prompt(1), prompt(2), "id:7", "id:9"),
    "patch_paths": lambda m, t: m.patch_paths(prompt(1), prompt(2), answers="id:7", metric="probability"),
    "knock_out_attention": lambda m, t: m.knock_out_attention(prompt(1)),
    "causal_trace": lambda m, t: m.causal_trace(prompt(1), prompt(2)),
    "learn_subspace": lambda m, t: m.learn_subspace("L1.mlp", [(prompt(1), prompt(2), 7)]),
    "attribution_patching": lambda m, t: m.attribution_patching(PatchPair(prompt(1), prompt(2), lambda z: z[:, 7])),
    "circuit": lambda m, t: m.circuit(PatchPair(prompt(1), prompt(2), lambda z: z[:, 7]), 3),
    "verify": lambda m, t: t.verify(m.target("id:7")),
    "repair": lambda m, t: t.repair(["L1.mlp"]),
    "gradient": lambda m, t: t.scores(m.target("id:7"), ["gradient"]),
    "check_queries": lambda m, t: t.check_queries("L1N1"),
}


@pytest.mark.parametrize("rerun", RERUNS.values(), ids=RERUNS)
def test_what_makes_batches_of_its_own_refuses_edits_of_one_row(rerun) -> None:
    model = opened("llama")
    with (
        model.edited(Edit.scale("embed", 1.5, row=0)),
        pytest.raises(EditError, match="embed holds for row 0 .*for every row: leave out `row`"),
    ):
        rerun(model, model.trace(prompt(1)))


def test_an_edit_that_fails_is_not_said_to_be_the_models_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Method):
        def new(self, at, width, values):
            return lambda old, places: old @ old  # of sizes that do not fit

    model = opened("llama")
    broken = Edit.of("L1.mlp", Broken())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.generate(prompt(1), 2, broken)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), model.edited(broken):
        model.generate(prompt(1), 2)
    forward = type(model.module).forward

    def without_a_cache(self, *args, use_cache=False, **kwargs):
        if use_cache:
            raise KeyError("no cache")
        return forward(self, *args, use_cache=use_cache, **kwargs)

    monkeypatch.setattr(type(model.module), "forward", without_a_cache)
    note = model.generate(prompt(1), 2, Edit.scale("L1.mlp", 0.5)).note
    assert note is not None and note.startswith("the model fails with its own cache: KeyError")


@pytest.mark.parametrize("kind", ["write", "resid_pre", "input", "query", "norm"])
def test_addresses_of_points(kind: str) -> None:
    text = {
        "write": "L1.mlp",
        "resid_pre": "L3.resid_pre",
        "input": "L2.attn.input",
        "query": "L2H1.query",
        "norm": "norm",
    }
    point = Point.parse(text[kind])
    assert point.kind == kind and str(point) == text[kind] and Point.parse(f" {point} ") == point
    assert Point.parse("blocks.3.hook_resid_pre") == Point.parse("L3.resid_pre")
    assert Point.parse("blocks.3.hook_attn_out") == Point.parse("L3.attn")
