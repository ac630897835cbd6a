"""What the results of all commands have in common: where they come from, what to keep in mind, and their document.

The keys of a document are a contract, each under the schema that it names: keys may be added, never renamed. Nothing
here imports torch, so a result that was saved can be rendered without a model.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Provenance:
    """Where a result comes from."""

    mainstem: str
    torch: str
    transformers: str
    model: str
    revision: str | None
    dtype: str
    device: str
    seed: int
    date: str


@dataclass(frozen=True)
class CheckSummary:
    """`checked` things, the worst relative error, its tolerance, whether all hold and, if not, where not."""

    checked: int
    worst: float
    tolerance: float
    holds: bool
    where: str | None = None


@dataclass(frozen=True)
class Reading:
    """What a command found; each command's own fields follow these.

    Attributes:
        provenance: versions, model, dtype, device, seed, date.
        warnings: what to keep in mind when reading it, each a code, a sentence and a number.
        model: its name, size and dtype.
    """

    SCHEMA: ClassVar[str]
    COMMAND: ClassVar[str]

    provenance: Provenance
    warnings: list[dict[str, Any]]
    model: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """The document that `--format json` prints."""
        return {"schema": self.SCHEMA, "command": self.COMMAND, **asdict(self)}


@dataclass(frozen=True)
class TabularReading(Reading):
    """What a command found, if it is a table, too: its method `cells` gives the rows, which `IN_CELLS` names."""

    IN_CELLS: ClassVar[tuple[str, ...]]

    def about(self) -> dict[str, Any]:
        """The document without what stands in the cells."""
        return {name: value for name, value in self.as_dict().items() if name not in self.IN_CELLS}


def numbers(place: str, row: Any) -> Iterator[tuple[str, str, float]]:
    """(place, quantity, value) of every field of a table's row, a dataclass, that is a float."""
    for quantity, value in asdict(row).items():
        if isinstance(value, float):
            yield place, quantity, value
