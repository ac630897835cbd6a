"""A `Point` is a place of a run where a value can be edited, and this module owns its address.

    L5.mlp  L9H8  L9H8.17  L27N846  L12E3N40  embed    what a unit writes, or is: the addresses of `mainstem.units`
    L9H8@3                                             the weight of a pattern, at one source position
    L5.resid_pre  L5.resid_mid  L5.resid_post          the stream before a block, after its attention, after it
    resid_final                                        the stream before the final norm
    L5.attn.input  L5.mlp.input                        what a sublayer reads, after its norm
    L5.attn.norm  L5.mlp.norm  norm                    the scale of that norm; of the final norm
    L9H8.query  L9H8.key  L9H8.value                   what attention receives for one head, rotated
    L9H8.pattern                                       the weights that a head gives to source positions

Hook-style names are accepted when reading: `blocks.5.hook_resid_pre`, `blocks.5.hook_resid_mid`,
`blocks.5.hook_resid_post`, `blocks.5.hook_attn_out`, `blocks.5.hook_mlp_out`.
"""

import re
from dataclasses import dataclass
from typing import Literal, Self, get_args

from mainstem.errors import UnitError
from mainstem.units import Unit

PointKind = Literal[
    "write", "resid_pre", "resid_mid", "resid_post", "resid_final", "input", "norm", "query", "key", "value", "pattern"
]
StreamKind = Literal["resid_pre", "resid_mid", "resid_post"]
HeadKind = Literal["query", "key", "value", "pattern"]

_STREAM = re.compile(r"L(?P<layer>0|[1-9][0-9]{0,8})\.(?P<kind>resid_(?:pre|mid|post))")
_PART = re.compile(r"(?P<unit>.+)\.(?P<kind>input|norm|query|key|value|pattern)")
_HOOK = re.compile(
    r"blocks\.(?P<layer>0|[1-9][0-9]{0,8})\.hook_(?:(?P<stream>resid_(?:pre|mid|post))|(?P<sublayer>attn|mlp)_out)"
)
_EXAMPLES = "Points are units (L5.mlp, L9H8, L27N846) and L5.resid_pre, L5.attn.input, L9H8.query, L9H8.pattern."


@dataclass(frozen=True)
class Point:
    """A place of a run.

    Attributes:
        kind: what is there.
        unit: the unit that writes, reads or attends; None for the stream and the final norm.
        layer: the block, for a value of the stream.
    """

    kind: PointKind
    unit: Unit | None = None
    layer: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """The point with this address; white space around it is ignored.

        Raises:
            UnitError: the text is no address of a point.
        """
        address = text.strip()
        if match := _HOOK.fullmatch(address):
            address = f"L{match['layer']}.{match['stream'] or match['sublayer']}"
        if address in ("resid_final", "norm"):
            return cls("resid_final" if address == "resid_final" else "norm")
        if match := _STREAM.fullmatch(address):
            return cls(match["kind"], layer=int(match["layer"]))  # type: ignore[arg-type]
        match = _PART.fullmatch(address)
        if match is None:
            return cls("write", Unit.parse(address))
        unit = Unit.parse(match["unit"])
        wanted = "head" if match["kind"] in get_args(HeadKind) else "sublayer"
        if unit.kind != wanted:
            raise UnitError(f"Only a {wanted} has a {match['kind']}, and {unit} is none", None, _EXAMPLES)
        return cls(match["kind"], unit)  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.kind in get_args(StreamKind):
            return f"L{self.layer}.{self.kind}"
        if self.unit is None:
            return self.kind
        return str(self.unit) if self.kind == "write" else f"{self.unit}.{self.kind}"
