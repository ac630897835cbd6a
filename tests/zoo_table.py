"""What is exact and what is refused, family by family: `make zoo`.

    python -m tests.zoo_table                          # every causal-LM family of the installed Transformers
    python -m tests.zoo_table llama gpt2               # only these
    python -m tests.zoo_table --json tests/zoo_expected.json   # and keep the statuses, which the tests compare

For each level a family is `exact` (the parts are the stream within tolerance, and all three certificates hold),
`refused` (with the reason, printed below its line), `none` (it has no attention, or no neurons), or FAILED: a
certificate does not hold. The numbers are the largest relative errors of sum, reads and labels.
"""

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent
if str(TESTS) not in sys.path:  # `python -m tests.zoo_table` puts the folder above there
    sys.path.insert(0, str(TESTS))

import torch  # noqa: E402
import transformers  # noqa: E402
import zoo  # noqa: E402
from mutants import Subject, subject  # noqa: E402

from mainstem.analysis.certificate import certify, check_reads  # noqa: E402
from mainstem.analysis.decompose import Level, decompose  # noqa: E402
from mainstem.causal.labels import check_labels  # noqa: E402
from mainstem.errors import AnatomyError, LevelRefusedError  # noqa: E402

EXPECTED = TESTS / "zoo_expected.json"
PARTS: dict[Level, set[str]] = {
    "sublayers": {"sublayer"},
    "heads": {"head"},
    "subvalues": {"attention_subvalue"},
    "attention_neurons": {"attention_neuron"},
    "neurons": {"ffn_neuron", "expert_neuron"},
}
"""The levels of the table, and the parts that each of them is there for."""
SHORT = {"exact": "exact", "refused": "refused", "none": "-", "FAILED": "FAILED"}


@dataclass
class Row:
    """One family: a status for each level, reasons for what is refused or fails, the certificates' errors."""

    family: str
    levels: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        words = [SHORT[self.levels[level]] for level in PARTS]
        errors = [f"{self.errors[name]:.0e}" if name in self.errors else "" for name in ("sum", "reads", "labels")]
        line = f"{self.family:28}" + "".join(f"{word:10}" for word in words) + "".join(f"{e:8}" for e in errors)
        return "\n".join([line.rstrip() + f"{self.seconds:6.1f} s", *(f"    {reason}" for reason in self.reasons)])


def examine(family: str) -> tuple[Row, Subject | None]:
    """The row of a family, and its model and anatomy if it has one.

    Raises:
        NotBuilt: if there is no tiny model of it.
    """
    start = time.perf_counter()
    row, made = Row(family), None
    try:
        made = subject(family)
    except AnatomyError as error:
        row.levels = dict.fromkeys(PARTS, "refused")
        row.reasons.append(error.description)
    else:
        _levels(made, row)
    row.seconds = time.perf_counter() - start
    return row, made


def _levels(made: Subject, row: Row) -> None:
    labels = check_labels(made.model, made.anatomy, made.ids, **made.forward)
    moment = made.moment
    reads = check_reads(decompose(moment, "sublayers"))
    row.errors = {"sum": 0.0, "reads": reads.worst, "labels": labels.worst}
    failed = [f"{name}: {c.where}" for name, c in (("reads", reads), ("labels", labels)) if not c.holds]
    for level, kinds in PARTS.items():
        try:
            found = decompose(moment, level)
        except LevelRefusedError as error:
            row.levels[level] = "refused"
            row.reasons.append(f"{level}: {error.description}")
            continue
        certificate = certify(found)
        row.errors["sum"] = max(row.errors["sum"], certificate.relative_error)
        if not certificate.holds:
            failed.append(f"{level}: {certificate.failed}")
        holds = certificate.holds and reads.holds and (labels.holds or level == "sublayers")
        there = any(group.kind in kinds for group in found.groups)
        row.levels[level] = "FAILED" if not holds else "exact" if there else "none"
    row.reasons.extend(dict.fromkeys(failed))


def expected() -> dict[str, dict[str, str]]:
    """The statuses that were kept, by family; none if another Transformers is installed than they were kept for."""
    kept = json.loads(EXPECTED.read_text())
    return kept["families"] if kept["transformers"] == transformers.__version__ else {}


def totals(families: dict[str, dict[str, str]]) -> dict[str, Counter[str]]:
    """How many families have each status, by level."""
    return {level: Counter(levels[level] for levels in families.values()) for level in PARTS}


def survey(names: list[str]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Prints a line for each family that can be built; the statuses, and what was not built with the reason."""
    found: dict[str, dict[str, str]] = {}
    missing: dict[str, str] = {}
    head = "".join(f"{level.replace('attention_', 'a.'):10}" for level in PARTS)
    print(f"{'family':28}{head}{'sum':8}{'reads':8}{'labels':8}")
    for family in names:
        try:
            row, _ = examine(family)
        except zoo.NotBuilt as error:
            missing[family] = str(error)
            continue
        found[family] = row.levels
        print(row, flush=True)
    return found, missing


def main() -> int:
    parser = argparse.ArgumentParser(description="What is exact and what is refused, family by family.")
    parser.add_argument("families", nargs="*")
    parser.add_argument("--json", type=Path, help="keep the statuses there")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found, missing = survey(asked.families or zoo.families())
    for reason in missing.values():
        print(f"not built: {reason}")
    print(f"\n{len(found)} families built, {len(missing)} not; Transformers {transformers.__version__}")
    for level, count in totals(found).items():
        print(f"{level:20}" + ", ".join(f"{number} {status}" for status, number in count.most_common()))
    if asked.json is not None:
        document = {
            "transformers": transformers.__version__,
            "totals": {level: dict(count) for level, count in totals(found).items()},
            "families": dict(sorted(found.items())),
            "not_built": missing,
        }
        asked.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any("FAILED" in levels.values() for levels in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
