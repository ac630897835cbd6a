"""Laws of discovery: what is found of a model is exact, its names are right, and the model is left as it was."""

import handmade
import pytest
import torch
import transformers
import zoo
from accounts import account
from tiny_models import arguments, discovered
from torch import nn

from mainstem.errors import ParallelStreamsError
from mainstem.model.anatomy import Anatomy
from mainstem.model.discovery import discover
from mainstem.run.capture import capture

transformers.logging.set_verbosity_error()

EXACT = [name for name in handmade.ALL if name not in handmade.REFUSED]


def addresses(name: str) -> list[str]:
    return [str(unit) for unit in discovered(name)[1].sublayers()]


# --- models that no library knows ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_a_model_that_no_library_knows_is_exact_at_every_level(name: str) -> None:
    found = account(handmade.ALL[name]())
    assert not found.failures
    assert not found.refused
    assert {"sublayers", "heads", "subvalues", "attention_neurons", "neurons", "units"} == found.exact


@pytest.mark.parametrize("name", sorted(handmade.REFUSED))
def test_parallel_streams_are_refused_by_name(name: str) -> None:
    with pytest.raises(ParallelStreamsError, match="2 parallel residual streams"):
        discover(handmade.ALL[name]())


@pytest.mark.parametrize("name", EXACT)
def test_blocks_are_named_in_the_order_of_execution(name: str) -> None:
    """The same addresses for all of them, however the blocks are held, called, shared or written out."""
    expected = ["embed", "embed.pos"]
    for layer in range(handmade.LAYERS):
        expected += [f"L{layer}.attn", f"L{layer}.mlp"]
    assert addresses(name) == expected


@pytest.mark.parametrize("name", EXACT)
def test_sizes_are_those_it_was_built_with(name: str) -> None:
    sizes = discovered(name)[1].sizes
    assert (sizes.n_layers, sizes.d_model, sizes.d_vocab) == (
        handmade.LAYERS,
        handmade.WIDTH,
        handmade.VOCABULARY,
    )
    assert (sizes.n_heads, sizes.d_head, sizes.d_mlp) == (handmade.HEADS, handmade.HEAD, handmade.HIDDEN)
    assert sizes.n_key_value_heads == (handmade.HEADS if name == "einsum_sinks" else handmade.GROUPS)


# --- names --------------------------------------------------------------------------------------------------

EMBEDDINGS = {
    "llama": ["embed"],
    "gpt2": ["embed", "embed.pos"],
    "opt": ["embed", "embed.pos"],
    "xglm": ["embed", "embed.pos"],
    "bert": ["embed", "embed.type", "embed.pos"],
    "roberta": ["embed", "embed.type", "embed.pos"],
    "roformer": ["embed", "embed.type"],
    "hrm_text": ["embed"],
    "blt": ["embed", *[f"embed{n}" for n in range(2, 8)]],
}


@pytest.mark.parametrize("family", EMBEDDINGS)
def test_embeddings_are_told_by_what_they_depend_on(family: str) -> None:
    found = [address for address in addresses(family) if address.startswith("embed")]
    assert found == EMBEDDINGS[family]


KINDS = {
    "llama": {"attn", "mlp"},
    "mamba": {"mixer"},
    "xlstm": {"mixer", "mlp"},
    "qwen3_next": {"attn", "mixer", "mlp"},
    "diffllama": {"attn", "mlp"},
    "jetmoe": {"attn", "mlp"},
    "gpt_neox_japanese": {"attn", "mlp"},
}


@pytest.mark.parametrize("family", KINDS)
def test_a_sublayer_is_what_it_does(family: str) -> None:
    units = discovered(family)[1].sublayers()
    assert {unit.place for unit in units if unit.layer is not None} == KINDS[family]


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "blt", "qwen2_moe", "inkling_text", "xmod"])
def test_writes_that_share_an_address_are_pieces_of_one_sublayer(family: str) -> None:
    """Pieces of one sublayer are in one block and, but for experts beside shared experts, in one module's call."""
    anatomy = discovered(family)[1]
    for unit in anatomy.sublayers():
        members = [anatomy.writes[i] for i in anatomy.writes_of(unit)]
        if len(members) > 1:
            assert any(write.experts is not None for write in members), str(unit)
            assert sum(write.experts is not None for write in members) == 1


# --- reads --------------------------------------------------------------------------------------------------

ROLES = {
    "llama": [["query"], ["key"], ["value"], ["gate"], ["up"]],
    "gemma2": [["query"], ["key"], ["value"], ["gate"], ["up"]],
    "gpt2": [["query", "key", "value"], ["up"]],
    "gpt_neox": [["query", "key", "value"], ["up"]],
    "phi3": [["query", "key", "value"], ["gate", "up"]],
    "plain": [["query"], ["key"], ["value"], ["gate"], ["up"]],
    "parallel": [["query"], ["key"], ["value"], ["gate"], ["up"]],
    "post_norm": [["query"], ["key"], ["value"], ["gate"], ["up"]],
}


@pytest.mark.parametrize("name", ROLES)
def test_reads_have_the_roles_of_their_matrices(name: str) -> None:
    anatomy = discovered(name)[1]
    for layer in range(anatomy.sizes.n_layers):
        found = [sorted(read.roles) for read in anatomy.reads if read.unit.layer == layer]
        assert sorted(found) == sorted(sorted(roles) for roles in ROLES[name])


@pytest.mark.parametrize(("family", "norms"), [("llama", 0), ("qwen3", 6), ("gemma3_text", 6), ("olmo2", 6)])
def test_query_and_key_norms_are_found(family: str, norms: int) -> None:
    reads = discovered(family)[1].reads
    assert sum(read.head_norm is not None for read in reads) == norms


def test_a_read_names_the_norm_that_it_is_read_through() -> None:
    model, anatomy = discovered("llama")
    layer = model.get_submodule("model.layers.1")
    assert isinstance(layer, nn.Module)
    for read in anatomy.reads:
        if read.unit.layer == 1:
            gain = layer.input_layernorm if read.unit.place == "attn" else layer.post_attention_layernorm
            assert read.norm is not None and read.norm.gain is not None
            assert read.norm.gain.data_ptr() == gain.weight.data_ptr()
            assert read.norm.eps == pytest.approx(gain.variance_epsilon)


# --- the model is left as it was ----------------------------------------------------------------------------


def _hooks(model: nn.Module) -> int:
    return sum(
        len(getattr(module, name)) for module in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")
    )


@pytest.mark.parametrize("name", ["llama", "plain", "mixtral"])
def test_no_hook_is_left(name: str) -> None:
    model, anatomy = discovered(name)
    capture(model, anatomy, zoo.prompt(), torch.tensor([[3]]), **arguments(name))
    assert _hooks(model) == 0


@pytest.mark.parametrize("call", ["discover", "capture"])
@pytest.mark.parametrize("where", ["model.layers.1.self_attn.o_proj", "model.layers.2.mlp", "lm_head"])
def test_no_hook_is_left_after_a_failure_at_any_place(call: str, where: str) -> None:
    model = zoo.build("llama")
    anatomy = discover(model, use_cache=False)

    def fail(*_: object) -> None:
        raise OSError("on purpose")

    handle = model.get_submodule(where).register_forward_hook(fail)
    with pytest.raises(OSError, match="on purpose"):
        if call == "discover":
            discover(model, use_cache=False)
        else:
            capture(model, anatomy, zoo.prompt(), torch.tensor([[3]]), use_cache=False)
    handle.remove()
    assert _hooks(model) == 0
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mixtral", "falcon", "bert"])
def test_a_captured_run_computes_the_same_bits(family: str, implementation: str) -> None:
    model, anatomy = discovered(family, implementation)
    ids = zoo.prompt(16, seed=3)
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        run = capture(model, anatomy, ids, torch.arange(16)[None], use_cache=False)
        after = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(run.logits, before)
    assert torch.equal(after, before)


def _summary(anatomy: Anatomy) -> list:
    writes = [(str(w.unit), str(w.site), str(w.source), w.module, sorted(w.refusals)) for w in anatomy.writes]
    reads = [(str(r.unit), r.roles, r.node, str(r.site)) for r in anatomy.reads]
    nodes = [type(node).__name__ for node in anatomy.graph.nodes]
    return [writes, reads, nodes, anatomy.spine, anatomy.sizes.__dict__, anatomy.causal, anatomy.tied]


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2", "mixed_back"])
def test_the_same_model_has_the_same_anatomy(name: str) -> None:
    model, anatomy = discovered(name)
    torch.manual_seed(torch.initial_seed() + 1)
    assert _summary(discover(model, **arguments(name))) == _summary(anatomy)


def test_weights_are_the_models_own() -> None:
    model, anatomy = discovered("llama")
    own = {parameter.data_ptr() for parameter in model.parameters()}
    for write in anatomy.writes:
        for factor in write.projection.factors if write.projection is not None else ():
            assert factor.data_ptr() in own
    assert all(read.weight.data_ptr() in own for read in anatomy.reads)
    assert anatomy.readout.unembedding.data_ptr() in own


@pytest.mark.parametrize(("family", "causal"), [("llama", True), ("mamba", True), ("bert", False)])
def test_causality_is_probed(family: str, causal: bool) -> None:
    assert discovered(family)[1].causal is causal
