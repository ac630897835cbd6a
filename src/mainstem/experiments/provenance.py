"""What a number depends on besides its settings: Mainstem's own sources, the libraries, and the machine.

Results are kept with all three. The digest is over every file of the package but those of commands and reports, which
only ask and show: a result of other sources may differ, even where the version is the same, and is not used again.
"""

import contextlib
import hashlib
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

import mainstem
from mainstem.experiments.outcome import ExperimentProvenance
from mainstem.results.reading import Provenance

LIBRARIES = ("torch", "transformers", "numpy")
LABORATORY = ("tokenizers", "scikit-learn", "pytorch_optimizer")
"""What the laboratory uses besides, where it is installed: byte pairs, digits, an optimiser."""

SHOWN_ONLY = ("cli", "report")


def versions() -> dict[str, str]:
    """Versions of Mainstem, of its sources (`code`), of Python and of the libraries that compute."""
    libraries = {name: version(name) for name in LIBRARIES}
    return {"mainstem": mainstem.__version__, "code": code(), "python": platform.python_version(), **libraries}


def laboratory_versions() -> dict[str, str]:
    """The same and those of what the laboratory uses besides."""
    found = {}
    for name in LABORATORY:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return {**versions(), **found}


@cache
def code() -> str:
    """The first 16 hexadecimal digits of the SHA-256 of all sources that can change a number."""
    root = Path(str(files("mainstem")))
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        inside = path.relative_to(root)
        if inside.parts[0] not in SHOWN_ONLY and "__pycache__" not in inside.parts:
            digest.update(inside.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def machine(device: str = "cpu") -> str:
    """The processor, its cores, the system, and the accelerator if one is used."""
    parts = [_processor(), f"{os.cpu_count()} cores", f"{platform.system()} {platform.machine()}"]
    if device != "cpu":
        import torch

        if device.startswith("cuda"):
            parts.insert(0, torch.cuda.get_device_name(device))
    return ", ".join(parts)


def trained(
    seeds: Sequence[int], device: str, machines: Iterable[str] = (), model: str = "none: trained here"
) -> ExperimentProvenance:
    """The provenance of a result of models that were trained for it, as of now.

    Args:
        seeds: those of the models.
        device: where they were trained.
        machines: that made the numbers; by default this one.
        model: what to say of a model.
    """
    import torch

    return ExperimentProvenance(
        **versions(),
        model=model,
        revision=None,
        dtype="float32",
        device=device,
        seed=seeds[0],
        seeds=list(seeds),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine="; ".join(machines) or machine(device),
        threads=torch.get_num_threads(),
    )


def on_this_machine(found: Provenance) -> ExperimentProvenance:
    """The provenance of a result on a model, with the code and the machine."""
    import torch

    place = {"machine": machine(found.device), "threads": torch.get_num_threads(), "seeds": [found.seed]}
    return ExperimentProvenance(**{**asdict(found), **versions(), **place})


def _processor() -> str:
    """The processor's name, where the system says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
