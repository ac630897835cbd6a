"""`mainstem reproduce`: the list, what is refused, what is kept and when it is used again, and the report of all.

The experiments are made up here, cost nothing, and count how often they are run.
"""

import json
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import report_samples as samples

from mainstem import cli
from mainstem.errors import CacheError, MainstemError, UsageError
from mainstem.experiments import kept as keeping
from mainstem.experiments import provenance
from mainstem.experiments.kept import check_folder, kept
from mainstem.experiments.outcome import Claim, Experiment, finding, rebuilt_experiment
from mainstem.experiments.registry import EXPERIMENTS, Entry
from mainstem.experiments.settings import Settings
from mainstem.report import as_html, as_text

DOCS = Path(__file__).parents[1] / "docs"


class Laboratory(ModuleType):
    """An experiment that trains: `made` are the units it ran, and `stop` says what to do at one of them."""

    def __init__(self, name: str, holds: bool = True) -> None:
        super().__init__(f"made_up_{name}")
        self.name, self.holds, self.made, self.stop = name, holds, [], {}

    def run(self, settings: Settings) -> Experiment:
        seeds = settings.seed_list(quick=2, full=3)
        values = settings.each(["arm"], seeds, lambda arm, seed: self.unit(seed))["arm"]
        worst = max(one["loss"] for one in values)
        claim = Claim("The loss is small.", "nobody", "small", f"{worst}", "1", finding(self.holds), {"of": values})
        model = {"name": "made-up networks"}
        return Experiment(self.name, "Made up", "is it?", settings.provenance(seeds), model, [claim], [])

    def unit(self, seed: int) -> dict:
        if seed in self.stop:
            raise self.stop[seed]
        self.made.append(seed)
        return {"loss": 0.1 + seed, 3: (1, 2)}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"seeds": 0}, "0 seeds"), ({"seed": -1}, "seed -1"), ({"seed": 10**14}, "from 0 to"), ({"device": "tpu"}, "tpu")],
)
def test_settings_that_cannot_be_run_are_refused(wrong, says):
    with pytest.raises(MainstemError, match=says):
        Settings(**wrong)


@pytest.fixture
def added(monkeypatch):
    """Puts an experiment in the registry, alone."""
    for name in list(EXPERIMENTS):
        monkeypatch.delitem(EXPERIMENTS, name)

    def add(name: str, holds: bool = True) -> Laboratory:
        module = Laboratory(name, holds)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(EXPERIMENTS, name, Entry(name, f"{name} asks", module.__name__, "trains its own", 5, 600))
        return module

    return add


@pytest.fixture
def reproduce(capfd, tmp_path, monkeypatch):
    """Runs the command with a cache of its own; gives exit status, standard output, standard error."""
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments: object) -> tuple[int, str, str]:
        status = cli.run(["reproduce", *map(str, arguments)])
        return (status, *capfd.readouterr())

    return command


# --- the list ---------------------------------------------------------------------------------------------


def test_without_a_name_all_are_listed(reproduce, added):
    added("sums"), added("products")
    code, out, err = reproduce()
    assert (code, err) == (0, "")
    row = next(line for line in out.splitlines() if line.strip().startswith("sums"))
    assert all(word in row for word in ("sums asks", "trains its own", "5 s", "10 min"))
    document = json.loads(reproduce("-f", "json")[1])
    assert [one["name"] for one in document["experiments"]] == ["sums", "products"]
    assert document["experiments"][0]["full_seconds"] == 600


def test_every_experiment_can_be_found_and_is_documented():
    assert {"paris", "knowledge", "induction-in-the-wild"} <= {*EXPERIMENTS} and "all" not in EXPERIMENTS
    words = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("command-line.md", "laboratory.md"))
    for name, entry in EXPERIMENTS.items():
        assert entry.name == name and find_spec(entry.module) is not None and f"`{name}`" in words
        assert entry.quick_seconds, f"the time of the quick form of {name} was not measured"


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sum"], ["unknown experiment 'sum'", "did you mean 'sums'", "sums, other, all"]),
        (["sums", "--quick", "--full"], ["either quick or full"]),
        (["sums", "--seeds", "0"], ["without a seed", "--seeds 0"]),
        (["sums", "--seeds", "-3"], ["without a seed"]),
        (["sums", "--device", "cuda:99"], ["unknown device 'cuda:99'", "this machine has cpu"]),
        (["sums", "--device", "warp"], ["unknown device 'warp'"]),
        (["sums", "--prompts", "2"], ["only knowledge has several prompts"]),
        (["sums", "--model", "x"], ["trains its own models and opens none", "--model"]),
        (["sums", "--dtype", "bf16"], ["opens none", "--dtype"]),
        (["sums", "--trust-remote-code"], ["opens none", "--trust-remote-code"]),
        (["sums", "--chat"], ["their own prompts", "--chat"]),
        (["other", "--seeds", "2"], ["runs on a model and trains none", "--seeds 2"]),
        (["other", "--folder", "x"], ["trains none, and has no parts to keep", "--folder"]),
        (["--quick"], ["no experiment is named", "sums, other, all"]),
        (["--seeds", "2"], ["no experiment is named"]),
        (["--format", "html"], ["no page"]),
        (["all", "--prompts", "2"], ["only knowledge"]),
    ],
)
def test_what_does_not_fit_is_refused_in_words(reproduce, added, arguments, expected):
    module = added("sums")
    EXPERIMENTS["other"] = Entry("other", "", "made_up_other", "a model")
    code, out, err = reproduce(*arguments)
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert all(text in err.lower() for text in expected), err
    assert not module.made


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_trained(reproduce, added, tmp_path):
    module, file = added("sums"), tmp_path / "file"
    file.write_text("mine")
    code, out, err = reproduce("sums", "--folder", file)
    assert code == 1 and out == "" and "--folder DIR" in err and not module.made
    assert file.read_text() == "mine"


# --- what is kept -----------------------------------------------------------------------------------------


def test_full_is_the_default_and_seeds_count_from_the_seed(reproduce, added):
    module = added("sums")
    assert reproduce("sums")[0] == 0 and module.made == [0, 1, 2]
    code, out, _ = reproduce("sums", "--quick", "--seeds", "1", "--seed", "7", "-f", "json")
    document = json.loads(out)
    assert code == 0 and module.made == [0, 1, 2, 7]
    assert document["provenance"]["seeds"] == [7] and document["provenance"]["seed"] == 7
    assert {"code", "machine", "torch", "threads", "python"} <= {*document["provenance"]}


def test_an_interrupted_run_says_what_is_kept_and_goes_on_from_there(reproduce, added, tmp_path):
    module = added("sums")
    module.stop = {1: KeyboardInterrupt()}
    code, out, err = reproduce("sums", "--full", "--folder", tmp_path)
    assert (code, out) == (130, "") and module.made == [0]
    assert f"Kept in {tmp_path}: 1 result of sums. The same command goes on from there." in err
    module.stop = {}
    code, out, err = reproduce("sums", "--full", "--folder", tmp_path)
    assert code == 0 and module.made == [0, 1, 2] and "1 of 3 results were kept by an earlier run" in out
    assert reproduce("sums", "--quick", "--folder", tmp_path)[0] == 0
    assert module.made == [0, 1, 2, 0, 1], "what a full run kept is no result of a quick one"


def test_results_of_other_sources_are_made_again(reproduce, added, tmp_path, monkeypatch):
    module = added("sums")
    reproduce("sums", "--quick", "--folder", tmp_path)
    monkeypatch.setattr(provenance, "code", lambda: "other")
    code, out, err = reproduce("sums", "--quick", "--folder", tmp_path)
    assert code == 0 and module.made == [0, 1, 0, 1] and "kept by an earlier run" not in out
    assert "arm-seed-0 was kept with another code, and is made again." in err


def test_a_kept_result_is_what_was_made(tmp_path):
    def make() -> dict:
        return {"a": 0.1, 2: (1, float("nan"))}

    fresh = kept(tmp_path, "x", {"form": "quick"}, make)
    again = kept(tmp_path, "x", {"form": "quick"}, lambda: pytest.fail("made again"))
    assert (fresh.old, again.old) == (False, True) and str(fresh.values) == str(again.values)
    assert replace(fresh, old=True, values={}) == replace(again, values={})
    assert str(kept(None, "x", {"form": "quick"}, make).values) == str(fresh.values)


@pytest.mark.parametrize("other", [{"form": "full"}, {"form": "quick", "device": "cpu"}])
def test_a_result_of_something_else_is_made_again(tmp_path, other):
    said = []
    kept(tmp_path, "x", {"form": "quick"}, lambda: {"a": 1})
    made = kept(tmp_path, "x", other, lambda: {"a": 2}, said.append)
    assert made.values == {"a": 2} and not made.old and len(said) == 1
    assert kept(tmp_path, "x", other, lambda: {"a": 3}).values == {"a": 2}


@pytest.mark.parametrize("text", ["mine", "{}", '{"kind": "mainstem kept result"}', "[1]"])
def test_other_files_are_left_alone(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="no.* kept result"):
        kept(tmp_path, "x", {}, lambda: pytest.fail("made"))
    assert file.read_text() == text


def test_a_full_disk_leaves_what_was_kept(tmp_path, monkeypatch):
    kept(tmp_path, "x", {"form": "quick"}, lambda: {"a": 1})

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keeping, "write_whole", full)
    with pytest.raises(CacheError, match="disk is full.*kept before stays"):
        kept(tmp_path, "x", {"form": "full"}, lambda: {"a": 2})
    monkeypatch.undo()
    assert kept(tmp_path, "x", {"form": "quick"}, lambda: pytest.fail("made")).values == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_a_folder_is_made_and_nothing_is_left_in_it(tmp_path):
    check_folder(tmp_path / "a" / "b")
    assert [*(tmp_path / "a" / "b").iterdir()] == []


def test_an_experiment_comes_back_from_its_document_as_it_was():
    made = samples.experiment()
    for experiment in (made, samples.reproduction().parts[1].experiment):
        again = rebuilt_experiment(json.loads(json.dumps(asdict(experiment))))
        assert type(again.provenance) is type(experiment.provenance)
        assert repr(again) == repr(experiment)


# --- all of them ------------------------------------------------------------------------------------------


def test_all_go_into_one_report_and_failures_end_nothing(reproduce, added, tmp_path):
    good, bad, ugly, last = added("good"), added("bad", holds=False), added("ugly"), added("last")
    ugly.stop = {0: MainstemError("The loss is no number", "step 3", "Lower the learning rate.")}
    last.stop = {1: ZeroDivisionError("division by <zero>")}
    code, out, err = reproduce("all", "--quick", "--folder", tmp_path)
    assert code == 1 and "2 of 4 experiments failed (ugly, last)" in err.splitlines()[-1]
    assert "3 of 4: ugly, about 5 s" in err.splitlines()
    page = (tmp_path / "report-quick.html").read_text(encoding="utf-8")
    document = json.loads((tmp_path / "report-quick.json").read_text(encoding="utf-8"))
    assert [(part["name"], part["failure"] is None) for part in document["parts"]] == [
        ("good", True), ("bad", True), ("ugly", False), ("last", False)
    ]  # fmt: skip
    assert "Lower the learning rate." in out and "ZeroDivisionError" in out and "test_reproducing.py" in out
    assert "division by &lt;zero&gt;" in page and page.count('<a href="#bad">bad</a>') == 1
    assert "✗ not reproduced" in out and '<strong class="neg">✗ not reproduced</strong>' in page
    assert "2 claims of 4 experiments: 1 reproduced, 1 not reproduced, 2 experiments failed" in out

    ugly.stop = last.stop = {}
    code, out, err = reproduce("all", "--quick", "--folder", tmp_path)
    assert code == 0 and "kept from" in out and "failed" not in out
    assert good.made == bad.made == [0, 1], "what was finished is not run again"
    assert ugly.made == [0, 1] and last.made == [0, 1], "and of the others what they lacked"


def test_all_can_be_interrupted(reproduce, added, tmp_path):
    first, second = added("first"), added("second")
    second.stop = {1: KeyboardInterrupt()}
    code, out, err = reproduce("all", "--quick", "--folder", tmp_path)
    assert (code, out) == (130, "") and f"Kept in {tmp_path}: first, 1 result of second." in err
    second.stop = {}
    assert reproduce("all", "--quick", "--folder", tmp_path)[0] == 0
    assert first.made == second.made == [0, 1]


def test_other_seeds_are_another_run_of_all(reproduce, added, tmp_path):
    module = added("sums")
    for seeds, expected in ((2, [0, 1]), (3, [0, 1, 2])):
        reproduce("all", "--seeds", seeds, "--folder", tmp_path)
        assert module.made == expected
        document = json.loads((tmp_path / "report-full.json").read_text(encoding="utf-8"))
        assert document["parts"][0]["experiment"]["provenance"]["seeds"] == expected


def test_experiments_on_a_model_fail_one_by_one_where_there_is_none(reproduce, added, tmp_path):
    trained = added("sums")
    EXPERIMENTS["other"] = Entry("other", "", "made_up_other", "a model")
    code, out, err = reproduce("all", "--model", tmp_path, "--folder", tmp_path / "kept")
    assert code == 1 and trained.made == [0, 1, 2] and "1 of 2 experiments failed (other)" in err


def test_wrong_usage_of_the_model_is_refused_before_anything_runs(reproduce, added, tmp_path):
    trained = added("sums")
    EXPERIMENTS["other"] = Entry("other", "", "made_up_other", "a model")
    code, out, err = reproduce("all", "--dtype", "float7", "--folder", tmp_path)
    assert code == 2 and out == "" and "Unknown dtype 'float7'" in err and not trained.made


@pytest.mark.parametrize("result", [samples.experiment(), samples.reproduction()], ids=["one", "all"])
def test_reports_show_every_claim_with_its_finding(result):
    page, table = as_html(result), " ".join(as_text(result, 160).split())
    for sign in ("✓ reproduced", "~ in part", "✗ not reproduced", "· measured"):
        assert sign in page and sign in table
