"""Addresses: every unit has one, and every address is one unit."""

import pickle
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.errors import ChoiceError, UnitError
from mainstem.units import EMBEDDING_NAMES, SUBLAYER_NAMES, UNIT_KINDS, Unit

numbers = st.integers(0, 999_999_999)
nths = st.integers(1, 9) | st.integers(1, 999_999_999)
wholes = st.one_of(
    st.builds(Unit.embedding, st.sampled_from([None, *EMBEDDING_NAMES]), nths),
    st.builds(Unit.write, numbers, st.sampled_from(SUBLAYER_NAMES), nths),
)
units = st.one_of(
    wholes,
    st.builds(Unit.bias_of, wholes | st.sampled_from(["norm", "unembed"])),
    st.builds(Unit.rounding_of, wholes),
    st.builds(Unit.head, numbers, numbers, nths),
    st.builds(Unit.subvalue, numbers, numbers, numbers, nths),
    st.builds(Unit.attention_neuron, numbers, numbers, numbers, st.none() | numbers, nths),
    st.builds(Unit.ffn_neuron, numbers, numbers, nths),
    st.builds(Unit.expert_neuron, numbers, numbers, numbers, nths),
    st.builds(Unit.shared_neuron, numbers, numbers, numbers, nths),
)

EXAMPLES = {
    "embed": (Unit.embedding(), "embedding"),
    "embed.pos": (Unit.embedding("pos"), "embedding"),
    "embed.type": (Unit.embedding("type"), "embedding"),
    "embed2": (Unit.embedding(nth=2), "embedding"),
    "L5.attn": (Unit.write(5, "attn"), "sublayer"),
    "L5.mlp": (Unit.write(5, "mlp"), "sublayer"),
    "L5.mixer": (Unit.write(5, "mixer"), "sublayer"),
    "L5.attn2": (Unit.write(5, "attn", 2), "sublayer"),
    "L5.mlp12": (Unit.write(5, "mlp", 12), "sublayer"),
    "embed.bias": (Unit.bias_of(Unit.embedding()), "bias"),
    "L0.attn.bias": (Unit.bias_of(Unit.write(0, "attn")), "bias"),
    "L5.mlp2.rounding": (Unit.rounding_of(Unit.write(5, "mlp", 2)), "rounding"),
    "embed.rounding": (Unit.rounding_of(Unit.embedding()), "rounding"),
    "norm.bias": (Unit.bias_of("norm"), "bias"),
    "unembed.bias": (Unit.bias_of("unembed"), "bias"),
    "L9H8": (Unit.head(9, 8), "head"),
    "L9H8@3": (Unit.subvalue(9, 8, 3), "attention_subvalue"),
    "L9H8.17": (Unit.attention_neuron(9, 8, 17), "attention_neuron"),
    "L9H8.17@3": (Unit.attention_neuron(9, 8, 17, source=3), "attention_neuron"),
    "L9.attn2H8@0": (Unit.subvalue(9, 8, 0, nth=2), "attention_subvalue"),
    "L27N846": (Unit.ffn_neuron(27, 846), "ffn_neuron"),
    "L27.mlp2N846": (Unit.ffn_neuron(27, 846, nth=2), "ffn_neuron"),
    "L12E3N40": (Unit.expert_neuron(12, 3, 40), "expert_neuron"),
    "L12S0N40": (Unit.shared_neuron(12, 0, 40), "expert_neuron"),
}


@settings(deadline=None)
@given(units)
def test_parsing_undoes_printing(unit):
    assert Unit.parse(str(unit)) == unit


@settings(deadline=None)
@given(units, units)
def test_an_address_is_one_unit(one, other):
    assert (str(one) == str(other)) == (one == other)
    assert (one.sort_key == other.sort_key) == (one == other)
    assert (one < other) + (other < one) + (one == other) == 1


@settings(deadline=None)
@given(units)
def test_kind_and_sublayer_of_any_unit(unit):
    assert unit.kind in UNIT_KINDS
    assert unit.sublayer.sublayer == unit.sublayer
    assert unit.sublayer.layer == unit.layer
    if unit.place not in ("norm", "unembed"):
        assert unit.sublayer.kind in ("embedding", "sublayer")


@settings(deadline=None, max_examples=300)
@given(st.text("LHNES.@0123456789-,amtlpixer b", max_size=14))
def test_what_parses_prints_as_it_was(text):
    try:
        unit = Unit.parse(text)
    except UnitError as error:
        assert repr(text) in str(error)
        assert str(error).endswith(UnitError.default_remedy)
    else:
        assert str(unit) == text.strip()


@pytest.mark.parametrize(("address", "unit", "kind"), [(a, *pair) for a, pair in EXAMPLES.items()])
def test_addresses(address, unit, kind):
    assert Unit.parse(address) == unit == Unit.parse(f" {address}\n")
    assert str(unit) == address
    assert unit.kind == kind
    assert pickle.loads(pickle.dumps(unit)) == unit


@pytest.mark.parametrize(
    ("address", "sublayer"),
    [
        ("L9H8.17@3", "L9.attn"),
        ("L9.attn2H8", "L9.attn2"),
        ("L12S0N40", "L12.mlp"),
        ("L5.mixer.bias", "L5.mixer"),
        ("L5.mlp2.rounding", "L5.mlp2"),
        ("embed.pos.bias", "embed.pos"),
        ("L5.attn", "L5.attn"),
        ("norm.bias", "norm.bias"),
    ],
)
def test_the_sublayer_a_unit_belongs_to(address, sublayer):
    assert str(Unit.parse(address).sublayer) == sublayer


def test_units_sort_by_layer_then_kind_then_numbers():
    in_order = [
        "embed embed.pos embed.type embed.bias embed.rounding",
        "L2.attn L2.attn2 L2.mixer L2.mlp L2.attn.bias L2.mlp.bias L2.attn.rounding",
        "L2H0 L2H3 L2H10 L2.attn2H0 L2H3@2 L2H3@10 L2H3.0 L2H3.0@1 L2H3.5",
        "L2N7 L2N30 L2E1N4 L2E2N0 L2S0N9",
        "L10.attn norm.bias unembed.bias",
    ]
    addresses = " ".join(in_order).split()
    shuffled = sorted(addresses)
    assert [str(unit) for unit in sorted(map(Unit.parse, shuffled))] == addresses


def test_units_are_hashable_and_cannot_change():
    assert {Unit.head(1, 2): "x"}[Unit.parse("L1H2")] == "x"
    with pytest.raises(FrozenInstanceError):
        Unit.head(1, 2).layer = 3  # pyright: ignore


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("l9h8", "did you mean L9H8?"),
        ("L5.attention", "did you mean L5.attn?"),
        ("layer5.MLP.bias", "did you mean L5.mlp.bias?"),
        ("L9H8, L9H7", "one address at a time"),
        ("L9H08", "without leading zeros or signs"),
        ("L9H-1", "without leading zeros or signs"),
        ("L9N99999999999", "a number in it is too large"),
        ("L5", "its sublayers are, such as L5.attn and L5.mlp"),
        ("L5.mlp1", "the first sublayer of its kind has no number"),
        ("L9.17", "the head is missing"),
        ("L27N846@3", "the destination position is not part of an address"),
        ("H8@3", "the layer is missing"),
        ("norm", "only its bias is a part of its own, norm.bias"),
        ("blocks.5.hook_resid_post", "'blocks.5.hook_resid_post' is not the address of a unit."),
    ],
)
def test_what_is_wrong_with_an_address(text, message):
    with pytest.raises(UnitError) as caught:
        Unit.parse(text)
    assert message in str(caught.value)
    assert "L9H8@3" in str(caught.value)  # examples


def test_constructors_refuse_what_has_no_address():
    with pytest.raises(UnitError, match="layer cannot be -1.*do not count from the end"):
        Unit.head(-1, 0)
    with pytest.raises(UnitError, match="nth cannot be 0"):
        Unit.write(0, "mlp", nth=0)
    with pytest.raises(UnitError, match=r"neuron cannot be 2\.5"):
        Unit.ffn_neuron(0, 2.5)  # pyright: ignore
    with pytest.raises(ChoiceError, match=r"Unknown sublayer 'att'\. Did you mean 'attn'\?"):
        Unit.write(0, "att")  # pyright: ignore
    with pytest.raises(ChoiceError, match="Unknown embedding 'rotary'"):
        Unit.embedding("rotary")  # pyright: ignore
    with pytest.raises(UnitError, match=r"There is no bias of L9H8\. Give a whole sublayer, such as L9\.attn\."):
        Unit.bias_of(Unit.head(9, 8))
    with pytest.raises(UnitError, match="There is no bias of 'mlp'"):
        Unit.bias_of("mlp")  # pyright: ignore
    with pytest.raises(UnitError, match="no place 'attn' with layer None"):
        Unit("attn")
