"""`mainstem patch`: what is asked for, what is refused, and what is shown, on a tiny model."""

import json

import pytest
import torch

import mainstem
from mainstem.causal.metrics import METRICS
from mainstem.causal.patching import DIRECTIONS
from mainstem.causal.patching_grids import GRIDS
from mainstem.causal.replay import DEFAULT_MEMORY
from mainstem.cli import options
from mainstem.errors import PairError, TargetError, UsageError
from mainstem.intervene.patch_reading import read_patch
from mainstem.lab.pairs import PromptPair
from mainstem.lab.tasks import TASKS
from mainstem.report import as_html, as_text
from tests.test_cli import directory, refused, run, saved  # noqa: F401 (fixtures)

CLEAN, CORRUPTED = "a big cat", "a bad cat"
PATCH = ["patch", CLEAN, CORRUPTED, "--answer", "x", "--wrong", "y"]
PAIRS = [(CLEAN, CORRUPTED), ("a red dog", "a rad dog"), ("my old hat", "my odd hat")]


@pytest.fixture(scope="module")
def model(saved):  # noqa: F811
    return mainstem.open(saved)


def file_of(tmp_path, pairs):
    lines = [{"clean": a, "corrupted": b, "answers": ["x"], "wrong": ["y"]} for a, b in pairs]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def document(result):
    code, out, err = result
    assert code == 0, err
    return json.loads(out)


# --- one pair ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", options.DIRECTIONS)
@pytest.mark.parametrize("metric", ["logit-difference", "kl"])
def test_effects_are_those_of_the_sweep(run, model, direction, metric):  # noqa: F811
    found = document(run(*PATCH, "--direction", direction, "--metric", metric, "-f", "json"))
    sweep = model.patch(CLEAN, CORRUPTED, "x", "y", direction=direction, metric=metric)
    effects = sweep.recovery if direction == "denoising" else 1 - sweep.recovery
    assert torch.tensor(found["effects"]).allclose(effects.float(), atol=1e-6) and 0.0 in found["effects"][0]
    assert found["values"] == sweep.values.tolist() and found["clean"] == sweep.clean
    assert found["columns"] == list(sweep.columns) and found["rows"] == ["L0", "L1", "final"]
    assert found["schema"] == "mainstem/patch/1" and found["pairs"] == 1 and found["stability"] is None
    sizes = [abs(cell["effect"]) for cell in found["top"]]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == pytest.approx(effects.abs().max().item())


@pytest.mark.parametrize("grid", [grid for grid in options.GRIDS if grid != "mixer"])
def test_every_grid_is_shown(run, grid, tmp_path):  # noqa: F811
    more = ["--unit", "L0N3", "--unit", "L1H2.1"] if grid == "neurons" else []
    shown = run(*PATCH, "--grid", grid, *more)[1]
    assert "percent recovered" in shown and f"{grid}:" in shown and "Largest cells" in shown
    assert run(*PATCH, "--grid", grid, *more, "-o", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<svg class="heat"' in page and "<title>L0" in page and page.count("</svg>") == 1


def test_windows_are_warned_about(run):  # noqa: F811
    found = document(run(*PATCH, "--grid", "mlp", "--window", "2", "-f", "json"))
    assert found["rows"] == ["L0.mlp to L1.mlp"] and "window" in [w["code"] for w in found["warnings"]]


def test_a_sweep_goes_on_from_its_state(run, tmp_path):  # noqa: F811
    state = tmp_path / "state"
    whole = document(run(*PATCH, "--state", state, "-f", "json"))
    lines = state.read_text().splitlines()
    state.write_text("\n".join(lines[:5]) + "\n" + lines[5][:4])
    again = document(run(*PATCH, "--state", state, "-f", "json"))
    assert torch.tensor(again["values"]).allclose(torch.tensor(whole["values"]), atol=1e-6)
    assert sorted(state.read_text().splitlines())[0] != "" and len(state.read_text().splitlines()) == len(lines)
    refused(run(*PATCH, "--state", state, "--metric", "kl"), 2, "state")


@pytest.mark.parametrize(("given", "expected"), [("512M", 2**29), ("2g", 2**31), ("1.5 GiB", 3 * 2**29), ("7", 7)])
def test_sizes(given, expected):
    assert options.size(given, "--memory") == expected


@pytest.mark.parametrize("given", ["", "much", "-1G", "0", "1T"])
def test_wrong_sizes(given):
    with pytest.raises(UsageError, match="no amount of memory"):
        options.size(given, "--memory")


# --- several pairs ----------------------------------------------------------------------------------------


def test_means_and_intervals_over_pairs(run, model, tmp_path):  # noqa: F811
    path = file_of(tmp_path, PAIRS)
    found = document(run("patch", "--pairs", path, "--grid", "heads", "-f", "json"))
    sweeps = [model.patch(*pair, "x", "y", grid="heads") for pair in PAIRS]
    mean = torch.stack([sweep.values for sweep in sweeps]).mean(0)
    clean, corrupted = (sum(getattr(s, name) for s in sweeps) / 3 for name in ("clean", "corrupted"))
    effects = torch.tensor(found["effects"]).double()
    assert effects.allclose((mean - corrupted) / (clean - corrupted), atol=1e-6)
    low, high = torch.tensor(found["low"]), torch.tensor(found["high"])
    assert (low <= effects + 1e-6).all() and (effects <= high + 1e-6).all() and (low < high).any()
    assert found["pairs"] == 3 and found["stability"]["splits"] == 100 and -1 <= found["stability"]["half"] <= 1
    shown = run("patch", "--pairs", path, "--grid", "heads")[1]
    assert "means over 3 pairs" in shown and "95 % interval" in shown and "Spearman-Brown" in shown


def test_positions_of_pairs_must_be_the_same(run, tmp_path):  # noqa: F811
    found = document(run("patch", "--pairs", file_of(tmp_path, PAIRS[:2]), "-f", "json"))
    assert found["columns"][0] == "0 a" and found["columns"][2].endswith("…")
    path = file_of(tmp_path, PAIRS)
    message = refused(run("patch", "--pairs", path), 2, "not the same", "grid heads or neurons", "2 of the 3")
    assert "line 1" in message and "line 3" in message


def test_a_task_makes_its_own_pairs(run):  # noqa: F811
    ask = ["patch", "--task", "induction", "--count", "2", "--grid", "heads", "-f", "json"]
    one, two = (document(run(*ask, "--seed", seed)) for seed in (0, 1))
    assert one["pairs"] == 2 and one["prompt"]["ids"] != two["prompt"]["ids"]


def test_a_pair_with_an_answer_on_both_sides_is_named(model):
    pairs = [PromptPair(CLEAN, CORRUPTED, ("x",), ("y",), "line 1"), PromptPair("ab", "ac", ("x",), ("x",), "line 2")]
    with pytest.raises(TargetError, match=r"right and wrong.*line 2"):
        read_patch(model, pairs, grid="heads")


def test_unequal_lengths_show_both_tokenisations(model):
    with pytest.raises(PairError, match="clean nothing, corrupted 'g' 'g'"):
        read_patch(model, [PromptPair("a big cat", "a biggg cat", ("x",), ("y",))])


# --- Parquet ----------------------------------------------------------------------------------------------


def test_parquet_without_pyarrow_is_explained(run, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None)
    refused(run(*PATCH, "-o", tmp_path / "x.parquet", "-q"), 2, "pip install mainstem[parquet]")


def test_parquet_holds_every_cell(run, tmp_path):  # noqa: F811
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    assert run(*PATCH, "-o", path)[0] == 0
    found = document(run(*PATCH, "-f", "json"))
    table = pq.read_table(path)
    assert table.column_names == ["row", "column", "value", "effect", "low", "high"]
    assert table["effect"].to_pylist() == [effect for row in found["effects"] for effect in row]
    assert table["row"].to_pylist()[0] == "L0" and table["low"].null_count == len(table)
    kept = json.loads(table.schema.metadata[b"mainstem"])
    assert kept["schema"] == "mainstem/patch/1" and kept["rows"] == found["rows"] and "values" not in kept


def test_parquet_is_for_tables_in_files(run, tmp_path):  # noqa: F811
    refused(run("lens", "abc", "-o", tmp_path / "x.parquet"), 2, "no table")
    refused(run(*PATCH, "-f", "parquet"), 2, "--out")


# --- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["no prompt", "CLEAN and CORRUPTED", "--pairs"]),
        ([CLEAN], ["no corrupted prompt"]),
        ([CLEAN, CORRUPTED, "--task", "induction"], ["two ways"]),
        (["--task", "inductoin"], ["did you mean 'induction'"]),
        (["--task", "induction", "--answer", "x"], ["answers of their own", "--answer"]),
        (["-", "-", "--answer", "x"], ["standard input"]),
        ([*PATCH[1:], "--grid", "residual"], ["did you mean 'resid'"]),
        ([*PATCH[1:], "--metric", "logits"], ["metric"]),
        ([*PATCH[1:], "--direction", "noise"], ["noising"]),
        ([*PATCH[1:], "--window", "2"], ["no window"]),
        ([*PATCH[1:], "--grid", "neurons"], ["needs units"]),
        ([*PATCH[1:], "--memory", "much"], ["512M"]),
        ([*PATCH[1:], "--state", "none/state"], ["--state", "no such directory"]),
        ([CLEAN, CORRUPTED], ["no answer"]),
        ([CLEAN, CLEAN, "--answer", "x"], ["same tokens"]),
        ([CLEAN, "a bigger cat", "--answer", "x"], ["9 tokens", "12"]),
        ([CLEAN, CORRUPTED, "--answer", "xyz"], ["3 tokens"]),
        ([CLEAN, CORRUPTED, "--answer", "x", "--wrong", "x"], ["right and wrong"]),
        (["--pairs", "none.jsonl"], ["none.jsonl"]),
    ],
)
def test_mistakes_are_explained(run, arguments, expected):  # noqa: F811
    refused(run("patch", *arguments), 2, *expected)


def test_the_words_of_the_options_are_those_of_the_engine():
    assert options.METRICS == METRICS and options.GRIDS == GRIDS and options.DIRECTIONS == DIRECTIONS
    assert tuple(TASKS) == options.TASKS and options.size("1G", "--memory") == DEFAULT_MEMORY


# --- what is shown ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_map_is_whole_at_every_width(model, width):
    reading = read_patch(model, [PromptPair(CLEAN, CORRUPTED, ("x",), ("y",))], grid="heads-positions")
    shown = as_text(reading, width)
    assert max(map(len, shown.splitlines())) <= width
    panels = shown.split("Heat map")[1].split("Largest cells")[0]
    for place in range(len(reading.columns)):
        assert str(place) in panels.split()
    assert panels.count("L1H3 ") == panels.count("L0H0 ") >= 1
    assert as_html(reading).count("<rect") > 2 * len(reading.rows) * len(reading.columns)
