"""A rotated copy computes what its model does, for every family, or the model is refused with the place named."""

import copy
from collections import Counter
from dataclasses import replace

import handmade
import pytest
import torch
import transformers
import zoo
from accounts import account
from torch import nn
from zoo_sizes import UNBUILDABLE

from mainstem.analysis.rotations import rotation
from mainstem.causal.rotated import Rotated, check, difference, rotated
from mainstem.causal.stream_points import stream_points
from mainstem.errors import AnatomyError, CertificateError, RefusedError
from mainstem.model.discovery import discover
from mainstem.model.equivariance import BLIND, Reflections
from mainstem.model.program import Program
from mainstem.model.turning import Turning
from mainstem.model.turning_search import find_turning
from mainstem.run.inputs import base_arguments

transformers.logging.set_verbosity_error()

EXACT = 1e-9
QUICK = ["llama", "gpt2", "gemma", "mixtral", "gpt_oss", "bloom", "bert", "mamba", "falcon", "longcat_flash"]
"""One of each kind of structure: tied, with biases, with gains of 1 + g, experts, post-norms, mixers, parallel."""

REFUSED = {
    "axk2": "own basis by mul",
    "cpmant": "43 positions for 11 tokens",
    "deepseek_v4": "parallel residual streams",
    "gemma3n_text": "parallel residual streams",
    "hy_v4": "parallel residual streams",
    "inkling2_loop_text": "parallel residual streams",
    "inkling2_text": "parallel residual streams",
    "inkling_text": "own basis by conv1d",
    "prophetnet": "parallel residual streams",
    "qwen4_exp": "parallel residual streams",
    "qwen4_exp_text": "parallel residual streams",
    "reformer": "parallel residual streams",
    "zamba": "own basis by concatenate",
    "zamba2": "own basis by concatenate",
}
"""What is not rotated, and why: several streams, or reads that act on each dimension by itself."""

LEAST = {"folded": 125, "at run time": 50}
"""How many families are rotated in their weights alone, and how many with places turned at run time."""


def _turning(model: nn.Module) -> Turning:
    return find_turning(model, **base_arguments(model))


def _rotation(turning: Turning, seed: int = 1) -> torch.Tensor:
    return rotation("random", turning.d_model, seed, turning.centred)


def _rotated(model: nn.Module, turning: Turning | None = None, dtype: torch.dtype | None = torch.float64) -> Rotated:
    turning = turning or _turning(model)
    return rotated(model, turning, _rotation(turning), dtype)


def _off(model: nn.Module, turning: Turning | None = None) -> float:
    return difference(copy.deepcopy(model).double(), _rotated(model, turning), zoo.prompt())


def _check(family: str) -> str:
    """How the family is rotated; fails where its copy computes something else."""
    try:
        model = zoo.build(family)
    except zoo.NotBuilt as error:
        pytest.skip(str(error))
    if family in REFUSED:
        with pytest.raises(AnatomyError, match=REFUSED[family]):
            _turning(model)
        return "refused"
    turning = _turning(model)
    assert _off(model, turning) <= EXACT
    return "at run time" if turning.brackets else "folded"


@pytest.mark.parametrize("family", QUICK)
def test_a_rotated_family_gives_the_same_logits(family: str) -> None:
    _check(family)


@pytest.mark.slow
def test_every_family_gives_the_same_logits_or_is_refused_with_its_place() -> None:
    found = Counter(_check(family) for family in zoo.families() if family not in UNBUILDABLE)
    assert found["refused"] == len(REFUSED)
    assert not {kind: found[kind] for kind, least in LEAST.items() if found[kind] < least}


@pytest.mark.parametrize("name", sorted(handmade.ALL))
def test_models_made_by_hand_give_the_same_logits(name: str) -> None:
    model = handmade.ALL[name]()
    if name in handmade.REFUSED:
        with pytest.raises(AnatomyError, match="parallel"):
            _turning(model)
    else:
        assert _off(model) <= EXACT


def test_the_model_is_left_as_it_was_and_no_hook_stays() -> None:
    model = zoo.build("gemma2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = zoo.prompt()
    plain = zoo.logits(model, ids)
    made = _rotated(model)
    made.logits(ids)
    assert torch.equal(zoo.logits(model, ids), plain)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for each in (model, made.model) for m in each.modules()]
    assert not any(hooks)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_the_copy_has_the_same_anatomy_and_its_certificates_hold(family: str) -> None:
    model = zoo.build(family)
    own, other = account(model, use_cache=False), account(_rotated(model, dtype=None).model, use_cache=False)
    assert not other.failures and own.exact == other.exact
    for a, b in zip(own.anatomy.writes, other.anatomy.writes, strict=True):
        assert (a.unit, a.site, a.module) == (b.unit, b.site, b.module)
    assert [(r.unit, r.roles, r.module) for r in own.anatomy.reads] == [
        (r.unit, r.roles, r.module) for r in other.anatomy.reads
    ]


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
def test_gains_are_one_in_the_copy_whatever_form_their_parameter_has(family: str) -> None:
    anatomy = discover(_rotated(zoo.build(family), dtype=None).model, use_cache=False)
    norms = [read.norm for read in anatomy.reads] + [anatomy.readout.norm]
    assert norms and all(norm is not None and norm.gain is None for norm in norms)


def test_the_stream_of_the_copy_is_the_rotated_one() -> None:
    model = zoo.build("llama")
    turning = _turning(model)
    turned = _rotation(turning)
    made = rotated(model, turning, turned)
    plain, other = (m.model.embed_tokens.weight for m in (model, made.model))
    torch.testing.assert_close(other, (plain.double() @ turned.T).float())


def test_a_tied_embedding_becomes_two_where_a_gain_is_folded_into_one_of_them() -> None:
    model = zoo.build("gemma", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    made = _rotated(model, dtype=None)
    assert [str(place) for place in made.untied] == ["lm_head.weight"]
    assert made.model.lm_head.weight is not made.model.model.embed_tokens.weight
    assert model.lm_head.weight is model.model.embed_tokens.weight


# --- mistakes are noticed ---

SHAPES = {
    "gpt2": [
        "wte.weight",
        "wpe.weight",
        "ln_1.bias",
        "ln_f.bias",
        "attn.c_attn.weight",
        "c_proj.bias",
        "lm_head.weight",
    ],
    "mixtral": ["embed_tokens.weight", "down_proj", "gate_up_proj", "gate.weight", "o_proj.weight"],
}


@pytest.mark.parametrize("family, suffix", [(family, suffix) for family, own in SHAPES.items() for suffix in own])
def test_a_tensor_that_is_forgotten_is_noticed(family: str, suffix: str) -> None:
    model = zoo.build(family)
    turning = _turning(model)
    number = next(i for i, turn in enumerate(turning.turns) if str(turn.place).endswith(suffix))
    wrong = replace(turning, turns=turning.turns[:number] + turning.turns[number + 1 :])
    with pytest.raises(CertificateError, match="in float64"):
        _checked(model, wrong)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_gain_that_is_forgotten_is_noticed(family: str) -> None:
    """Left as it is, or set to one without being folded."""
    model = zoo.build(family)
    turning = _turning(model)
    with pytest.raises(CertificateError):
        _checked(model, replace(turning, gains=turning.gains[1:]))
    unfolded = tuple(replace(turn, gains=()) if turn.gains == (turning.gains[1],) else turn for turn in turning.turns)
    with pytest.raises(CertificateError):
        _checked(model, replace(turning, turns=unfolded))


def test_a_gain_that_is_not_bracketed_is_noticed_with_the_place() -> None:
    model = zoo.build("gemma2")
    turning = _turning(model)
    with pytest.raises(CertificateError, match=r"L1\.attn"):
        _checked(model, replace(turning, brackets=turning.brackets[:2] + turning.brackets[3:]))


def test_the_transpose_in_one_place_is_noticed() -> None:
    model = zoo.build("llama")
    turning = _turning(model)
    turned = _rotation(turning)
    made = rotated(model, turning, turned, torch.float64)
    with torch.no_grad():
        weight = made.model.model.layers[1].mlp.down_proj.weight
        weight.copy_(turned.T @ turned.T @ weight)  # R^T W where R W should be
    points = stream_points(discover(model, use_cache=False), "stream")
    with pytest.raises(CertificateError, match=r"L1\.mlp"):
        check(copy.deepcopy(model).double(), made, zoo.prompt(), points)


def _checked(model: nn.Module, turning: Turning) -> float:
    points = stream_points(discover(model, **base_arguments(model)), "stream")
    return check(copy.deepcopy(model).double(), _rotated(model, turning), zoo.prompt(), points)


# --- refusals ---


def test_layer_norm_needs_a_rotation_that_keeps_the_ones() -> None:
    model = zoo.build("gpt2")
    turning = _turning(model)
    assert turning.centred
    with pytest.raises(RefusedError, match="vector of ones"):
        rotated(model, turning, rotation("random", turning.d_model))
    assert not _turning(zoo.build("llama")).centred


def test_a_rotation_of_another_size_is_refused() -> None:
    model = zoo.build("llama")
    with pytest.raises(RefusedError, match="the stream has 64"):
        rotated(model, _turning(model), rotation("random", 63))


def test_a_bias_over_a_gain_of_zero_is_refused_with_its_norm() -> None:
    model = zoo.build("gpt2")
    with torch.no_grad():
        model.transformer.h[1].ln_2.weight[5] = 0
    with pytest.raises(RefusedError, match=r"0 at dimension 5.*h\.1\.ln_2"):
        _rotated(model)


def test_a_gain_of_zero_without_a_bias_is_folded() -> None:
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[5] = 0
    assert _off(model) <= EXACT


class _Unchosen(nn.Module):
    """The plain model, with a second MLP that only a token beyond the recorded ones would use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = handmade.ALL["plain"]()
        self.inner.blocks.append(copy.deepcopy(self.inner.blocks[0]))
        self.inner.eval()

    def forward(self, input_ids, **kwargs):
        return self.inner(input_ids, **kwargs)


def test_what_the_recorded_tokens_do_not_use_is_refused() -> None:
    model = _Unchosen().eval()
    spare = model.inner.blocks[-1]
    model.inner.run = lambda x, mask: _run_but_last(model.inner, x, mask)
    with pytest.raises(RefusedError, match=r"inner\.blocks\.3"):
        _turning(model)
    assert spare is model.inner.blocks[-1]


def _run_but_last(inner: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    for block in list(inner.blocks)[:-1]:
        x = block(x, mask)
    return x


# --- what is asked of an operation ---


def _program(function, half: bool = False) -> Program:
    from mainstem.model.program import Slot

    return Program((0,), ((function, (Slot(0),), {}, ((0, 1),)),), 1, half)


@pytest.mark.parametrize(
    "function, answer",
    [
        (lambda x: 3 * x.view(2, 5, 1, 8), -1),
        (lambda x: x.transpose(1, 2), -2),
        (lambda x: x * x.pow(2).mean(-1, keepdim=True).rsqrt(), -1),
        (lambda x: x.pow(2).sum(-1), BLIND),
        (lambda x: x.relu(), None),
        (lambda x: x.pow(2), None),
        (lambda x: x * torch.linspace(1, 1.001, 8, dtype=x.dtype), None),
        (lambda x: x.flip(-1), None),
    ],
)
def test_an_operation_turns_is_blind_or_neither(function, answer) -> None:
    reflections = Reflections(8)
    assert reflections.turns(_program(function), [(torch.zeros(2, 5, 8), -1)]) == answer
    assert not reflections.centred


def test_taking_the_mean_away_turns_with_reflections_that_keep_the_ones() -> None:
    reflections = Reflections(8)
    centring = _program(lambda x: x - x.mean(-1, keepdim=True))
    assert reflections.turns(centring, [(torch.zeros(2, 5, 8), -1)]) == -1
    assert reflections.centred
