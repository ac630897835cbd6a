"""Adapters on disk (LoRA and its kin): a small directory that names its base model.

The adapter's layers are put into the base model by Transformers and peft, unmerged, so that the base weights
stay what they are; what runs is what peft runs.

Limits: needs the package peft. A base that the adapter names by a Hub id is fetched from there.
"""

import importlib.util
from pathlib import Path

from transformers import PreTrainedModel

from mainstem.errors import CorruptFileError, LoadError, NotAModelError, PickleRefusedError
from mainstem.model.checks import check_finite, read_json
from mainstem.model.translation import explained

WEIGHTS = "adapter_model.safetensors"


def base_of(directory: Path, *, allow_pickle: bool) -> tuple[str, str | None]:
    """The base model that an adapter names, and its revision.

    Raises:
        NotAModelError: It names none.
        PickleRefusedError: The adapter's weights are pickled, and that was not allowed.
        LoadError: peft is not installed.
    """
    fields = read_json(directory / "adapter_config.json", "The directory holds no adapter")
    base = fields.get("base_model_name_or_path")
    if not base:
        raise NotAModelError("The adapter does not name its base model", str(directory))
    if importlib.util.find_spec("peft") is None:
        raise LoadError("An adapter needs the package peft", str(directory), "Run `pip install peft`.")
    if not (directory / WEIGHTS).is_file() and not allow_pickle:
        pickles = sorted(directory.glob("adapter_model.bin"))
        if pickles:
            raise PickleRefusedError("The adapter is stored as a pickle, which can run code", str(pickles[0]))
        raise CorruptFileError("The adapter's weights are missing", str(directory / WEIGHTS))
    return str(base), fields.get("revision")


def attach(module: PreTrainedModel, directory: Path) -> None:
    """Puts an adapter's layers into its base model, in eval mode.

    Raises:
        CorruptFileError: The adapter's file is damaged, or lacks weights.
        LoadError: It does not fit this base.
        NotFiniteError: NaN or infinity in its weights.
    """
    with explained(directory):
        info = module.load_adapter(str(directory))
    if missing := sorted(getattr(info, "missing_keys", None) or []):
        raise CorruptFileError(f"{len(missing)} weights are missing from the adapter", str(directory / WEIGHTS))
    module.eval()
    check_finite(module)
