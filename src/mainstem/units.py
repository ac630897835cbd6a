"""A `Unit` is something that writes into the residual stream, and this module owns its address.

    embed  embed.pos  embed.type            the embeddings: of tokens, positions, token types
    L5.attn  L5.mlp  L5.mixer               a sublayer's whole write (mixer: any other kind)
    L5.attn2  L5.mlp2  embed2               the second of its kind in the block, in the order of execution
    <sublayer>.bias  <sublayer>.rounding    its added biases; the rounding of its addition to the stream
    norm.bias  unembed.bias                 of the final norm and of the unembedding
    L9H8                                    a head
    L9H8@3                                  a head reading source position 3: an attention subvalue
    L9H8.17  L9H8.17@3                      an attention neuron: entry 17 of the head's value; from one source
    L27N846                                 an FFN neuron: an FFN subvalue
    L12E3N40  L12S0N40                      a neuron of a routed expert; of a shared expert
    L5.attn2H8  L5.mlp2N846                 the same, in a second sublayer of its kind

L counts blocks in the order of execution, from 0, as all numbers do. The destination position is never part
of an address: it is a field of the result. Every unit has one address and every address is one unit:
`Unit.parse(str(unit)) == unit` and `str(Unit.parse(text)) == text`, so addresses can be compared as text.
Units sort by layer, then kind, then numbers; ties of a ranking are in that order.

Limits: an address says nothing about a model; whether L99H0 exists there is for the model to say.
"""

import re
from dataclasses import dataclass
from functools import total_ordering
from numbers import Integral
from typing import Literal, Self, cast, get_args

from mainstem.errors import ChoiceError, UnitError

UnitKind = Literal[
    "embedding",
    "sublayer",
    "bias",
    "rounding",
    "head",
    "attention_subvalue",
    "attention_neuron",
    "ffn_neuron",
    "expert_neuron",
]
"""The kinds of unit, in the order in which units of one layer are sorted."""

SublayerName = Literal["attn", "mlp", "mixer"]
EmbeddingName = Literal["pos", "type"]
Suffix = Literal["bias", "rounding"]

UNIT_KINDS: tuple[UnitKind, ...] = get_args(UnitKind)
SUBLAYER_NAMES: tuple[SublayerName, ...] = get_args(SublayerName)
EMBEDDING_NAMES: tuple[EmbeddingName, ...] = get_args(EmbeddingName)

# In the order of sorting. "norm" and "unembed" are places with a bias, and no units by themselves.
_PLACES = ("embed", "embed.pos", "embed.type", "attn", "mixer", "mlp", "norm", "unembed")
_MAX_NUMBER = 999_999_999  # a bound keeps a typing slip of a hundred digits from becoming an integer

_NUMBER = r"(?:0|[1-9][0-9]{0,8})"
_NTH = r"(?:[2-9]|[1-9][0-9]{1,8})"
_WHOLE = re.compile(
    rf"(?:L(?P<layer>{_NUMBER})\.(?P<sublayer>attn|mlp|mixer)|(?P<embed>embed(?:\.pos|\.type)?))"
    rf"(?P<nth>{_NTH})?(?:\.(?P<suffix>bias|rounding))?"
)
_FINAL_BIAS = re.compile(r"(?P<place>norm|unembed)\.bias")
_HEAD = re.compile(
    rf"L(?P<layer>{_NUMBER})(?:\.attn(?P<nth>{_NTH}))?"
    rf"H(?P<head>{_NUMBER})(?:\.(?P<neuron>{_NUMBER}))?(?:@(?P<source>{_NUMBER}))?"
)
_NEURON = re.compile(
    rf"L(?P<layer>{_NUMBER})(?:\.mlp(?P<nth>{_NTH}))?"
    rf"(?:E(?P<expert>{_NUMBER})|S(?P<shared>{_NUMBER}))?N(?P<neuron>{_NUMBER})"
)

# Words of other tools and of prose, for "did you mean".
_SHORT_WORDS = (
    ("attention", "attn"),
    ("ffn", "mlp"),
    ("embedding", "embed"),
    ("position", "pos"),
    ("layer", "l"),
    ("head", "h"),
    ("neuron", "n"),
    ("expert", "e"),
)


@total_ordering
@dataclass(frozen=True, slots=True)
class Unit:
    """Something that writes into the stream. Make one with a constructor below, or with `parse`.

    Attributes:
        place: What writes: "embed", "embed.pos", "embed.type", "attn", "mixer", "mlp", "norm" or "unembed".
        layer: The block, from 0; None outside the blocks.
        nth: 1 for the first sublayer of its kind in the block, 2 for the second, and so on.
        suffix: "bias" or "rounding" where the unit is that part of the write.
        head_index: The query head, from 0.
        source: The source position that the head reads from, from 0.
        neuron: The neuron: of the head's value, of the MLP, or of the expert.
        expert: The expert, routed or shared.
        shared: Whether `expert` counts shared experts, which every token passes through.

    Raises:
        UnitError: A number is negative, too large or not whole; a sublayer has no layer.
    """

    place: str
    layer: int | None = None
    nth: int = 1
    suffix: Suffix | None = None
    head_index: int | None = None
    source: int | None = None
    neuron: int | None = None
    expert: int | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        if self.place not in _PLACES or (self.place in SUBLAYER_NAMES) != (self.layer is not None):
            raise UnitError(f"There is no place {self.place!r} with layer {self.layer!r}")
        _check_number("nth", self.nth, least=1)
        for name in ("layer", "head_index", "source", "neuron", "expert"):
            number = getattr(self, name)
            if number is not None:
                _check_number(name, number, least=0)

    # --- constructors -------------------------------------------------------------------------------------

    @classmethod
    def embedding(cls, which: EmbeddingName | None = None, nth: int = 1) -> Self:
        """The token embedding, or that of positions ("pos") or token types ("type")."""
        if which is not None and which not in EMBEDDING_NAMES:
            raise ChoiceError("embedding", which, EMBEDDING_NAMES)
        return cls("embed" if which is None else f"embed.{which}", nth=nth)

    @classmethod
    def write(cls, layer: int, sublayer: SublayerName, nth: int = 1) -> Self:
        """The whole write of a sublayer; `nth` counts the block's sublayers of that kind from 1."""
        if sublayer not in SUBLAYER_NAMES:
            raise ChoiceError("sublayer", sublayer, SUBLAYER_NAMES)
        return cls(sublayer, layer, nth)

    @classmethod
    def head(cls, layer: int, head: int, nth: int = 1) -> Self:
        """A head: everything it writes, from all sources."""
        return cls("attn", layer, nth, head_index=head)

    @classmethod
    def subvalue(cls, layer: int, head: int, source: int, nth: int = 1) -> Self:
        """A head reading one source position."""
        return cls("attn", layer, nth, head_index=head, source=source)

    @classmethod
    def attention_neuron(cls, layer: int, head: int, neuron: int, source: int | None = None, nth: int = 1) -> Self:
        """One entry of a head's value, summed over sources, or from one source position."""
        return cls("attn", layer, nth, head_index=head, neuron=neuron, source=source)

    @classmethod
    def ffn_neuron(cls, layer: int, neuron: int, nth: int = 1) -> Self:
        """A neuron of a dense MLP."""
        return cls("mlp", layer, nth, neuron=neuron)

    @classmethod
    def expert_neuron(cls, layer: int, expert: int, neuron: int, nth: int = 1) -> Self:
        """A neuron of a routed expert."""
        return cls("mlp", layer, nth, neuron=neuron, expert=expert)

    @classmethod
    def shared_neuron(cls, layer: int, expert: int, neuron: int, nth: int = 1) -> Self:
        """A neuron of a shared expert."""
        return cls("mlp", layer, nth, neuron=neuron, expert=expert, shared=True)

    @classmethod
    def bias_of(cls, sublayer: "Unit | Literal['norm', 'unembed']") -> "Unit":
        """The added biases of a sublayer or an embedding, or of the final "norm" or the "unembed"."""
        return cls._suffixed(sublayer, "bias")

    @classmethod
    def rounding_of(cls, sublayer: "Unit") -> "Unit":
        """The rounding, in the model's dtype, of adding a sublayer's write to the stream."""
        return cls._suffixed(sublayer, "rounding")

    @classmethod
    def _suffixed(cls, owner: "Unit | str", suffix: Suffix) -> "Unit":
        if isinstance(owner, Unit):
            if owner.kind not in ("embedding", "sublayer"):
                raise UnitError(
                    f"There is no {suffix} of {owner}",
                    remedy=f"Give a whole sublayer, such as {owner.sublayer}.",
                )
            return cls(owner.place, owner.layer, owner.nth, suffix)
        if owner not in ("norm", "unembed") or suffix != "bias":
            raise UnitError(
                f"There is no {suffix} of {owner!r}",
                remedy='Give a sublayer\'s Unit, or, for a bias, "norm" or "unembed".',
            )
        return cls(owner, suffix=suffix)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The unit with this address; white space around it is ignored.

        Args:
            text: An address as the module's docstring lists them.

        Raises:
            UnitError: The text is no address; the message says what is wrong with it and gives examples.
        """
        address = text.strip()
        if match := _WHOLE.fullmatch(address):
            place = match["sublayer"] or match["embed"]
            suffix = cast("Suffix | None", match["suffix"])
            return cls(place, _int(match["layer"]), _int(match["nth"]) or 1, suffix)
        if match := _HEAD.fullmatch(address):
            head, source, neuron = (_int(match[name]) for name in ("head", "source", "neuron"))
            return cls("attn", _int(match["layer"]), _int(match["nth"]) or 1, None, head, source, neuron)
        if match := _NEURON.fullmatch(address):
            return cls(
                "mlp",
                _int(match["layer"]),
                _int(match["nth"]) or 1,
                neuron=_int(match["neuron"]),
                expert=_int(match["expert"] or match["shared"]),
                shared=match["shared"] is not None,
            )
        if match := _FINAL_BIAS.fullmatch(address):
            return cls(match["place"], suffix="bias")
        raise UnitError(f"{text!r} is not the address of a unit{_diagnosis(address)}")

    # --- what it is ---------------------------------------------------------------------------------------

    @property
    def kind(self) -> UnitKind:
        """What kind of unit this is. Neurons of shared experts count as "expert_neuron"."""
        if self.suffix is not None:
            return self.suffix
        if self.head_index is not None:
            if self.neuron is not None:
                return "attention_neuron"
            return "head" if self.source is None else "attention_subvalue"
        if self.neuron is not None:
            return "ffn_neuron" if self.expert is None else "expert_neuron"
        return "embedding" if self.layer is None else "sublayer"

    @property
    def sublayer(self) -> "Unit":
        """The whole sublayer or embedding that the unit is a part of; itself, if it is one.

        `norm.bias` and `unembed.bias` belong to no sublayer, and are their own.
        """
        if self.place in ("norm", "unembed"):
            return self
        return Unit(self.place, self.layer, self.nth)

    @property
    def sort_key(self) -> tuple[int, ...]:
        """Layer, then kind, then numbers: embeddings first, the final norm and the unembedding last."""
        final = self.place in ("norm", "unembed")
        stage = self.layer if self.layer is not None else _MAX_NUMBER + 1 if final else -1
        numbers = (self.head_index, self.shared, self.expert, self.neuron, self.source)
        return (
            stage,
            UNIT_KINDS.index(self.kind),
            _PLACES.index(self.place),
            self.nth,
            *(-1 if number is None else number for number in numbers),
        )

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Unit):
            return NotImplemented
        return self.sort_key < other.sort_key

    def __str__(self) -> str:
        nth = "" if self.nth == 1 else str(self.nth)
        if self.head_index is None and self.neuron is None:
            place = self.place if self.layer is None else f"L{self.layer}.{self.place}"
            return f"{place}{nth}" + (f".{self.suffix}" if self.suffix else "")
        # Only a second attention or MLP of a block has to be named before its heads and neurons.
        prefix = f"L{self.layer}" + (f".{self.place}{nth}" if nth else "")
        if self.head_index is None:
            letter = "S" if self.shared else "E"
            expert = "" if self.expert is None else f"{letter}{self.expert}"
            return f"{prefix}{expert}N{self.neuron}"
        neuron = "" if self.neuron is None else f".{self.neuron}"
        source = "" if self.source is None else f"@{self.source}"
        return f"{prefix}H{self.head_index}{neuron}{source}"


def _int(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def _check_number(name: str, number: object, least: int) -> None:
    if isinstance(number, Integral) and least <= int(number) <= _MAX_NUMBER:
        return
    raise UnitError(
        f"A unit's {name} cannot be {number!r}",
        remedy=f"Give a whole number from {least} to {_MAX_NUMBER}; addresses do not count from the end.",
    )


def _diagnosis(address: str) -> str:
    """What is wrong with a text that matched no form of address: ": ..." or nothing."""
    if not address:
        return ": it is empty"
    if "," in address or " " in address:
        return ": it holds a space or a comma; give one address at a time"
    fixed = _corrected(address)
    if fixed is not None:
        return f"; did you mean {fixed}?"
    if re.search(r"[0-9]{10,}", address):
        return ": a number in it is too large"
    if re.search(r"(?<![0-9])0[0-9]|-", address):
        return ": numbers count from 0, without leading zeros or signs"
    if address in ("norm", "unembed"):
        return f": only its bias is a part of its own, {address}.bias"
    if re.match(r"L[0-9]+$", address):
        return f": a layer is not a unit; its sublayers are, such as {address}.attn and {address}.mlp"
    if re.search(r"(?:attn|mlp|mixer|embed|pos|type)[01]\b", address):
        return ": the first sublayer of its kind has no number, the second has a 2"
    if re.match(r"L[0-9]+\.[0-9]+", address):
        return ": the head is missing between the layer and the neuron"
    if "@" in address and not re.search(r"H[0-9]", address):
        return ": only heads read a source position; the destination position is not part of an address"
    if re.match(r"[HNES][0-9]", address):
        return ": the layer is missing at the beginning"
    return ""


def _corrected(address: str) -> str | None:
    """The address that was probably meant: cases put right, long words made short."""
    text = address.lower()
    for word, short in _SHORT_WORDS:
        text = text.replace(word, short)
    text = re.sub(r"(?<![a-z])[lhnes](?=[0-9])", lambda letter: letter[0].upper(), text)
    forms = (_WHOLE, _FINAL_BIAS, _HEAD, _NEURON)
    return text if text != address and any(form.fullmatch(text) for form in forms) else None
