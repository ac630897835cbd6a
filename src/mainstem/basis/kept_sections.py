"""The file that an interrupted basis report goes on from: its finished sections, and what it is a report of.

Sections are whole or not there: the file is written anew after each and takes the old one's place. A file of another
report (another model, other weights, another text, other options) is refused, and so is every other file.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from mainstem.basis.reference import Reference
from mainstem.errors import UsageError
from mainstem.model.sampled_weights import sampled_sums
from mainstem.model.whole_files import as_object, differing, write_whole
from mainstem.results.basis_report import BasisReport
from mainstem.results.rebuilt import rebuilt

if TYPE_CHECKING:
    from mainstem.session import Model

_KIND = "mainstem basis report"
_REMEDY = "Name another file, or delete this one to begin anew."


@dataclass(frozen=True)
class Finished:
    """A section, and what it adds to the report's warnings and notes."""

    section: Any
    warnings: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class KeptSections:
    """The sections of one report that are done.

    Args:
        path: the file, made if it is not there; None for none.
        identity: what the report is of, as JSON can hold it.

    Raises:
        UsageError: the file is of another report, no such file, or cannot be read or written.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.identity = json.loads(json.dumps(identity))
        self.done: dict[str, Any] = {}
        if path is not None:
            self._read(path)
            self._write(path)

    def get(self, name: str, make: Callable[[], Finished]) -> Finished:
        """The section of this name, made if it is not there yet."""
        if name in self.done:
            kept, kind = self.done[name], get_args(get_type_hints(BasisReport)[name])[0]
            return Finished(rebuilt(kind, kept["section"]), kept["warnings"], kept["notes"])
        made = make()
        if self.path is not None:
            self.done[name] = asdict(made)
            self._write(self.path)
        return made

    def _read(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        except UnicodeDecodeError:
            text = "no text"
        except OSError as error:
            raise UsageError(f"The state cannot be read: {error.strerror}", str(path), _REMEDY) from error
        if not text:
            return
        found = as_object(text)
        if not _is_state(found):
            raise UsageError("This is not the state of a basis report", str(path), _REMEDY)
        other = differing(self.identity, found["of"])
        if other:
            raise UsageError(f"This file is of another report: its {', '.join(other)} differ", str(path), _REMEDY)
        self.done = found["sections"]

    def _write(self, path: Path) -> None:
        document = {"kind": _KIND, "of": self.identity, "sections": self.done}
        try:
            write_whole(path, json.dumps(document))
        except OSError as error:
            what = f"The state of the report cannot be kept: {error.strerror}"
            raise UsageError(what, str(path), "Name a file that can be written.") from error


def _is_state(found: dict[str, Any]) -> bool:
    """Whether a document is what `KeptSections` writes."""
    if found.get("kind") != _KIND:
        return False
    of, sections = found.get("of"), found.get("sections")
    return isinstance(of, dict) and isinstance(sections, dict) and all(map(_is_finished, sections.values()))


def _is_finished(section: Any) -> bool:
    return isinstance(section, dict) and section.keys() == {each.name for each in fields(Finished)}


def identity(model: "Model", on: Reference, **options: Any) -> dict[str, Any]:
    """What a report is of: versions, the model with a sample of its weights, the text's tokens, the options."""
    made = asdict(model.provenance())
    del made["date"]
    ids = hashlib.sha256(json.dumps(on.ids).encode()).hexdigest()
    return {**made, "weights": sampled_sums(model.module), "text": on.summary(), "tokens": ids, **options}
