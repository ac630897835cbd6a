"""The documents name everything that is public, and their examples run."""

import ast
import doctest
import re
from pathlib import Path

import jaxtyping
import pytest

import mainstem
from mainstem import Edit
from mainstem.analysis import warnings
from mainstem.analysis.decompose import LEVELS
from mainstem.analysis.readout import NORMS
from mainstem.analysis.scores import RANKINGS
from mainstem.causal.metrics import METRICS
from mainstem.lab.optimisers import OPTIMISERS
from mainstem.lab.tasks import TASKS
from mainstem.session import Model
from mainstem.tracing import Trace
from mainstem.units import UNIT_KINDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def warning_codes() -> set[str]:
    """The codes of all warnings that the source makes."""
    tree = ast.parse(Path(warnings.__file__).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    made = [call.args[0] for call in calls if call.func.id == "Warning"]  # type: ignore[attr-defined]
    assert all(isinstance(code, ast.Constant) for code in made)
    return {code.value for code in made if isinstance(code, ast.Constant)}


def public(kind: type) -> set[str]:
    """Methods and properties of a class, inherited ones too, that do not begin with an underscore."""
    return {name for name in dir(kind) if not name.startswith("_")}


def names() -> dict[str, set[str]]:
    """What has to be documented, by where it comes from."""
    return {
        "mainstem": set(mainstem.__all__),
        "Model": public(Model),
        "Trace": public(Trace),
        "Edit": {name for name in public(Edit) if isinstance(vars(Edit)[name], classmethod)},
        "levels": set(LEVELS),
        "scores": set(RANKINGS),
        "norms": set(NORMS),
        "kinds": set(UNIT_KINDS),
        "warnings": warning_codes(),
        "metrics": set(METRICS),
        "tasks": set(TASKS),
        "optimisers": set(OPTIMISERS),
    }


def code_words(text: str) -> set[str]:
    """The words of code in a document: of blocks, and of what stands between backquotes."""
    blocks = BLOCK.findall(text)
    inline = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    return {word for piece in [*blocks, *inline] for word in re.findall(r"[A-Za-z_][\w-]*", piece)}


def missing(text: str) -> dict[str, list[str]]:
    """The public names that a text does not have as code."""
    words = code_words(text)
    lacking = {place: sorted(wanted - words) for place, wanted in names().items()}
    return {place: absent for place, absent in lacking.items() if absent}


def test_every_public_name_is_documented() -> None:
    assert missing("\n".join(page.read_text(encoding="utf-8") for page in PAGES)) == {}


def test_the_check_can_fail() -> None:
    text = "`Model` `trace`\n```python\ntrace.decompose('heads')\n```\nsink and increase are here, but not as code"
    found = missing(text)
    assert "Model" not in found["mainstem"] and "Trace" in found["mainstem"]
    assert "decompose" not in found["Trace"] and "reads" in found["Trace"]
    assert "sink" in found["warnings"] and "increase" in found["scores"]


def test_there_are_names_to_look_for() -> None:
    assert warning_codes() >= {"sink", "first-token", "tied", "cancel", "early-lens", "chat"}
    assert public(Trace) >= {"decompose", "lens", "explain", "write"}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def examples(page: Path) -> list[doctest.Example]:
    found = []
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        line = page.read_text(encoding="utf-8").count("\n", 0, block.start(1))
        for example in doctest.DocTestParser().get_examples(block[1]):
            example.lineno += line
            found.append(example)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=lambda page: page.name)
def test_examples_run(page: Path, demo_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the default model, which is opened once for all tests."""
    opened = mainstem.open

    def held(source, **options):
        return demo_model if source == "demo" else opened(source, **options)

    monkeypatch.setattr(mainstem, "open", held)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # so that errors are Mainstem's own
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    text = page.read_text(encoding="utf-8")
    report: list[str] = []
    runner.run(doctest.DocTest(examples(page), {}, page.name, str(page), 0, text), out=report.append)
    assert runner.failures == 0, "".join(report)
    assert runner.tries > 0


def test_readme_examples_are_python() -> None:
    for block in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        if ">>>" not in block:
            compile(block, "README.md", "exec")
