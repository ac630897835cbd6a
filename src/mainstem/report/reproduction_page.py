"""Many experiments as one page: all claims with their findings first, then each experiment whole."""

from mainstem.experiments.everything import Part, Reproduction
from mainstem.report import page as p
from mainstem.report.experiment_page import experiment_parts, finding_cell, words
from mainstem.report.experiment_text import about_part, findings


def reproduction_page(r: Reproduction) -> str:
    """The page of all experiments."""
    body = [
        p.model_line(f"reproduce all --{r.form}", r.model, r.provenance),
        "<h1>What was published, and what was found</h1>",
        f"<p>{p.esc(findings(r.parts))}.</p>",
        p.section("All claims", "each leads to its experiment", _contents(r.parts)),
        p.notices(r.warnings, r.notes),
        *(_part(part) for part in r.parts),
    ]
    return p.page(f"All experiments, {r.model['name']}", body, r.provenance, r.as_dict())


def _contents(parts: list[Part]) -> str:
    rows = []
    for part in parts:
        link = f'<a href="#{p.esc(part.name)}">{p.esc(part.name)}</a>'
        name = p.cell(f'{link} <span class="quiet">{p.esc(about_part(part))}</span>')
        if part.experiment is None:
            failed = p.cell('<strong class="failed">failed</strong>')
            rows.append(p.row(name, failed, p.cell(words(part.failure or "")), css="first"))
            continue
        for n, claim in enumerate(part.experiment.claims):
            own = name if n == 0 else p.cell("")
            rows.append(p.row(own, finding_cell(claim), p.cell(words(claim.claim)), css="" if n else "first"))
    return p.table([("experiment", ""), ("finding", ""), ("claim", "")], rows, "contents")


def _part(part: Part) -> str:
    if part.experiment is not None:
        inside = "".join(experiment_parts(part.experiment, "h2")) + p.footer(part.experiment.provenance)
    else:
        failed = f'<p><strong class="failed">failed</strong> {words(part.failure or "")}</p>'
        inside = f"<h2>{p.esc(part.name)}</h2><p>{p.esc(part.about)}</p>{failed}"
    return f'<article id="{p.esc(part.name)}">{inside}<p class="up"><a href="#top">all claims</a></p></article>'
