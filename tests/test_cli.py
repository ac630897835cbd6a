"""The command line: what it prints where, its exit status, and one readable message for every mistake.

Commands run in this process on a tiny model of random weights with a byte-level tokenizer, opened as a user would
open it: from a directory. A few that need a process of their own (signals, pipes, imports) start one.
"""

import contextlib
import dataclasses
import gc
import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import psutil
import pytest
import torch
import transformers
import typer
from safetensors.torch import load_file, save_file

import mainstem
import mainstem.session
from mainstem import cli
from mainstem.cli import collecting, options
from mainstem.cli.app import app
from mainstem.cli.output import check_format
from mainstem.errors import UsageError
from mainstem.results import description, explanation, generation
from mainstem.results import patch as patch_description

SOURCE = Path(mainstem.__file__).parents[1]
DOCS = (SOURCE.parent / "docs" / "command-line.md").read_text(encoding="utf-8")
PROMPT = "the main stem"

QUICK_SCORES = ("increase", "norm", "gradient")
"""Those that are tried with every edit."""


# --- a tiny model with a tokenizer that splits characters into bytes --------------------------------------------


def save_byte_tokenizer(directory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, "th", "Ġm"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("Ġ", "m")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(directory)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model with a tokenizer, not to be changed."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).eval().save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.fixture
def run(capfd, saved, monkeypatch):
    """Runs a command on the tiny model; gives exit status, standard output, standard error."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def command(*arguments, model=None):
        named = [] if model is False else ["--model", str(model or saved)]
        status = cli.run([*map(str, arguments), *named])
        out, err = capfd.readouterr()
        return status, out, err

    return command


def refused(result, status, *expected):
    """A mistake: the exit status, nothing on standard output, and one message that says all of `expected`."""
    code, out, err = result
    assert code == status, err
    assert out == ""
    assert "Traceback" not in err
    message = [line for line in err.splitlines() if line.startswith(("mainstem: ", "Error: "))]
    assert len(message) == 1, err
    assert err.splitlines()[-1] == message[0]
    for text in expected:
        assert text.lower() in message[0].lower(), message[0]
    return message[0]


def in_a_process(*arguments, **options):
    """A command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    command = [sys.executable, "-m", "mainstem", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, text=True, stdin=options.pop("stdin", subprocess.DEVNULL),
        stdout=options.pop("stdout", subprocess.PIPE), stderr=subprocess.PIPE, **options,
    )  # fmt: skip


# --- what is printed where --------------------------------------------------------------------------------


COMMANDS = {
    "explain": ["explain", PROMPT],
    "anatomy": ["anatomy"],
    "shapes": ["anatomy", "--shapes"],
    "lens": ["lens", PROMPT],
    "units": ["lens", PROMPT, "--unit", "L1N3", "--unit", "L1H2@1"],
    "steer": ["steer", PROMPT, "--edit", "zero L0.mlp", "--tokens", "3", "--continuation", "xy"],
    "patch": ["patch", "a big cat", "a bad cat", "--answer", "x", "--wrong", "y"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_json_is_alone_on_standard_output(run, arguments):
    code, out, err = run(*arguments, "--format", "json")
    document = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert code == 0 and document["command"] == arguments[0]
    assert document["provenance"]["model"] == "tiny" and document["provenance"]["seed"] == 0
    assert "Opening" in err and "Discovering" in err and "Warning" not in err


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_quiet_prints_the_result_only(run, arguments):
    code, out, err = run(*arguments, "--quiet")
    assert code == 0 and err == "" and out.startswith(f"mainstem {arguments[0]}\n")
    assert "\x1b" not in out


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_pages(run, arguments, tmp_path):
    path = tmp_path / "page.html"
    code, out, _ = run(*arguments, "--out", path)
    assert (code, out) == (0, "")
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_the_options_of_explain_reach_the_result(run):
    code, out, _ = run(
        "explain", PROMPT, "--target", "m", "--target", "id:5", "--against", "s", "--position", "2",
        "--score", "direct", "--norm", "recompute", "--kinds", "head,sublayer", "--kinds", "ffn_neuron",
        "--negative", "--exhaustive", "--top", "3", "--seed", "7", "--format", "json",
    )  # fmt: skip
    document = json.loads(out)
    assert code == 0
    assert (
        document["target"]["token"]
        == "m | " + json.loads(run("lens", "x", "--tokens", "id:5", "-f", "json")[1])["tokens"][0]["token"]
    )
    assert [rival["token"] for rival in document["against"]] == ["s"]
    assert document["position"] == 2 and document["score"] == "direct" and document["norm"] == "recompute"
    assert document["kinds"] == ["head", "sublayer", "ffn_neuron"] and len(document["values"]) == 3
    assert document["values"][0]["direct"] < 0 and document["provenance"]["seed"] == 7


def test_queries_are_listed_for_each_value(run):
    code, out, _ = run("explain", PROMPT, "--queries", "2", "--top", "20", "--kinds", "ffn_neuron,head", "-f", "json")
    document = json.loads(out)
    neurons = [value["unit"] for value in document["values"] if value["kind"] == "ffn_neuron"]
    assert code == 0 and neurons
    assert [row["of"] for row in document["queries"]] == [unit for unit in neurons for _ in range(2)]
    assert [one["of"] for one in document["query_sums"]] == neurons
    heads = [value["unit"] for value in document["values"] if value["kind"] == "head"]
    assert [one["unit"] for one in document["query_refusals"]] == heads
    assert json.loads(run("explain", PROMPT, "-f", "json")[1])["queries"] == []
    assert run("explain", PROMPT, "--queries", "-1")[0] == 2


def test_the_options_of_lens_reach_the_result(run):
    code, out, _ = run(
        "lens",
        PROMPT,
        "--tokens",
        "m",
        "--tokens",
        "id:9",
        "--position",
        "-2",
        "--norm",
        "frozen",
        "--top",
        "2",
        "-f",
        "json",
    )
    document = json.loads(out)
    assert code == 0 and [token["id"] for token in document["tokens"]][1] == 9
    assert document["norm"] == "frozen" and document["position"] == len(document["prompt"]["ids"]) - 2
    assert all(len(state["top"]) == 2 and len(state["course"]) == 2 for state in document["states"])


def test_units_are_read_and_courses_drawn(run, tmp_path):
    path = tmp_path / "course.svg"
    code, out, _ = run(
        "lens", PROMPT, "--tokens", "m", "--unit", "L1N3", "--unit", "embed", "--figure", path, "-f", "json"
    )
    document = json.loads(out)
    assert code == 0 and [unit["unit"] for unit in document["units"]] == ["L1N3", "embed"]
    for unit in document["units"]:
        assert len(unit["promotes"]) == len(unit["suppresses"]) == 5 and len(unit["sigmoids"]) == 1
        assert unit["null"]["directions"] == 200 and unit["null"]["null_max_mean"] > 0
    assert path.read_text(encoding="utf-8").startswith("<svg xmlns=")
    code, _, err = run("lens", PROMPT, "--figure", tmp_path / "no" / "course.svg")
    assert code == 2 and "--figure" in err
    code, _, err = run("lens", PROMPT, "--unit", "L1N999")
    assert code == 2 and "L1N0 to L1N23" in err
    course = [state["course"][0] for state in document["states"]]
    assert all(math.log(row["probability"]) == pytest.approx(row["log_probability"], abs=1e-5) for row in course)


@pytest.mark.parametrize(
    "score", [pytest.param(s, marks=() if s in QUICK_SCORES else pytest.mark.slow) for s in options.SCORES]
)
def test_every_score_ranks_and_is_shown(run, score, tmp_path):
    code, out, _ = run("explain", PROMPT, "--score", score, "--top", "4", "-f", "json")
    document = json.loads(out)
    listed = [value["score"] for value in document["values"]]
    assert code == 0 and document["score"] == score and len(listed) == 4
    assert listed == pytest.approx(sorted(listed, reverse=True), abs=1e-4)
    assert f"▾{score}" in run("explain", PROMPT, "--score", score)[1]
    assert run("explain", PROMPT, "--score", score, "-o", tmp_path / "page.html")[0] == 0
    assert f"{score} ▾" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_lens_ends_at_the_models_own_prediction(run):
    lens = json.loads(run("lens", PROMPT, "-f", "json")[1])
    target = json.loads(run("explain", PROMPT, "-f", "json")[1])["target"]
    last = lens["states"][-1]
    assert last["top"][0]["id"] == target["id"] == lens["tokens"][0]["id"]
    assert last["course"][0]["log_probability"] == pytest.approx(target["log_probability"], abs=1e-4)
    assert last["course"][0]["before_softmax"] == pytest.approx(last["course"][0]["logit"], abs=1e-4)
    assert lens["certificate"]["last_state"] < 1e-4


def test_before_softmax_values_add_up_along_the_stream(run):
    """What each sublayer adds before the softmax is its direct attribution, to the last digit that a float has."""
    lens = json.loads(run("lens", PROMPT, "-f", "json")[1])
    layers = json.loads(run("explain", PROMPT, "-f", "json")[1])["layers"]
    course = [state["course"][0]["before_softmax"] for state in lens["states"]]
    added = [course[0], *(b - a for a, b in zip(course, course[1:], strict=False))]
    assert added == pytest.approx([row["direct"] for row in layers], abs=1e-5)


def test_the_account_and_the_layers_add_up(run):
    document = json.loads(run("explain", PROMPT, "-f", "json")[1])
    account = document["account"]
    assert sum(v for name, v in account.items() if name != "total") == pytest.approx(account["total"], abs=1e-5)
    increases = sum(row["log_probability_increase"] for row in document["layers"])
    assert increases == pytest.approx(document["target"]["log_probability"], abs=1e-4)
    certificate = document["certificate"]
    assert certificate["holds"] and certificate["labels"]["holds"] and certificate["reads"]["holds"]


def test_prompts_as_ids(run):
    ids = json.loads(run("lens", PROMPT, "-f", "json")[1])["prompt"]["ids"]
    for given in (" ".join(map(str, ids)), json.dumps(ids)):
        prompt = json.loads(run("lens", given, "--ids", "-f", "json")[1])["prompt"]
        assert prompt["ids"] == ids and prompt["text"] is None


def test_standard_input_loses_one_line_break(monkeypatch):
    import io

    from mainstem.cli.running import Run

    for given, prompt in ((b"a b\n", "a b"), (b"a\n\n", "a\n"), (b"a\r\n", "a"), (b"", "")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        assert Run(options.Common()).prompt("-") == prompt


def test_seeds_change_the_units_that_are_checked_and_nothing_else(run):
    one, two = (json.loads(run("explain", PROMPT, "--seed", seed, "-f", "json")[1]) for seed in (1, 2))
    assert one["values"] == two["values"] and one["certificate"]["labels"] != two["certificate"]["labels"]


def test_a_file_is_written_whole_or_not_at_all(run, tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    assert run("lens", PROMPT, "-o", path)[:2] == (0, "")
    before = path.read_text(encoding="utf-8")
    assert json.loads(before)["command"] == "lens"
    assert run("lens", "", "-o", path)[0] == 2  # fails after the file was found to be writable
    assert path.read_text(encoding="utf-8") == before
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]
    assert run("lens", PROMPT, "-o", path, "-f", "table")[0] == 0  # the option is stronger than the ending
    assert path.read_text(encoding="utf-8").startswith("mainstem lens\n")


def test_a_file_keeps_its_mode_and_its_link(run, tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    assert run("lens", PROMPT, "-o", link)[0] == 0
    assert link.is_symlink() and json.loads(real.read_text()) and real.stat().st_mode & 0o777 == 0o640


def test_no_network_and_no_cache_are_needed_for_a_directory(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path / "none"))
    assert run("lens", PROMPT)[0] == 0


# --- mistakes: one message, no traceback --------------------------------------------------------------------


MISTAKES = {
    "empty prompt": (["explain", ""], 2, "empty", "at least one token"),
    "long prompt": (["explain", "x" * 33], 2, "33 tokens", "context 32", "Shorten"),
    "id outside": (["explain", "5 999", "--ids"], 2, "999", "vocabulary", "0 to 257"),
    "negative id": (["explain", "5,-3", "--ids"], 2, "-3", "vocabulary"),
    "no id": (["explain", "five", "--ids"], 2, "'five'", "token id"),
    "position after": (["explain", PROMPT, "--position", "40"], 2, "position 40", "Use 0 to"),
    "position before": (["lens", PROMPT, "--position", "-40"], 2, "position -40", "counted from the end"),
    "position no number": (["explain", PROMPT, "--position", "last"], 2, "--position", "integer"),
    "score": (["explain", PROMPT, "--score", "aditive"], 2, "'aditive'", "Did you mean 'additive'?"),
    "norm": (["explain", PROMPT, "--norm", "frosen"], 2, "'frosen'", "Did you mean 'frozen'?"),
    "lens norm": (["lens", PROMPT, "--norm", "x"], 2, "'x'", "frozen, recompute"),
    "kind": (["explain", PROMPT, "--kinds", "heads"], 2, "'heads'", "Did you mean 'head'?"),
    "no kind": (["explain", PROMPT, "--kinds", ","], 2, "nothing to list"),
    "score and norm": (["explain", PROMPT, "--score", "additive", "--norm", "recompute"], 2, "frozen norm only"),
    "format": (["explain", PROMPT, "--format", "yaml"], 2, "'yaml'", "table, json, html"),
    "option": (["explain", PROMPT, "--colour"], 2, "--colour"),
    "top": (["explain", PROMPT, "--top", "0"], 2, "--top"),
    "verb": (["explian", PROMPT], 2, "explian"),
    "no prompt": (["explain"], 2, "PROMPT"),
    "two prompts": (["explain", "a", "b"], 2, "b"),
    "two tokens": (["explain", PROMPT, "--target", "xy"], 2, "'xy' is 2 tokens", "'x' (id:", "Name one of them"),
    "emoji target": (["explain", PROMPT, "--target", "😀"], 2, "is 4 tokens", "ð"),
    "empty target": (["explain", PROMPT, "--target", ""], 2, "empty"),
    "target id": (["explain", PROMPT, "--target", "id:258"], 2, "258", "0 to 257"),
    "no target id": (["explain", PROMPT, "--target", "id:x"], 2, "id:x", "whole number"),
    "own rival": (["explain", PROMPT, "--target", "m", "--against", "m"], 2, "its own rival"),
    "two rival tokens": (["explain", PROMPT, "--against", "xy"], 2, "is 2 tokens"),
    "empty prompt for shapes": (["anatomy", ""], 2, "empty", "at least one token"),
    "lens token": (["lens", PROMPT, "--tokens", "xy"], 2, "is 2 tokens"),
    "chat": (["explain", PROMPT, "--chat"], 2, "chat template", "--chat"),
    "chat and ids": (["explain", "1 2", "--chat", "--ids"], 2, "--chat", "--ids"),
    "dtype": (["explain", PROMPT, "--dtype", "fp12"], 2, "'fp12'", "float32"),
    "device": (["explain", PROMPT, "--device", "tpu"], 2, "'tpu'", "cpu"),
    "revision": (["explain", PROMPT, "--revision", "main"], 2, "revision"),
    "surrogate": (["explain", "a\udc80"], 2, "not valid UTF-8"),
    "out in no directory": (["explain", PROMPT, "--out", "/no/such/place/x.json"], 2, "no such directory", "mkdir"),
    "out is a directory": (["explain", PROMPT, "--out", "/tmp"], 2, "is a directory"),
}


@pytest.mark.parametrize(
    ("arguments", "status", "expected"), [(a, s, e) for a, s, *e in MISTAKES.values()], ids=MISTAKES
)
def test_mistakes(run, arguments, status, expected):
    refused(run(*arguments), status, *expected)


@pytest.mark.parametrize("name", ["score", "norm", "kind", "format", "out in no directory"])
def test_mistakes_that_need_no_model_are_found_before_it_is_opened(run, name, monkeypatch):
    monkeypatch.setattr(mainstem, "open", lambda *a, **o: pytest.fail("the model was opened"))
    arguments, status, *expected = MISTAKES[name]
    refused(run(*arguments), status, *expected)


NEED_NO_ANATOMY = [
    *["empty prompt", "long prompt", "id outside", "negative id", "position after", "position before", "no kind"],
    *["score and norm", "two tokens", "emoji target", "empty target", "target id", "no target id", "own rival"],
    *["two rival tokens", "lens token", "chat", "empty prompt for shapes"],
]


@pytest.mark.parametrize("name", NEED_NO_ANATOMY)
def test_mistakes_that_the_tokenizer_shows_are_found_before_discovery(run, name, monkeypatch):
    monkeypatch.setattr(mainstem.session, "discover", lambda *a, **o: pytest.fail("the stream was discovered"))
    arguments, status, *expected = MISTAKES[name]
    refused(run(*arguments), status, *expected)


def test_sources_that_are_no_model(run, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(run("explain", PROMPT, model=tmp_path / "empty"), 1, "config.json")
    refused(run("explain", PROMPT, model=tmp_path / "none"), 1, "no such file or directory")
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\x00" * 20)
    refused(run("explain", PROMPT, model=tmp_path / "x.gguf"), 1, "GGUF", "truncated or damaged")
    refused(run("explain", PROMPT, "--model", "", model=False), 2, "empty")


def test_damaged_weights(run, directory):
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    refused(run("explain", PROMPT, model=directory), 1, "truncated or damaged", "fetch it again")


def test_nan_in_the_weights_names_the_layer(run, directory):
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    refused(run("explain", PROMPT, model=directory), 1, "model.layers.1.mlp.up_proj")


def test_infinity_in_the_run_names_the_layer(run, directory):
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][:] *= 1e36  # finite numbers, whose product is not
    weights["model.layers.1.mlp.down_proj.weight"][:] *= 1e36
    save_file(weights, path, metadata={"format": "pt"})
    refused(run("explain", PROMPT, model=directory), 1, "NaN or infinity", "model.layers.1.mlp")


@pytest.mark.slow
def test_a_model_without_a_tokenizer_takes_ids(run, directory):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    refused(run("explain", PROMPT, model=directory), 2, "without a tokenizer")
    code, out, _ = run("explain", "5 6 7", "--ids", "-f", "json", model=directory)
    assert code == 0 and json.loads(out)["prompt"]["tokens"] == ["id:5", "id:6", "id:7"]
    refused(run("lens", "5 6", "--ids", "--tokens", "x", model=directory), 2, "id:7042")
    for verb, option in (("lens", "--tokens"), ("explain", "--target"), ("explain", "--against")):
        assert run(verb, "5 6", "--ids", option, "id:9", model=directory)[0] == 0
        refused(run(verb, "5 6", "--ids", option, "id:258", model=directory), 2, "258", "0 to 257")
        refused(run(verb, "5 6", "--ids", option, "id:-1", model=directory), 2, "-1")
    assert run("anatomy", "--shapes", model=directory)[0] == 0


def test_text_that_the_tokenizer_splits_inside_a_character_is_explained(run):
    """Pieces of a character are shown in the vocabulary's own spelling, every one of them."""
    for form in ("table", "json", "html"):
        code, out, _ = run("explain", "a 😀é", "--format", form)
        assert code == 0
    tokens = json.loads(run("explain", "a 😀é", "-f", "json")[1])["prompt"]["tokens"]
    assert len(tokens) == 8 and "\N{REPLACEMENT CHARACTER}" not in "".join(tokens)


def test_a_file_that_cannot_be_written(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    code, out, err = run("lens", PROMPT, "-q", "-o", tmp_path / "x.json")
    refused((code, out, err), 1, "No space left", "x.json")
    assert list(tmp_path.iterdir()) == []


def test_memory_that_runs_out_is_said(run, monkeypatch):
    class OutOfMemoryError(RuntimeError):
        pass

    for error in (MemoryError(), OutOfMemoryError("CUDA out of memory")):

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(mainstem, "open", fail)
        refused(run("explain", PROMPT), 1, "memory", "--dtype bfloat16")


def test_a_bug_shows_itself(run, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(mainstem, "open", fail)
    with pytest.raises(ZeroDivisionError):
        run("explain", PROMPT)


# --- processes --------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy_and_is_quick():
    code = (
        "import sys; from mainstem.cli import run; status = run(['--help']); "
        "assert not {'torch', 'transformers', 'numpy', 'rich.table'} & set(sys.modules); sys.exit(status)"
    )
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        assert all(verb in done.stdout for verb in ("explain", "anatomy", "lens"))
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.4  # of processor time, which other processes change less than the clock


def test_version():
    for arguments in (["--version"], ["explain", "--version"], ["lens", "--version"], ["anatomy", "--version"]):
        with in_a_process(*arguments) as process:
            assert process.communicate()[0] == f"mainstem {mainstem.__version__}\n" and process.returncode == 0


def wait_until_idle(pid: int) -> None:
    """Returns when a process has used no processor time for half a second, after some."""
    spent, watched = -1.0, psutil.Process(pid)
    while (now := sum(watched.cpu_times()[:2])) != spent or not now:
        spent = now
        time.sleep(0.5)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupted():
    def minded() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it, and so do its children

    with in_a_process("explain", "-", stdin=subprocess.PIPE, preexec_fn=minded) as process:
        wait_until_idle(process.pid)  # it reads the prompt, and there is none
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    # Python ends by the signal itself where it hits while a dataclass is made; a shell shows 130 for both.
    assert process.returncode in (130, -signal.SIGINT)
    assert (out, err) == ("", "mainstem: interrupted\n")


def test_interrupted_before_a_command_runs(monkeypatch, capsys):
    from mainstem.cli import app, run

    def leaves(**_):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(130)  # as the library of the command line does, without a word

    monkeypatch.setattr(app, "app", leaves)
    assert run(["explain", "-"]) == 130 and capsys.readouterr().err == "mainstem: interrupted\n"


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_the_command_silently(saved):
    for arguments in (["anatomy", "-f", "json", "-q", "--model", saved], ["lens", PROMPT, "-q", "--model", saved]):
        reading, writing = os.pipe()
        os.close(reading)
        with in_a_process(*arguments, stdout=writing) as process:
            os.close(writing)
            _, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (141, "")


@pytest.mark.slow
def test_a_process_from_standard_input_to_a_page(saved):
    with in_a_process("lens", "-", "-f", "html", "--model", saved, stdin=subprocess.PIPE) as process:
        out, err = process.communicate("the ste\n", timeout=300)
    assert process.returncode == 0 and out.rstrip().endswith("</html>")
    assert [line for line in err.splitlines() if not line.endswith("...")] == []


# --- the default model ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_default_model(run, demo_directory):
    code, out, _ = run("explain", "The capital of France is", "-f", "json", model="demo")
    document = json.loads(out)
    assert code == 0
    assert document["target"]["token"] == " Paris" and document["target"]["probability"] == pytest.approx(
        0.77, abs=0.01
    )
    certificate = document["certificate"]
    assert certificate["holds"] and certificate["relative_error"] < 1e-5
    assert certificate["labels"]["holds"] and certificate["reads"]["holds"]
    assert {"sink", "first-token", "tied", "chat"} <= {warning["code"] for warning in document["warnings"]}


@pytest.mark.slow
def test_the_default_model_in_tables(run, demo_directory, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = run("explain", "The capital of France is", "--against", " London", "-q", model="demo")
    assert (code, err) == (0, "")
    assert "0 The  1 ␣capital  2 ␣of  3 ␣France  4 [␣is]" in out
    assert "L23H4@3" in out and "␣France" in out and "✗" not in out
    code, out, _ = run("anatomy", "--shapes", "-q", model="demo")
    assert code == 0 and "L0 … L29   30 blocks alike" in out and "silu(gate) up" in out and "[1, 9, 5, 64]" in out
    code, out, _ = run("explain", "Paris is", "--chat", "-q", model="demo")
    assert code == 0 and "<|im_start|>" in out and "raw text" not in out


# --- the documentation ------------------------------------------------------------------------------------


def commands(group=None, before=""):
    """(name, command) of every command, those under a common word too (`basis report`)."""
    for name, command in (group or typer.main.get_command(app)).commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def sections():
    """The documentation's sections by their titles."""
    parts = re.split(r"^## (.+)$", DOCS, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_verb_and_option_is_documented():
    common = sections()["Options of every command"]
    for name, command in commands():
        own = sections()[name]
        for parameter in command.params:
            for option in [*parameter.opts, *parameter.secondary_opts]:
                place = common if parameter.name in options.Common.names() else own
                if option.startswith("-") and parameter.name != "help":
                    assert f"`{option}`" in place, f"{option} of {name} is not in docs/command-line.md"
    assert "`--help`" in common and "`-h`" in common


def test_every_command_takes_the_formats_that_its_help_names(monkeypatch):
    """No other: neither by name nor by the ending of a file."""
    monkeypatch.setattr("mainstem.report.parquet.require_pyarrow", lambda: None)
    for name, command in commands():
        named = {parameter.name: parameter for parameter in command.params}
        words = named["format"].metavar.split("|")
        if name in options.DIRECTORIES:  # what it writes there is no document
            assert named["out"].metavar == "DIR" and words == list(options.FORMATS)
            continue
        assert set(words) - {"table"} == set(re.findall(r"\.([a-z]+)", named["out"].help)), name
        for suffix, form in options.SUFFIXES.items():
            for common in (options.Common(format=form, out=Path("x")), options.Common(out=Path(f"x{suffix}"))):
                with contextlib.nullcontext() if form in words else pytest.raises(UsageError, match=name):
                    check_format(name, common)


def test_every_documented_option_exists():
    known = {option for _, command in commands() for parameter in command.params for option in parameter.opts}
    for option in re.findall(r"^\| `(--[a-z-]+)`", DOCS, flags=re.M):
        assert option in known | {"--help"}, option


def fields(kind, seen=()):
    """The names of all fields of a dataclass and of the dataclasses in it."""
    names = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        names.append(field.name)
        pending = [hints[field.name]]
        while pending:
            hint = pending.pop()
            if dataclasses.is_dataclass(hint) and hint not in seen:
                names += fields(hint, (*seen, hint))
            pending += typing.get_args(hint)
    return names


@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        ("explain", explanation.Explanation),
        ("anatomy", description.AnatomyDescription),
        ("lens", description.LensReading),
        ("steer", generation.Compared),
        ("patch", patch_description.PatchReading),
    ],
)
def test_every_key_of_json_is_documented(verb, kind):
    text = sections()["JSON"]
    general, *parts = re.split(r"^### (.+)$", text, flags=re.M)
    own = dict(zip(parts[0::2], parts[1::2], strict=True))[verb]
    for name in ["schema", "command", *fields(kind)]:
        # In its own section or the general one, in code or among the keys of a row.
        assert re.search(rf"\b{name}\b", general + own), f"{name} of {verb} is not in docs/command-line.md"


def test_a_key_that_is_missing_would_be_noticed():
    assert "before_softmax" in fields(description.LensReading) and "worst_dimension" in fields(explanation.Explanation)
    assert not re.search(r"\bbefore_hardmax\b", sections()["JSON"])


@pytest.mark.slow
def test_documents_hold_the_documented_words(run):
    """Keys of plain dictionaries (sizes, account, search, model, prompt) are documented, too."""
    text = sections()["JSON"]
    for arguments in COMMANDS.values():
        document = json.loads(run(*arguments, "-f", "json")[1])
        for key in ("model", "prompt", "sizes", "account", "search"):
            for name in document.get(key) or {}:
                assert f"`{name}`" in text, f"{key}.{name}"


def test_the_words_of_the_options_are_those_of_the_analysis():
    from mainstem.analysis.ranking import KIND_LEVELS
    from mainstem.analysis.readout import NORMS
    from mainstem.analysis.scores import RANKINGS
    from mainstem.explain.explaining import DEFAULT_KINDS

    assert options.SCORES == RANKINGS and options.NORMS == NORMS
    assert tuple(KIND_LEVELS) == options.KINDS and options.DEFAULT_KINDS == DEFAULT_KINDS


def test_the_defaults_of_the_options_are_those_of_the_session():
    import inspect

    from mainstem.explain.explaining import explain
    from mainstem.read.lens_reading import read_lens

    for verb, function in (("explain", explain), ("lens", read_lens)):
        own = inspect.signature(function).parameters
        command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
        for parameter in command.params:
            if parameter.name in own and parameter.default not in (None, [], ()):
                assert parameter.default == own[parameter.name].default, (verb, parameter.name)


@pytest.mark.slow
def test_a_continuation_and_a_direction_can_be_asked_for(run, tmp_path):
    from safetensors.torch import save_file

    document = json.loads(run("explain", PROMPT, "--continuation", "xyz", "--top", "2", "-f", "json")[1])
    assert document["target_kind"] == "continuation" and [step["token"] for step in document["steps"]] == list("xyz")
    assert [len(value["steps"]) for value in document["values"]] == [3, 3]
    assert document["target"]["log_probability"] == pytest.approx(sum(s["log_probability"] for s in document["steps"]))
    save_file({"probe": torch.ones(document["model"]["d_model"])}, tmp_path / "probe.safetensors")
    path = str(tmp_path / "probe.safetensors")
    document = json.loads(run("explain", PROMPT, "--direction", path, "-f", "json")[1])
    assert document["score"] == "direct" and document["target"]["probability"] is None
    for form in ("table", "html"):
        for more in (["--direction", path], ["--continuation", "xyz"]):
            code, out, _ = run("explain", PROMPT, *more, "--format", form)
            assert code == 0 and out
    refused(run("explain", PROMPT, "--direction", path, "--score", "increase"), 2, "no probability", "direct")
    refused(run("explain", PROMPT, "--direction", str(tmp_path / "none")), 2, "no such file", "L27N846")
    document = json.loads(run("explain", PROMPT, "--direction", "L1N3", "-f", "json")[1])
    assert document["target"]["token"] == "input of L1N3" and any("L1N3 reads" in note for note in document["notes"])
    refused(run("explain", PROMPT, "--direction", "L1H0"), 2, "no one direction")
    refused(run("explain", PROMPT, "--continuation", "xy", "--target", "m"), 2, "mixes")
    refused(run("explain", PROMPT, "--continuation", "xy", "--verify"), 2, "one for each of its tokens", "--verify")


# --- garbage ------------------------------------------------------------------------------------------------


def test_garbage_is_looked_for_as_usual_once_the_model_is_there() -> None:
    usual = gc.get_threshold()
    collecting.as_usual()
    assert gc.get_threshold() == usual
    collecting.rarely()
    try:
        assert gc.get_threshold()[0] == collecting.RARELY[0]
        collecting.as_usual()
        assert gc.get_threshold() == usual
    finally:
        gc.set_threshold(*usual)


@pytest.mark.parametrize("model, status", [("model", 0), ("none", 1)])
def test_also_where_it_cannot_be_opened(run, model: str, status: int) -> None:
    usual = gc.get_threshold()
    collecting.rarely()
    try:
        found = run("anatomy") if model == "model" else run("anatomy", model="/nowhere/at/all")
        assert found[0] == status and gc.get_threshold() == usual
    finally:
        collecting.as_usual()
