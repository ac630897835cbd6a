"""Opening a model: from a name, a directory, a file or an object to a module that can be run.

    demo                       the default model, fetched once and cached (see `demo`)
    a directory                config.json with safetensors weights, or an adapter with its base
    a .gguf file               dequantised by Transformers
    owner/name                 a repository on the Hugging Face Hub
    an nn.Module               used in place and unchanged, adapters and wrappers included

Weights are never folded, cloned or changed: what runs is what Transformers loads. Pickles and code that comes
with a checkpoint are refused unless they are asked for.

Cost: reading the weights once; the default model takes about a second from its cache.
Limits: a module is used as it is, so its dtype, device and mode are its owner's to set.
"""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mainstem.errors import CorruptFileError, NotAModelError, NotFiniteError, UsageError
from mainstem.model import adapters, checkpoints, checks, demo, hub
from mainstem.model.cache import Report, discard, report_to_stderr
from mainstem.model.placement import placement_options
from mainstem.model.tokenizers import has_tokenizer, read_tokenizer

DEMO = "demo"


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, and where it came from.

    Attributes:
        module: The causal language model; in eval mode.
        tokenizer: Its tokenizer, or None: then prompts are token ids.
        name: A short name to print.
        source: What was asked for: `demo`, a path, a Hub id, or the class of a module that was given.
        revision: The commit of a Hub id, the package of the default model, else None.
        dtype: The dtype of most of its parameters, such as "float32".
        device: The device of its parameters, such as "cuda:0"; several, with commas, if they are spread.
    """

    module: nn.Module
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    source: str
    revision: str | None
    dtype: str
    device: str


def load(
    source: str | Path | nn.Module = DEMO,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    attn_implementation: str | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    report: Report | None = None,
) -> LoadedModel:
    """Opens a model.

    Args:
        source: `demo`, a directory, a .gguf file, a Hub id, or a module.
        dtype: "float32", "bf16" ...; by default float32 on the CPU and the checkpoint's own on accelerators.
        device: Where to load it: "cpu", "cuda", "cuda:1" ...; the CPU by default.
        device_map: Instead of `device`, a placement as Transformers takes it, such as "auto".
        revision: For a Hub id: a branch, tag or commit.
        trust_remote_code: Run Python code that comes with the checkpoint.
        allow_pickle: Read pickled weights where there are no safetensors.
        attn_implementation: "eager", "sdpa" ..., as Transformers takes it.
        tokenizer: Instead of the model's own: an object, a directory or a Hub id.
        report: Receives progress messages; standard error by default.

    Raises:
        UsageError: Arguments that contradict each other; ChoiceError for an unknown dtype or device.
        LoadError: The model cannot be loaded; its subclasses say why (see `mainstem.errors`).
        NotFiniteError: NaN or infinity in the weights.
    """
    report = report or report_to_stderr
    if isinstance(source, nn.Module):
        unused = {"dtype": dtype, "device": device, "device_map": device_map, "revision": revision,
                  "attn_implementation": attn_implementation}  # fmt: skip
        _check_given(source, [name for name, value in unused.items() if value is not None])
        given = _given_tokenizer(tokenizer, report, trust_remote_code)
        return _described(source, given, type(source).__name__, f"module:{type(source).__name__}", None)
    text = str(source).strip()
    if not text:
        raise UsageError("The model's name is empty", remedy="Give demo, a directory, a .gguf file or a Hub id.")
    options = placement_options(dtype, device, device_map)
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    given = _given_tokenizer(tokenizer, report, trust_remote_code)
    return _Reader(text, given, options, revision, trust_remote_code, allow_pickle, report).read()


@dataclass(frozen=True)
class _Reader:
    """What was asked for, to be resolved to one of the kinds of source."""

    source: str
    tokenizer: PreTrainedTokenizerBase | None
    options: dict[str, Any]
    revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    report: Report

    def read(self) -> LoadedModel:
        """Looks for the source in the order demo, directory, file, Hub id, and reads it."""
        path = Path(self.source).expanduser()
        is_name = self.source == DEMO
        if self.revision is not None and (is_name or path.exists()):
            raise UsageError("A revision is for a model on the Hub", self.source, "Leave it out.")
        if is_name:
            return self._demo()
        if path.is_dir():
            return self._directory(path, path.resolve().name, None)
        if path.is_file():
            return self._file(path)
        if self.source.lower().endswith(".gguf") or path.is_absolute() or self.source.startswith((".", "~")):
            raise NotAModelError("There is no such file or directory", self.source)
        return self._hub()

    def _demo(self) -> LoadedModel:
        directory = demo.ensure(self.report)
        try:
            return self._directory(directory, demo.NAME, demo.REVISION)
        except (CorruptFileError, NotFiniteError) as error:
            # Sizes and times agreed and the contents do not: what the cache's cheap check lets through.
            self.report(f"The cached default model is damaged ({error.description}); making it again.")
            discard(directory)
            return self._directory(demo.ensure(self.report), demo.NAME, demo.REVISION)

    def _file(self, path: Path) -> LoadedModel:
        if path.suffix.lower() != ".gguf":
            remedy = f"Give the directory that holds it, {path.parent}, or a .gguf file."
            raise NotAModelError("A single file is a model only in the GGUF format", str(path), remedy)
        self.report(f"Dequantising {path.name} ...")
        module = checkpoints.read_gguf(path, **self.options)
        tokenizer = self.tokenizer or read_tokenizer(str(path.parent), self.report, gguf_file=path.name)
        return _described(module, tokenizer, path.stem, self.source, None)

    def _hub(self) -> LoadedModel:
        snapshot = hub.fetch(
            self.source,
            self.report,
            revision=self.revision,
            allow_pickle=self.allow_pickle,
            trust_remote_code=self.trust_remote_code,
        )
        return self._directory(snapshot.directory, self.source.rpartition("/")[2], snapshot.revision)

    def _directory(self, directory: Path, name: str, revision: str | None) -> LoadedModel:
        if (directory / "adapter_config.json").is_file() and not (directory / "config.json").is_file():
            return self._adapter(directory, name, revision)
        module = checkpoints.read_directory(
            directory,
            self.report,
            trust_remote_code=self.trust_remote_code,
            allow_pickle=self.allow_pickle,
            **self.options,
        )
        tokenizer = self.tokenizer or self._tokenizer(directory)
        return _described(module, tokenizer, name, self.source, revision)

    def _adapter(self, directory: Path, name: str, revision: str | None) -> LoadedModel:
        """The base model that an adapter's configuration names, with the adapter's layers put in."""
        base, base_revision = adapters.base_of(directory, allow_pickle=self.allow_pickle)
        tokenizer = self.tokenizer or (self._tokenizer(directory) if has_tokenizer(directory) else None)
        loaded = replace(self, source=base, revision=base_revision, tokenizer=tokenizer).read()
        assert isinstance(loaded.module, PreTrainedModel)  # all that is read from files is
        adapters.attach(loaded.module, directory)
        return replace(loaded, name=name, source=self.source, revision=revision)

    def _tokenizer(self, directory: Path) -> PreTrainedTokenizerBase | None:
        return read_tokenizer(str(directory), self.report, trust_remote_code=self.trust_remote_code)


def _check_given(module: nn.Module, unused: list[str]) -> None:
    """Refuses a module that would have to be changed before it can be used."""
    name = type(module).__name__
    if unused:
        raise UsageError(
            f"A module is used as it is, so these cannot be given with it: {', '.join(unused)}",
            name,
            "Convert, move or load the module yourself first.",
        )
    if training := [path or name for path, part in module.named_modules() if part.training]:
        raise UsageError(
            "The module is in training mode, so dropout would change every run",
            training[0],
            "Call module.eval() first.",
        )
    checks.check_language_model(module)
    checks.check_finite(module)


def _given_tokenizer(
    tokenizer: PreTrainedTokenizerBase | str | Path | None, report: Report, trust_remote_code: bool
) -> PreTrainedTokenizerBase | None:
    if isinstance(tokenizer, str | Path):
        return read_tokenizer(str(tokenizer), report, trust_remote_code=trust_remote_code)
    return tokenizer


def _described(
    module: nn.Module, tokenizer: PreTrainedTokenizerBase | None, name: str, source: str, revision: str | None
) -> LoadedModel:
    dtypes: Counter[str] = Counter()
    devices: dict[str, None] = {}
    for parameter in module.parameters():
        devices[str(parameter.device)] = None
        if parameter.is_floating_point():
            dtypes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    if not dtypes:
        raise NotAModelError("The module has no parameters", name)
    dtype = dtypes.most_common(1)[0][0]
    return LoadedModel(module, tokenizer, name, source, revision, dtype, ", ".join(devices))
