"""What a neuron does on a reference text: its mean and its values there, to be put in its place in an ablated run.

Zero is a value that a neuron may never have; a mean or a resampled value leaves the run nearer to what the model knows.
The first position is left out, because in many models it is a sink whose values stand for nothing.
"""

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.model.anatomy import Anatomy
from mainstem.model.hooks import Site, Tap, tapped

LONGEST = 512


@cache
def reference_text() -> str:
    """The text that comes with the package (public domain, about 540 words)."""
    return (files("mainstem") / "data" / "reference.txt").read_text(encoding="utf-8")


@dataclass(frozen=True, eq=False)
class NeuronValues:
    """Values of all neurons' entries on a reference text; `values` [position, d_in] by site."""

    values: dict[Site, Float[Tensor, "pos d_in"]]

    def __len__(self) -> int:
        return min((len(value) for value in self.values.values()), default=0)

    def mean(self) -> dict[Site, Float[Tensor, " d_in"]]:
        """Each entry's mean over the text."""
        return {site: value.double().mean(0) for site, value in self.values.items()}

    def at(self, position: int) -> dict[Site, Float[Tensor, " d_in"]]:
        """All entries as they were at one position of the text."""
        return {site: value[position] for site, value in self.values.items()}


@torch.no_grad()
def observe(model: torch.nn.Module, anatomy: Anatomy, input_ids: Tensor, **forward) -> NeuronValues:
    """Runs the model on a reference text.

    Args:
        model: the module; it is left as it was.
        anatomy: its anatomy.
        input_ids: [1, pos] the text, of two tokens at least.
        forward: further arguments of the forward call.
    """
    values: dict[Site, Tensor] = {}
    positions = input_ids.shape[1]

    def keep(site: Site) -> Tap:
        def tap(leaves) -> None:
            tensor = leaves[site.slot]
            values[site] = tensor.reshape(positions, -1)[1:].clone()

        return tap

    sites = [w.source for w in anatomy.writes if w.source is not None and (w.attention or w.neurons)]
    with tapped(model, [(site, keep(site)) for site in dict.fromkeys(sites)]):
        model(input_ids=input_ids, **forward)
    return NeuronValues(values)
