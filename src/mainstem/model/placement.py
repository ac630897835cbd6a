"""Where a model is put and in which precision: words of the command line to options of Transformers.

On the CPU the default is float32, whatever the checkpoint's own dtype: there it is the faster one, and the
account of a prediction closes to 1e-6 instead of 1e-2. On accelerators it is the checkpoint's own.
"""

from typing import Any

import torch

from mainstem.errors import ChoiceError, UsageError

AUTO = "auto"
_DTYPES = {
    "float32": ("fp32", "f32", "float"),
    "float64": ("fp64", "f64", "double"),
    "bfloat16": ("bf16",),
    "float16": ("fp16", "f16", "half"),
}


def placement_options(
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    device_map: str | dict[str, Any] | None,
) -> dict[str, Any]:
    """The options dtype and device_map of Transformers' from_pretrained.

    Args:
        dtype: A name, `auto` for the checkpoint's own, or None for the default of the device.
        device: A name such as "cuda:1"; None for the CPU.
        device_map: A placement of several devices, as Transformers takes it, instead of `device`.

    Raises:
        UsageError: Both a device and a device map.
        ChoiceError: An unknown dtype, or a device that this machine does not have.
    """
    if device is not None and device_map is not None:
        raise UsageError("Both device and device_map were given", remedy="Give one of them.")
    options: dict[str, Any] = {}
    if device_map is not None:
        on_cpu = _is_cpu(device_map)
        options["device_map"] = device_map
    else:
        place = parse_device(device or "cpu")
        on_cpu = place.type == "cpu"
        if not on_cpu:
            options["device_map"] = {"": place}
    options["dtype"] = parse_dtype(dtype) if dtype is not None else torch.float32 if on_cpu else AUTO
    return options


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | str:
    """The dtype that a name such as "bf16", "float64" or "torch.float32" means; `auto` stays.

    Raises:
        ChoiceError: None that a model's weights can have.
    """
    word = str(dtype).strip().lower().removeprefix("torch.")
    if word == AUTO:
        return AUTO
    for name, aliases in _DTYPES.items():
        if word == name or word in aliases:
            return getattr(torch, name)
    words = [word for name, aliases in _DTYPES.items() for word in (name, *aliases[:1])]
    raise ChoiceError("dtype", str(dtype), [*words, AUTO])


def parse_device(device: str | torch.device) -> torch.device:
    """The device that a name such as "cpu" or "cuda:1" means.

    Raises:
        ChoiceError: None that this machine has.
    """
    present = _accelerator()
    allowed = ["cpu", *([present] if present else [])]
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ChoiceError("device", str(device), allowed) from None
    count = 1 if place.type == "cpu" else torch.accelerator.device_count() if place.type == present else 0
    if (place.index or 0) >= count:
        has = f"This machine has {' and '.join(allowed)}: choose that, or leave the device out for the CPU."
        raise ChoiceError("device", str(device), allowed, remedy=has)
    return place


def _accelerator() -> str | None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found else None


def _is_cpu(device_map: str | dict[str, Any]) -> bool:
    if isinstance(device_map, str) and device_map != "cpu":
        return _accelerator() is None  # "auto" and its kin use what is there
    places = [device_map] if isinstance(device_map, str) else device_map.values()
    return all(str(place) in ("cpu", "disk") for place in places)
