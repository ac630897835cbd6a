"""What a checkpoint must be before it is read, and a module before it is used.

Transformers loads what it can and warns about the rest: weights that are missing become random numbers, a
classifier becomes a language model with a random head. Attributions of random weights look like any others,
so here every such case is an error. What a model is, is decided by Transformers' own tables at run time (is
this configuration's class among those with a causal language model?), never by names of families.

Cost: a directory's headers are read in milliseconds; the check for NaN reads each weight once (0.07 s for
135 million parameters).
Limits: tensors that the model has no use for are reported, not refused. Weights on the meta device (offloaded
to disk) are not checked for NaN.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto import modeling_auto

from mainstem.errors import (
    CorruptFileError,
    NoLanguageHeadError,
    NotAModelError,
    NotFiniteError,
    PickleRefusedError,
    RemoteCodeRefusedError,
)
from mainstem.model.cache import Report
from mainstem.model.translation import explained

CAUSAL = AutoModelForCausalLM.__name__
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


# --- before reading -----------------------------------------------------------------------------------------


def check_configuration(directory: Path, trust_remote_code: bool) -> None:
    """Refuses a directory whose config.json is not that of a causal language model.

    Raises:
        NotAModelError: No config.json, or no type of model that Transformers knows.
        CorruptFileError: config.json is damaged.
        NoLanguageHeadError: Another sort of model.
        RemoteCodeRefusedError: The model needs code of its own, and that was not allowed.
    """
    fields = read_json(directory / "config.json", "The directory holds no model: it has no config.json")
    where, own_code, kind = str(directory), fields.get("auto_map") or {}, fields.get("model_type")
    if trust_remote_code and CAUSAL in own_code:
        return
    needs_code = RemoteCodeRefusedError("The model needs Python code of its own", where)
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        with explained(directory):
            config = AutoConfig.from_pretrained(where, trust_remote_code=False)
        if CAUSAL in own_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise needs_code
        check_class(config, where)
    elif own_code and not trust_remote_code:
        raise needs_code
    elif own_code:
        raise NoLanguageHeadError("Its own code has no causal language model", where)
    elif kind is None:
        raise NotAModelError("The configuration does not say what type of model it is", where)
    else:
        remedy = "Upgrade transformers, if the model is newer."
        version = transformers.__version__
        raise NotAModelError(f"Transformers {version} knows no model type {kind!r}", where, remedy)


def check_class(config: transformers.PreTrainedConfig, where: str) -> None:
    """Refuses configurations and saved classes that are not causal language models.

    Raises:
        NoLanguageHeadError: With the class that it is.
    """
    remedy = "Use a decoder-only language model; demo is one."
    if getattr(config, "is_encoder_decoder", False):
        raise NoLanguageHeadError("An encoder-decoder is no causal language model", where, remedy)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise NoLanguageHeadError(
            f"Transformers has no causal language model for {type(config).__name__}", where, remedy
        )
    # A checkpoint saved from another class can load without a gap, tied embeddings standing in for the head;
    # but a masked language model or a classifier does not predict the next token. Base models pass, for that
    # is how some language models with tied embeddings are published; a missing head shows when weights are
    # counted. So do text-and-image models whose text half Transformers loads as a causal language model.
    accepted = _class_names(
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "MODEL_MAPPING_NAMES",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    )
    saved = config.architectures or []
    if saved and not any(name in accepted or not hasattr(transformers, name) for name in saved):
        raise NoLanguageHeadError(f"It was saved as {saved[0]}, which does not predict the next token", where)


def _class_names(*tables: str) -> set[str]:
    names: set[str] = set()
    for table in tables:
        for entry in getattr(modeling_auto, table).values():
            names.update([entry] if isinstance(entry, str) else entry)
    return names


def check_weight_files(directory: Path, allow_pickle: bool) -> None:
    """Finds missing, truncated and pickled weight files by their headers, and names them.

    Raises:
        NotAModelError: There are no weights.
        CorruptFileError: A file is missing, truncated or damaged.
        PickleRefusedError: There are only pickles, and they were not allowed.
    """
    safe = sorted(directory.glob("*.safetensors"))
    indices = sorted(directory.glob("*.safetensors.index.json"))
    for index in indices:
        shards = set(read_json(index, "No index of the weights").get("weight_map", {}).values())
        if missing := sorted(name for name in shards if not (directory / name).is_file()):
            raise CorruptFileError(
                f"{len(missing)} of {len(shards)} weight files are missing", str(directory / missing[0])
            )
    for file in safe:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CorruptFileError(f"The weights are truncated or damaged: {error}", str(file)) from error
    if safe or indices:
        return
    pickles = [file for pattern in _PICKLES for file in sorted(directory.glob(pattern))]
    if not pickles:
        raise NotAModelError("The directory has a config.json, but no weights", str(directory))
    if not allow_pickle:
        raise PickleRefusedError("The weights are stored as a pickle, which can run code", str(pickles[0]))


def read_json(path: Path, absent: str) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint.

    Args:
        path: The file.
        absent: What to say when there is none.

    Raises:
        NotAModelError: There is no such file.
        CorruptFileError: It is not a JSON object.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotAModelError(absent, str(path.parent)) from None
    except (OSError, ValueError) as error:
        raise CorruptFileError(f"The file is not readable as JSON: {error}", str(path)) from error
    if not isinstance(fields, dict):
        raise CorruptFileError("The file is not a JSON object", str(path))
    return fields


# --- after reading ------------------------------------------------------------------------------------------


def check_complete(module: transformers.PreTrainedModel, info: Mapping[str, Any], path: Path, report: Report) -> None:
    """Refuses a model of which some weights were not in the files, and were made up instead.

    Args:
        module: The model as loaded.
        info: The loading info of Transformers.
        path: Where it was read from.
        report: Receives a note about tensors that it has no use for.

    Raises:
        NoLanguageHeadError: What is missing is the head.
        CorruptFileError: Other weights are missing.
    """
    missing = sorted(info["missing_keys"])
    base = f"{module.base_model_prefix}."
    if missing and not any(name.startswith(base) for name in missing):
        # The base model is whole and what comes after it is not there: no damage, but another sort of model.
        remedy = "Load the variant with a language-model head, not the bare model."
        raise NoLanguageHeadError(f"No language head: {_some(missing)} not in the files", str(path), remedy)
    if missing:
        raise CorruptFileError(
            f"{len(missing)} weights are missing from the checkpoint, {_some(missing)}",
            str(path),
            "The files are incomplete or belong to another configuration; fetch the checkpoint again.",
        )
    if unexpected := sorted(info["unexpected_keys"]):
        report(f"{path.name}: {len(unexpected)} tensors of the checkpoint are not used, {_some(unexpected)}.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


# --- a module in memory -------------------------------------------------------------------------------------


def check_finite(module: nn.Module) -> None:
    """Refuses NaN and infinity in the parameters.

    Raises:
        NotFiniteError: Names the first parameter that has one.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_meta or not parameter.is_floating_point() or not parameter.numel():
            continue
        values = parameter.detach()
        if values.element_size() == 1:
            values = values.float()  # no extremes of 8-bit floats in torch
        # The extremes carry NaN along, and unlike isfinite() they need no tensor of the weight's size.
        low, high = torch.aminmax(values)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            kind = "NaN" if torch.isnan(low) else "infinity"
            raise NotFiniteError(f"The weights contain {kind}", name, "Check the checkpoint, or fetch it again.")


def check_language_model(module: nn.Module) -> None:
    """Refuses a Transformers model, loaded by the user, that is no causal language model.

    Modules of other libraries pass: what they are shows when they are run.

    Raises:
        NoLanguageHeadError: Encoder-decoder, or no map to the vocabulary.
    """
    if not isinstance(module, transformers.PreTrainedModel):
        return
    name = type(module).__name__
    if getattr(module.config, "is_encoder_decoder", False):
        raise NoLanguageHeadError("An encoder-decoder is no causal language model", name)
    known = {base.__name__ for base in type(module).__mro__} & _class_names("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")
    if not known and module.get_output_embeddings() is None:
        raise NoLanguageHeadError("The module has no language head", name)
