"""Tiny random models of every causal-LM family of the installed Transformers. Nothing is downloaded.

`build("llama")` gives a three-layer model with some 100,000 random parameters, in evaluation mode. Sizes are
chosen so that heads, groups and widths cannot be taken for one another, and every weight is random: norm
gains away from 1, biases and gates away from 0, multipliers away from 1. A decomposition that forgets one of
them is visibly wrong.

    python tests/zoo.py                  # which families build, with size and time; the rest with a reason
    python tests/zoo.py llama gpt2       # only these
"""

import dataclasses
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from zoo_sizes import CAPS, DAMPED, FAMILIES, LAYER_FIELDS, LAYERS, SIZES, TOWER, UNBUILDABLE
from zoo_variants import variants

__all__ = [
    "NotBuilt",
    "build",
    "families",
    "logits",
    "prompt",
    "randomise",
    "seeded",
    "tiny_config",
    "variants",
]

MAX_PARAMETERS = 3_000_000
"""No tiny model is larger; sizes are counted on the meta device, before anything is allocated."""

LANGUAGE_PARTS = ("text_config", "decoder")
"""Nested configurations that hold the language model; all others are towers for images and sound."""


class NotBuilt(RuntimeError):  # noqa: N818 (a finding about a family, more than an error)
    """The family has no tiny model here; the message says why."""


def families() -> list[str]:
    """The model types that Transformers has a causal-LM class for."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(
    family: str,
    seed: int = 1,
    *,
    layers: int = LAYERS,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = "eager",
    experts_implementation: str | None = None,
    **overrides: Any,
) -> nn.Module:
    """A tiny model of the family with random weights, in evaluation mode, or NotBuilt.

    `overrides` are fields of the configuration; those that a nested text configuration has go there. None for
    an implementation leaves the choice to Transformers.
    """
    if family in UNBUILDABLE:
        raise NotBuilt(f"{family}: {UNBUILDABLE[family]}")
    chosen = {"attn_implementation": attn_implementation, "experts_implementation": experts_implementation}
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    try:
        config = _language_config(model_class, tiny_config(family, layers, **overrides))
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
        if size > MAX_PARAMETERS:
            raise NotBuilt(f"{family}: still {size:,} parameters at these sizes")
        kept = {name: value for name, value in chosen.items() if value is not None}
        with seeded(seed):
            model = model_class._from_config(config, **kept).eval()
    except (ImportError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        if isinstance(error, NotBuilt):
            raise
        reason = " ".join(str(error).split())
        raise NotBuilt(f"{family}: {type(error).__name__}: {reason[:200]}") from error
    randomise(model, seed)
    _damp(model, *DAMPED.get(family, ("", 1.0)))
    return model.to(dtype)


def tiny_config(family: str, layers: int = LAYERS, **overrides: Any) -> PreTrainedConfig:
    """The family's configuration at the sizes of zoo_sizes, with the overrides on top."""
    config_class = CONFIG_MAPPING[family]
    merged = dict(FAMILIES.get(family, {}))
    text_class = getattr(config_class, "sub_configs", {}).get("text_config")
    for name, value in overrides.items():
        if name not in _fields(config_class) and text_class is not None:
            merged["text_config"] = {**merged.get("text_config", {}), name: value}
        else:
            merged[name] = value
    return config_class(**_arguments(config_class, SIZES, merged, layers))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from this seed inside, and leave the state of the generator outside as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def prompt(length: int = 12, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """Random token ids (batch, length) that no tiny model takes for padding or for another special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 190, (batch, length), generator=generator)


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The model's logits (batch, length, vocabulary) without a cache and without gradients."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


# --- configurations -----------------------------------------------------------------------------------------


def _fields(config_class: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}


def _read(config: PreTrainedConfig, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # the field differs from layer to layer, so that the whole has no value
        return None


def _cycled(kinds: Iterable[str], layers: int) -> list[str]:
    """A kind for each layer, every kind in turn in the order of its first use."""
    distinct = list(dict.fromkeys(kinds))
    return [distinct[index % len(distinct)] for index in range(layers)]


def _arguments(config_class: type, sizes: dict, overrides: dict, layers: int) -> dict[str, Any]:
    """What to call the configuration class with: small sizes, lists cut to the layers, small nested parts."""
    default, fields = config_class(), _fields(config_class)
    aliases = getattr(config_class, "attribute_map", {})
    arguments = {
        name: layers if name in LAYER_FIELDS and sizes is SIZES else value
        for name, value in sizes.items()
        if name in fields or (name in aliases and aliases[name] not in sizes)
    }
    arguments |= {name: cap for name, cap in CAPS.items() if name in fields and _read(default, name)}
    if {"kv_lora_rank", "num_key_value_heads"} <= fields and "num_attention_heads" in arguments:
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]  # latent attention has no groups
    for name in fields:
        value, asked = _read(default, name), overrides.get(name)
        if isinstance(value, PreTrainedConfig):
            inner = SIZES if name in LANGUAGE_PARTS else TOWER
            arguments[name] = type(value)(**_arguments(type(value), inner, asked or {}, layers))
        elif isinstance(value, list | tuple) and len(value) > layers and all(isinstance(v, str) for v in value):
            arguments[name] = _cycled(value, layers)
    for name, value in overrides.items():
        if isinstance(value, list) and len(value) == LAYERS and layers < LAYERS:
            arguments[name] = value[:layers]
        elif not isinstance(arguments.get(name), PreTrainedConfig):
            arguments[name] = value
    return arguments


def _language_config(model_class: type, config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration that the class wants: the whole, or the part that describes the language model."""
    wanted = model_class.config_class
    if isinstance(config, wanted):
        return config
    parts = [getattr(config, name) for name in config.sub_configs or ()]
    return next((part for part in parts if isinstance(part, wanted)), config)


# --- weights ------------------------------------------------------------------------------------------------


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Draw every weight anew: vectors and constants are moved from their start, the rest is drawn afresh.

    Embeddings and writes get about the same size, and query-key products a standard deviation near 1, so that
    no part of the stream is negligible and no softmax is saturated.
    """
    generator = torch.Generator().manual_seed(seed)
    modules = sorted((m for m in model.modules() if isinstance(m, KINDS)), key=lambda m: isinstance(m, nn.Embedding))
    kinds = {id(module.weight): module for module in modules}  # a tied weight counts as the embedding
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if _is_vector(parameter):
            start = parameter.flatten()[0].abs() if _is_constant(parameter) else 0
            parameter.add_(0.2 * noise * (start or 1.0))
        else:
            parameter.copy_(noise * _deviation(parameter, kinds.get(id(parameter))))
    names = {name for name in model.state_dict()}
    for name, buffer in model.named_buffers():
        learned = name.endswith(("bias", "biases", "scalar")) and name in names and buffer.is_floating_point()
        if learned:  # router biases and layer scales that checkpoints hold without training them by gradient
            buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator).to(buffer.dtype))


KINDS = (nn.Embedding, nn.Linear, nn.Conv1d, nn.Conv2d, transformers.pytorch_utils.Conv1D)


def _is_vector(parameter: nn.Parameter) -> bool:
    """Whether a weight is a gain, bias, gate or decay: of one dimension, or one number throughout."""
    return parameter.dim() < 2 or _is_constant(parameter)


def _is_constant(parameter: nn.Parameter) -> bool:
    first = parameter.flatten()[0]
    return bool((parameter == first).all() and first != 0)


@torch.no_grad()
def _damp(model: nn.Module, suffix: str, factor: float) -> None:
    for name, parameter in model.named_parameters():
        if suffix and name.endswith(suffix):
            parameter.mul_(factor)


def _deviation(parameter: nn.Parameter, module: nn.Module | None) -> float:
    """The standard deviation that keeps the size of what passes through: 1 over the root of the inputs."""
    if isinstance(module, nn.Embedding):
        return 0.4
    if isinstance(module, transformers.pytorch_utils.Conv1D):
        return 1.0 / parameter.shape[0] ** 0.5
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return 1.0 / parameter[0].numel() ** 0.5
    return 1.0 / parameter.shape[-1] ** 0.5


# --- the table ----------------------------------------------------------------------------------------------


def survey(names: Iterable[str]) -> int:
    """Print a line for each family, built or not; returns how many were built."""
    built, start = 0, time.perf_counter()
    for family in names:
        begun = time.perf_counter()
        try:
            model = build(family)
            taken = time.perf_counter() - begun
            finite = torch.isfinite(logits(model, prompt())).all()
        except NotBuilt as error:
            print(f"not built  {error}")
            continue
        built += 1
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"built      {family}: {type(model).__name__}, {size:,} parameters, {taken:.2f} s", end="")
        print("" if finite else ", NOT FINITE")
    print(f"{built} families built in {time.perf_counter() - start:.0f} s")
    return built


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    survey(sys.argv[1:] or families())
