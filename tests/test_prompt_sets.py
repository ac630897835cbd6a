"""`--pairs` and `--task` of explain, lens and steer: means of what each prompt gives alone, refusals, reports."""

import json
import weakref

import pytest
import torch

import mainstem
from mainstem.analysis.statistics import interval
from mainstem.errors import CertificateError, PairError, TokenError
from mainstem.intervene.patch_reading import read_patch
from mainstem.lab.pairs import PromptPair
from mainstem.many import prompt_sets
from mainstem.many.set_explaining import explain_set
from mainstem.many.set_lens import read_lens_set
from mainstem.many.set_steering import compare_set
from mainstem.read.lens_reading import read_lens
from mainstem.report import as_html, as_json, as_text
from tests.test_cli import directory, refused, run, saved  # noqa: F401 (fixtures)

PAIRS = [
    PromptPair("a big cat", "a bad cat", ("x",), ("y",), "line 1 of p.jsonl"),
    PromptPair("a red dog sat", "a rad dog sat", ("s", "t"), ("y",), "line 2 of p.jsonl"),
    PromptPair("my old hat", "my odd hat", ("x",), ("z",), "line 3 of p.jsonl"),
]
COMMANDS = {"explain": [], "lens": [], "steer": ["--edit", "zero L0H1", "--tokens", "2"]}


@pytest.fixture(scope="module")
def model(saved):  # noqa: F811
    return mainstem.open(saved)


@pytest.fixture
def file(tmp_path):
    lines = [
        {"clean": p.clean, "corrupted": p.corrupted, "answers": p.answers, "wrong": p.wrong_answers} for p in PAIRS
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


# --- explain ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("score", ["increase", "additive", "direct"])
@pytest.mark.parametrize("negative", [False, True])
def test_means_are_those_of_every_unit_on_every_prompt(model, score, negative):
    """Against the explanations that list every unit: the means, and that nothing missing is beyond `elsewhere`."""
    found = explain_set(model, PAIRS, score=score, top=4, negative=negative)
    best, sign = (min, -1) if negative else (max, 1)
    table: dict[str, list[float]] = {}
    for pair in PAIRS:
        whole = model.explain(
            pair.clean, target=pair.answers, against=pair.wrong_answers, score=score, top=10_000, negative=negative
        )
        own: dict[str, float] = {}
        for value in whole.values:
            name = value.unit.partition("@")[0] + ("@" if "@" in value.unit else "")
            own[name] = value.score if name not in own else best(own[name], value.score)
        for name, value in own.items():
            table.setdefault(name, []).append(value)
    for row in found.rows:
        mean = row.means[score]
        assert mean.mean == pytest.approx(sum(table[row.name]) / 3, abs=2e-5)
        assert mean.low <= mean.mean <= mean.high
        assert (row.sources is not None) == row.name.endswith("@") and 1 <= row.listed <= 3
    order = [sign * row.means[score].mean for row in found.rows]
    assert order == sorted(order, reverse=True)
    missing = [sum(values) / 3 for name, values in table.items() if name not in {row.name for row in found.rows}]
    assert missing and found.elsewhere is not None
    assert all(sign * mean <= sign * found.elsewhere + 1e-4 for mean in missing)


def test_intervals_are_those_of_patch(model):
    found = explain_set(model, PAIRS, top=3)
    own = [prompt.found["probability"] for prompt in found.prompts]
    made = interval(own, model.seed)
    mean = found.outcomes[0].means["probability"]
    assert (mean.mean, mean.low, mean.high) == (made.mean, made.low, made.high)
    assert found.stability is not None and -1 <= found.stability.half <= 1


@pytest.mark.slow
def test_verdicts_are_counted(model):
    found = explain_set(model, PAIRS[:2], top=3, ablate={"ffn": 2, "attention": 2})
    assert sum(found.verdicts.values()) == 2 and set(found.outcomes[0].means) == {
        "probability", "without the top units", "lost",
    }  # fmt: skip
    assert "of 2" in as_text(found)


# --- lens and steer ---------------------------------------------------------------------------------------


def test_lens_means(model):
    found = read_lens_set(model, PAIRS)
    for i, row in enumerate(found.rows):
        logs = []
        for pair in PAIRS:
            made = read_lens(model.trace(pair.clean), pair.answers)
            assert made.states[i].unit == row.name
            logs.append(torch.tensor([one.log_probability for one in made.states[i].course]).logsumexp(0))
        assert row.means["log_probability"].mean == pytest.approx(float(sum(logs)) / 3, abs=1e-5)
    assert set(found.rows[0].means) == {"log_probability", "rank", "wrong_log_probability", "wrong_rank"}
    assert found.stability is not None and found.stability.splits == 100


def test_steer_means_are_paired(model):
    edit = model.edit("zero L0H1")
    found = compare_set(model, PAIRS, [edit], count=2, continuations=["xy"])
    assert [row.name for row in found.rows] == ["answers", "wrong answers", "xy"]
    moved = []
    for pair in PAIRS:
        made = model.compare(pair.clean, edit, count=1, continuations=pair.answers)
        plain, edited = (
            sum(torch.tensor(getattr(one, side)).exp().item() for one in made.continuations)
            for side in ("plain", "edited")
        )
        moved.append(edited - plain)
    made, mean = interval(moved, model.seed), found.rows[0].means["difference"]
    assert (mean.mean, mean.low, mean.high) == pytest.approx((made.mean, made.low, made.high), abs=1e-7)
    assert any(moved)


def test_no_edit_changes_nothing(model):
    found = compare_set(model, PAIRS, [], count=1)
    assert all(
        (row.means["difference"].mean, row.means["difference"].low, row.means["difference"].high) == (0, 0, 0)
        for row in found.rows
    )


# --- one prompt, and prompts that fail --------------------------------------------------------------------


def test_one_prompt_has_no_interval_and_says_why(model):
    for made in (explain_set(model, PAIRS[:1]), read_lens_set(model, PAIRS[:1]), compare_set(model, PAIRS[:1], [])):
        means = [mean for row in made.rows for mean in row.means.values()]
        assert means and all(mean.low is mean.high is None for mean in means) and made.stability is None
        assert any("no interval" in note for note in made.notes)
        assert as_html(made) and as_text(made)


def test_few_prompts_are_said_with_their_number(model):
    words = ("big", "red", "old", "odd", "shy")
    pairs = [PromptPair(f"{word} cat", f"{word} bat", ("x",), ("y",)) for word in words]
    for command in (explain_set, read_lens_set, lambda m, own: compare_set(m, own, [], count=1)):
        few, enough = command(model, pairs[:4]), command(model, pairs)
        warning = next(w for w in few.warnings if w["code"] == "few-prompts")
        assert warning["value"] == 4 and warning["prompts"] == 4 and "4 prompts" in warning["text"]
        assert all(w["code"] != "few-prompts" for w in enough.warnings)
    codes = [[w["code"] for w in read_patch(model, pairs[:n], grid="heads").warnings] for n in (1, 2, 5)]
    assert ["few-prompts" in one for one in codes] == [False, True, False]


def test_each_prompt_is_traced_in_both_passes_which_show_progress(model, monkeypatch):
    traced, seen, trace = [], [], model.trace
    monkeypatch.setattr(model, "trace", lambda prompt, *a, **o: traced.append(prompt) or trace(prompt, *a, **o))
    made = explain_set(model, PAIRS, progress=lambda done, of: seen.append((done, of)))
    assert traced == 2 * [pair.clean for pair in PAIRS]
    assert seen == [(done, 6) for done in range(1, 7)]
    assert any(f"over the {len(made.rows)} units" in note for note in made.notes)


def test_no_more_runs_are_kept_for_more_prompts(model, monkeypatch):
    runs, alive, trace = [], [], model.trace

    def traced(*args, **options):
        made = trace(*args, **options)
        runs.append(weakref.ref(made))
        return made

    def count(done, of):
        alive.append(sum(one() is not None for one in runs))

    monkeypatch.setattr(model, "trace", traced)
    explain_set(model, PAIRS, progress=count)
    assert len(runs) == 2 * len(PAIRS) and max(alive) <= 1


def test_a_prompt_without_a_certificate_is_left_out_and_named(model, monkeypatch):
    trace = model.trace

    def failing(prompt, *args, **options):
        if prompt == PAIRS[1].clean:
            raise CertificateError("The parts are not what the model computed", "L1.mlp")
        return trace(prompt, *args, **options)

    monkeypatch.setattr(model, "trace", failing)
    found = read_lens_set(model, PAIRS)
    assert [prompt.counted for prompt in found.prompts] == [True, False, True] and found.counted == 2
    assert "L1.mlp" in found.prompts[1].failed
    assert any("1 of 3" in note and "line 2 of p.jsonl" in note for note in found.notes)
    monkeypatch.undo()
    others = read_lens_set(model, [PAIRS[0], PAIRS[2]])
    assert [row.means for row in found.rows] == [row.means for row in others.rows]
    monkeypatch.setattr(model, "trace", lambda *a, **o: failing(PAIRS[1].clean))
    with pytest.raises(CertificateError):
        read_lens_set(model, PAIRS)


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"answers": ["xyz"]}, "answers"), ({"wrong": ["xyz"]}, "wrong"), ({"wrong": ["x"]}, "wrong"),
     ({"clean": "a" * 99}, "clean"), ({"answers": [9999]}, "answers")],
)  # fmt: skip
@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_line_is_refused_before_any_run(run, file, monkeypatch, command, changes, field):  # noqa: F811
    lines = file.read_text(encoding="utf-8").split("\n")
    lines[1] = json.dumps({**json.loads(lines[1]), "answers": ["x"], **changes})
    file.write_text("\n".join(lines), encoding="utf-8")
    _no_discovery(monkeypatch)
    refused(run(command, *COMMANDS[command], "--pairs", file), 2, "line 2 of p.jsonl", f"field '{field}'")


def _no_discovery(monkeypatch):
    def discovered(self):
        raise AssertionError("the structure was discovered before the refusal")

    monkeypatch.setattr(mainstem.Model, "anatomy", property(discovered))


def test_patch_refuses_wrong_pairs_before_discovery(run, file, monkeypatch):  # noqa: F811
    _no_discovery(monkeypatch)
    refused(run("patch", "--pairs", file), 2, "not the same")
    refused(run("patch", "a cat", "a bad cat", "--answer", "x", "--wrong", "y"), 2, "tokens")


def test_prompts_in_two_ways_or_none(run, file):  # noqa: F811
    refused(run("lens"), 2, "There is no prompt")
    refused(run("lens", "a cat", "--pairs", file), 2, "two ways")
    refused(run("explain", "--pairs", file, "--target", "x"), 2, "--target")
    refused(run("lens", "--task", "inductoin"), 2, "induction")
    with pytest.raises(PairError):
        prompt_sets.check_pairs(None, [])


def test_the_python_entry_points_name_the_line(model):
    with pytest.raises(TokenError, match="line 1 of p.jsonl"):
        explain_set(model, [PromptPair("a cat", "a bat", ("xyz",), (), "line 1 of p.jsonl")])


# --- commands and reports ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_format(run, file, tmp_path, command):  # noqa: F811
    code, out, err = run(command, *COMMANDS[command], "--pairs", file, "-f", "json")
    assert code == 0, err
    found = json.loads(out)
    assert found["schema"] == f"mainstem/{command}-prompts/1" and found["command"] == command
    assert found["counted"] == 3 and [row["where"] for row in found["prompts"]][1] == "line 2 of p.jsonl"
    code, out, err = run(command, *COMMANDS[command], "--pairs", file)
    assert code == 0 and "means over prompts" in out and "line 3 of p.jsonl" in out and "95 %" in out
    page = tmp_path / "page.html"
    assert run(command, *COMMANDS[command], "--pairs", file, "-o", page)[0] == 0
    assert "<svg" in page.read_text(encoding="utf-8")


def test_a_task_makes_the_prompts(run):  # noqa: F811
    code, out, err = run("lens", "--task", "induction", "--count", "3", "-f", "json")
    assert code == 0, err
    assert json.loads(out)["counted"] == 3


def test_what_a_file_says_is_escaped(model):
    made = compare_set(model, [PromptPair("<b>", "<c>", ("x",), (), "line 1 of <script>.jsonl")], [], count=1)
    assert "<script>.jsonl" not in as_html(made).partition("<body")[2].partition("<script")[0]
    assert json.loads(as_json(made))["prompts"][0]["where"] == "line 1 of <script>.jsonl"
