"""Many experiments for the terminal: each one's claims with their findings; and the list of all there are."""

from rich.console import Console
from rich.text import Text

from mainstem.experiments.everything import Reproduction
from mainstem.experiments.registry import ExperimentList
from mainstem.report import terminal as t
from mainstem.report.experiment_terminal import STYLES
from mainstem.report.experiment_text import MARKS, about_part, duration, findings
from mainstem.report.text import visible_or


def print_reproduction(console: Console, r: Reproduction) -> None:
    """Prints all claims with their findings, as wide as the console is."""
    console.print(*t.title_rows(f"reproduce all --{r.form}", r.model, r.provenance), sep="\n")
    console.print(t.labelled("found", Text(findings(r.parts))))
    for part in r.parts:
        title = part.name if part.experiment is None else part.experiment.title
        console.print(t.heading(visible_or(title), f"{part.name}, {about_part(part)}"))
        table = t.grid({"width": 16, "no_wrap": True}, {})
        if part.experiment is None:
            table.add_row(Text("✗ failed", "fail"), Text(visible_or(part.failure or "")))
        else:
            for claim in part.experiment.claims:
                finding = Text(f"{MARKS[claim.finding]} {claim.finding}", STYLES[claim.finding])
                table.add_row(finding, Text(visible_or(claim.claim)))
        console.print(table)
    for part in t.notices(r.warnings, r.notes):
        console.print(part)
    console.print(t.provenance_line(r.provenance))


def print_list(console: Console, listed: ExperimentList) -> None:
    """Prints the experiments with what they need and how long they take."""
    console.print(Text("mainstem reproduce", "head"))
    table = t.lined()
    for head in ("experiment", "what it asks", "needs"):
        table.add_column(head, overflow="fold", no_wrap=head == "experiment")
    for head in ("--quick", "--full"):
        table.add_column(head, justify="right", no_wrap=True)
    for entry in listed.entries:
        times = (duration(entry.quick_seconds), duration(entry.full_seconds))
        table.add_row(Text(entry.name, "title"), Text(entry.about), Text(entry.needs, "quiet"), *times)
    console.print(table)
    console.print(
        Text(
            "mainstem reproduce NAME runs one, mainstem reproduce all every one. Times are of one thread on "
            "a slow core, on the default model.",
            "quiet",
        )
    )
