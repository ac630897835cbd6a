"""Pages of docs/results from what experiments printed.

    mainstem reproduce NAME --full --format json --out NAME.json
    python -m benchmarks.results NAME.json ... --into docs/results

A page has the command, what the numbers depend on, each claim beside its null, and the tables. Nothing in it is written
by hand.
"""

import argparse
import json
from pathlib import Path
from typing import Any

MARKS = {"reproduced": "✓", "in part": "~", "not reproduced": "✗", "measured": "·"}
LONGEST = 40
"""Rows of a table that are shown; the document has all."""


def page(document: dict[str, Any], command: str) -> str:
    """One experiment as Markdown."""
    of = document["provenance"]
    seeds = ", ".join(map(str, of["seeds"]))
    parts = [
        f"# {document['title']}",
        document["question"],
        f"    {command}",
        f"Of {document['model']['name']}, on {of['date'][:10]}: seeds {seeds}; Mainstem {of['mainstem']} (sources "
        f"{of['code']}), torch {of['torch']}, transformers {of['transformers']}, Python {of['python']}; "
        f"{of['machine']}, {of['threads']} thread{'s' if of['threads'] != 1 else ''}, {of['dtype']}.",
        *map(claim, document["claims"]),
        *(table(made) for made in document["tables"] if made["rows"]),
        *document["notes"],
    ]
    return "\n\n".join(parts) + "\n"


def claim(made: dict[str, Any]) -> str:
    """A claim with its finding, what was published, what was measured, and the null."""
    rows = [f"**{MARKS[made['finding']]} {made['finding']}: {made['claim'].rstrip('.')}.** ({made['source']})", ""]
    rows += [f"- {name}: {made[name]}" for name in ("published", "measured", "null")]
    return "\n".join(rows)


def table(made: dict[str, Any]) -> str:
    """Rows under their heads."""
    shown = [made["heads"], ["---"] * len(made["heads"]), *made["rows"][:LONGEST]]
    rows = ["| " + " | ".join(map(cell, row)) + " |" for row in shown]
    left = len(made["rows"]) - LONGEST
    more = [f"\n{left} more rows are in the JSON document."] if left > 0 else []
    return "\n".join([f"### {made['title']}", "", made["caption"], "", *rows, *more])


def cell(value: Any) -> str:
    """A number with four digits, an interval with its ends, or words."""
    if isinstance(value, dict) and value.keys() == {"mean", "low", "high"}:
        return f"{value['mean']:.4g} ({value['low']:.3g} to {value['high']:.3g})"
    return f"{value:.4g}" if isinstance(value, float) else str("–" if value is None else value).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, default=Path("docs/results"))
    parser.add_argument("--options", default="", help="options of the command beside its name")
    asked = parser.parse_args()
    asked.into.mkdir(parents=True, exist_ok=True)
    for path in asked.documents:
        document = json.loads(path.read_text(encoding="utf-8"))
        command = f"mainstem {document['command']} {asked.options}".rstrip()
        (asked.into / f"{document['name']}.md").write_text(page(document, command), encoding="utf-8")


if __name__ == "__main__":
    main()
