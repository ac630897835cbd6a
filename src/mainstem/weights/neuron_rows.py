"""The directions by which the neurons of an MLP read the stream, by role, and those in which they write to it.

A gated MLP reads with two rows for each neuron, gate and up; another with one, input. Rows and columns are those of
`mainstem.analysis.stream_weights`. Limits: an MLP whose neurons are of several matrices is left out, with the reason.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor

from mainstem.errors import LevelRefusedError
from mainstem.units import Unit

if TYPE_CHECKING:
    from mainstem.session import Model


@dataclass(frozen=True, eq=False)
class NeuronRows:
    """One MLP's neurons: directions of reading by role, and of writing."""

    unit: Unit
    reading: dict[str, Float[Tensor, "neuron d_model"]]
    writing: Float[Tensor, "neuron d_model"]

    def address(self, place: int) -> Unit:
        """The address of a neuron."""
        return Unit.ffn_neuron(self.unit.layer or 0, place, nth=self.unit.nth)


def all_neuron_rows(model: "Model") -> tuple[dict[Unit, NeuronRows], list[str]]:
    """Those of all MLPs, and a sentence about each that is left out."""
    found, notes = {}, []
    for index, write in enumerate(model.anatomy.writes):
        if not write.neurons or write.unit in found:
            continue
        try:
            found[write.unit] = neuron_rows(model, index)
        except LevelRefusedError as error:
            notes.append(f"{write.unit} is left out: {error.reason or error.what}.")
    return found, notes


def neuron_rows(model: "Model", index: int) -> NeuronRows:
    """Those of the MLP of one write, by its number.

    Raises:
        LevelRefusedError: if the rows are not to be had.
    """
    write, weights = model.anatomy.writes[index], model.weights
    if write.activation is None:
        raise LevelRefusedError("No rows", str(write.unit), "its activation was not seen")
    writing = weights.write(write.unit).mT
    rows = weights.reads(write.unit)
    entries, reading = write.activation.entries, {}
    if len(entries.read) != len(writing):
        raise LevelRefusedError("No rows", str(write.unit), "some of its neurons are not of one matrix")
    for place in range(entries.read.shape[1]):
        number = entries.read[:, place].unique()
        if len(number) != 1:
            raise LevelRefusedError("No rows", str(write.unit), "its neurons read by several matrices")
        roles = model.anatomy.reads[write.activation.reads[int(number)]].roles
        role = roles[min(place, len(roles) - 1)]
        reading[role] = rows["+".join(roles)][entries.column[:, place]]
    return NeuronRows(write.unit, reading, writing)
