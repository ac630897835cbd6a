"""The laboratory's decoder: it is what its options say, and the rest of Mainstem understands it without help."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import mainstem
from mainstem.errors import ChoiceError, PromptError, UsageError
from mainstem.lab.decoder import Decoder, decoder
from mainstem.lab.decoder_attention import smeared
from mainstem.lab.decoder_config import DecoderConfig
from mainstem.weights.circuit_reading import circuits_of

SMALL = {"vocab_size": 60, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_positions": 32, "initializer_range": 0.15}

OPTIONS = [
    {"norm": "rms_single", "d_mlp": 48, "positions": "rotary"},
    {"norm": "none", "positions": "sinusoidal"},
    {"norm": "rms", "positions": "none"},
    {"smeared_keys": True, "d_mlp": 48},
    {"smeared_keys": True, "positions": "rotary", "norm": "none"},
    {"attention": "softmax_1", "gated_attention": True, "d_mlp": 48},
    {"attention": "clipped", "gamma": -0.03, "positions": "rotary"},
    {"rotation": "independent", "d_mlp": 48, "norm": "rms_single", "positions": "sinusoidal"},
    {"tied_embeddings": True, "rotation": "shared", "gated_attention": True, "smeared_keys": True},
]
"""Every value of every option, each with others."""


def made(seed: int = 0, **options) -> Decoder:
    """A tiny decoder whose gains, biases and smears are not those of the start."""
    model = decoder(DecoderConfig(**(SMALL | options)), seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.3
    return model


def some_ids(batch: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(1, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: Decoder, ids: torch.Tensor, **arguments) -> torch.Tensor:
    """What the model predicts."""
    return model(ids, **arguments).logits


def same(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two results differ by rounding alone."""
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


@pytest.fixture(params=OPTIONS, ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()))
def options(request) -> dict:
    """One combination."""
    return request.param


def test_mainstem_opens_what_was_saved(options, tmp_path):
    model, ids = made(**options), some_ids()
    model.save_pretrained(tmp_path)
    opened = mainstem.open(tmp_path)
    assert torch.equal(logits(opened.module, ids), logits(model, ids))
    assert opened.loaded.name == tmp_path.name


def test_its_account_is_certified_without_any_code_for_it(options):
    model = mainstem.open(made(**options))
    trace = model.trace([3, 7, 9, 12, 7, 9, 30])
    sizes = model.anatomy.sizes
    assert (sizes.n_layers, sizes.d_model, sizes.n_heads, sizes.d_head) == (2, 32, 4, 8)
    assert sizes.d_mlp == options.get("d_mlp")
    assert model.anatomy.causal
    for level in ("sublayers", "heads", "subvalues", "attention_neurons", "neurons"):
        assert not model.anatomy.refusals(level)
        assert trace.decompose(level).certificate.holds
    certificate = trace.explain().certificate
    assert certificate.holds
    assert certificate.labels.holds and certificate.labels.checked
    assert certificate.reads.holds and certificate.reads.checked


def test_paths_of_heads_add_up_to_the_logits():
    model, ids = mainstem.open(made(norm="none")), [3, 7, 9, 12, 7, 9, 30]
    trace = model.trace(ids)
    expansion = trace.path_expansion()
    assert same(sum(expansion.orders()).float(), logits(model.module, torch.tensor([ids]))[0])


def test_weights_depend_on_the_seed_alone():
    ids = some_ids()
    torch.manual_seed(5)
    first = logits(decoder(DecoderConfig(**SMALL), 3), ids)
    torch.randn(7)
    before = torch.random.get_rng_state()
    assert torch.equal(logits(decoder(DecoderConfig(**SMALL), 3), ids), first)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(logits(decoder(DecoderConfig(**SMALL), 4), ids), first)


def test_the_start_is_that_of_gpt2():
    model = decoder(DecoderConfig(d_model=128, n_layers=4, d_mlp=512, vocab_size=500))
    for name, parameter in model.named_parameters():
        if name.endswith("write.weight"):
            assert float(parameter.detach().std()) == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
        elif parameter.dim() == 2:
            assert float(parameter.detach().std()) == pytest.approx(0.02, rel=0.05)
    sinusoidal = decoder(DecoderConfig(positions="sinusoidal"))
    assert float(sinusoidal.positions.weight.detach().pow(2).mean().sqrt()) == pytest.approx(0.02, rel=1e-4)
    assert not sinusoidal.positions.weight.requires_grad


def test_every_trained_parameter_gets_a_gradient(options):
    model = made(**options).train()
    ids = some_ids()
    F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.any(), name


def test_later_tokens_change_nothing_before_them(options):
    model, ids = made(**options), some_ids()
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 7) % SMALL["vocab_size"]
    assert same(logits(model, changed)[:, :5], logits(model, ids)[:, :5])
    assert not same(logits(model, changed)[:, 5:], logits(model, ids)[:, 5:])


def test_a_cache_changes_nothing(options):
    model, ids = made(**options), some_ids(length=12)
    first = model(ids[:, :5], use_cache=True)
    second = model(ids[:, 5:6], cache=first.cache)
    third = model(ids[:, 6:], cache=second.cache)
    in_pieces = torch.cat([first.logits, second.logits, third.logits], 1)
    assert same(in_pieces, logits(model, ids))
    assert third.cache.get_seq_length() == 12


def test_generation_is_the_same_with_and_without_a_cache_and_with_padding(options):
    model, ids = made(**options), some_ids(1, 6)
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    continued = model.generate(ids, use_cache=True, **arguments)
    assert continued.shape == (1, 14)
    assert torch.equal(model.generate(ids, use_cache=False, **arguments), continued)
    padded, mask = F.pad(ids, (3, 0)), F.pad(torch.ones_like(ids), (3, 0))
    assert torch.equal(model.generate(padded, attention_mask=mask, use_cache=True, **arguments)[:, 3:], continued)


def test_padding_on_either_side_changes_nothing(options):
    model, ids = made(**options), some_ids(1, 6)
    alone = logits(model, ids)
    for left, right in ((4, 0), (0, 4), (2, 2)):
        padded, mask = F.pad(ids, (left, right), value=9), F.pad(torch.ones_like(ids), (left, right))
        beside = torch.cat([padded, some_ids(1, 10, seed=1)])
        both = logits(model, beside, attention_mask=torch.cat([mask, torch.ones_like(mask)]))
        assert both.isfinite().all()
        assert same(both[:1, left : left + 6], alone)
        assert same(both[1:], logits(model, beside[1:]))


@settings(max_examples=12)
@given(kind=st.sampled_from(["layer", "rms", "rms_single", "none"]), seed=st.integers(0, 50))
def test_a_shared_rotation_turns_the_stream_and_changes_no_prediction(kind, seed):
    chosen = {"norm": kind, "d_mlp": 48, "seed": seed}
    plain, turned = made(**chosen), made(rotation="shared", rotation_seed=seed, **chosen)
    ids = some_ids(1)
    assert same(logits(turned, ids), logits(plain, ids), 1e-4)
    rotation = turned.embed.rotation
    assert same(turned.embed(ids), plain.embed(ids) @ rotation)
    assert same(turned.blocks[0].mlp.read.computation_basis(plain.embed(ids) @ rotation),
                plain.blocks[0].mlp.read.computation_basis(plain.embed(ids)), 1e-4)  # fmt: skip


def test_independent_rotations_that_the_weights_undo_change_no_prediction():
    plain, turned = made(d_mlp=48, norm="rms_single"), made(d_mlp=48, norm="rms_single", rotation="independent")
    places = [module for module in turned.modules() if getattr(module, "rotation", None) is not None]
    drawn = {place.rotation.numpy().tobytes() for place in places}
    assert len(drawn) == len(places) - 1  # tokens and positions are written by one
    for place in places:
        write = hasattr(place, "weight") and place.weight.shape[0] == 32 and place.weight.shape[1] != 32
        place.weight.data = place.rotation @ place.weight.data if write else place.weight.data @ place.rotation.T
    for block in turned.blocks:  # square: which side writes is not told by the shape
        own = block.attention.write
        own.weight.data = own.rotation @ (own.weight.data @ own.rotation)
    assert same(logits(turned, some_ids()), logits(plain, some_ids()), 1e-4)


def test_circuits_between_tokens_are_those_without_a_rotation():
    plain, turned = (mainstem.open(made(norm="rms_single", rotation=kind)) for kind in ("none", "shared"))
    for head in ("L0H1", "L1H3"):
        here, there = circuits_of(plain, head), circuits_of(turned, head)
        for own, other in ((here.qk, there.qk), (here.ov, there.ov)):
            assert same(other.rows @ other.columns.mT, own.rows @ own.columns.mT)


@pytest.mark.parametrize("kind", ["shared", "independent"])
def test_rotations_are_orthogonal_and_keep_the_ones(kind):
    model = made(rotation=kind, d_mlp=48)
    for module in model.modules():
        rotation = getattr(module, "rotation", None)
        if rotation is not None:
            assert same(rotation @ rotation.T, torch.eye(32))
            assert same(rotation.sum(1), torch.ones(32))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_keys_smeared_with_none_of_the_one_before_are_plain(positions):
    plain, mixed = made(positions=positions), made(positions=positions, smeared_keys=True)
    mixed.load_state_dict(plain.state_dict(), strict=False)
    for block in mixed.blocks:
        block.attention.smear.data.fill_(40.0)
    assert same(logits(mixed, some_ids()), logits(plain, some_ids()))
    for block in mixed.blocks:
        block.attention.smear.data.fill_(0.0)
    assert not same(logits(mixed, some_ids()), logits(plain, some_ids()), 1e-3)


def test_a_head_with_smeared_keys_alone_sees_the_key_before():
    model = made(smeared_keys=True, n_layers=1, positions="rotary", norm="none")
    attention = model.blocks[0].attention
    attention.smear.data.fill_(-40.0)  # all of the one before
    ids = some_ids(1, 6)
    key = torch.randn(1, 4, 6, 8)
    moved = smeared(key, attention.smear.sigmoid(), model.context(ids, None, None))
    assert same(moved[:, :, 1:], key[:, :, :-1]) and same(moved[:, :, 0], key[:, :, 0])


def test_softmax_1_is_softmax_where_scores_are_large_and_nothing_where_they_are_small():
    attention = made(attention="softmax_1").blocks[0].attention
    reference = made().blocks[0].attention
    query, key, value = torch.randn(3, 1, 4, 5, 8).unbind(0)
    large = query.abs() + 30, key.abs() + 30
    assert same(attention.mixed(*large, value, None), reference.mixed(*large, value, None))
    opposed = query.abs() + 30, -key.abs() - 30
    assert attention.mixed(*opposed, value, None).abs().max() < 1e-6


def test_clipped_attention_is_softmax_at_gamma_0_and_can_be_exactly_nothing():
    plain, clipped = made(), made(attention="clipped", gamma=0.0)
    assert same(logits(clipped, some_ids()), logits(plain, some_ids()))
    attention = made(attention="clipped", gamma=-0.5).blocks[0].attention
    zeros, value = torch.zeros(1, 4, 6, 8), torch.randn(1, 4, 6, 8)
    mixed = attention.mixed(zeros, zeros, value, None)
    assert not mixed[:, :, 2:].any()  # a third each, or less: 1.5 / 3 - 0.5 = 0
    assert same(mixed[:, :, 0], value[:, :, 0])


def test_heads_are_gated_by_what_the_attention_reads():
    model = made(gated_attention=True, n_layers=1)
    read = model.blocks[0].attention.read
    read.weight.data[-4:] = 0
    half, plain = logits(model, some_ids()), made(n_layers=1)
    plain.load_state_dict(
        {k: v[:96] if k.endswith("attention.read.weight") else v for k, v in model.state_dict().items()}
    )
    plain.blocks[0].attention.write.weight.data *= 0.5
    assert same(half, logits(plain, some_ids()))


def test_what_stands_in_a_configuration_comes_back(tmp_path):
    config = DecoderConfig(**SMALL, d_mlp=48, attention="clipped", gamma=-0.1, rotation="shared", rotation_seed=4)
    config.save_pretrained(tmp_path)
    again = DecoderConfig.from_pretrained(tmp_path)
    assert {k: getattr(again, k) for k in ("d_model", "gamma", "rotation", "rotation_seed", "d_mlp")} == {
        "d_model": 32,
        "gamma": -0.1,
        "rotation": "shared",
        "rotation_seed": 4,
        "d_mlp": 48,
    }


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"norm": "batch"}, ChoiceError, "rms_single"),
        ({"attention": "softmax1"}, ChoiceError, "softmax_1"),
        ({"d_modell": 3}, ChoiceError, "d_model"),
        ({"d_model": 30}, UsageError, "multiple of 4"),
        ({"d_model": 36, "positions": "rotary"}, UsageError, "even"),
        ({"attention": "clipped"}, UsageError, "gamma"),
        ({"attention": "clipped", "gamma": 0.1}, UsageError, "gamma"),
        ({"gamma": -0.1}, UsageError, "Leave it out"),
        ({"n_layers": 0}, UsageError, "from 1"),
        ({"d_mlp": 0}, UsageError, "from 1"),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_remedy(options, error, says):
    with pytest.raises(error, match=says):
        decoder(DecoderConfig(**(SMALL | options)))


def test_a_prompt_longer_than_the_context_is_refused():
    with pytest.raises(PromptError, match="32"):
        made()(some_ids(1, 33))


def test_a_rotated_copy_predicts_the_same():
    for options in ({"d_mlp": 48}, {"rotation": "shared", "norm": "rms_single"}):
        model = mainstem.open(made(**options))
        turned = model.basis.rotated("random").model
        assert same(logits(turned, some_ids()), logits(model.module, some_ids()), 1e-4)
