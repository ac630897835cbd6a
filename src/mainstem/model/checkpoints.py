"""Reading one checkpoint, a directory or a GGUF file, into a causal language model.

Transformers does the reading; before and after it, `checks` makes sure that every weight is from the files.

Cost: a directory, its weights read once. GGUF files are dequantised at each reading, at about 35 s for 135
million parameters, most of it spent on the file's metadata.
"""

import contextlib
import io
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mainstem.errors import NotAModelError
from mainstem.model.cache import Report
from mainstem.model.checks import (
    check_class,
    check_complete,
    check_configuration,
    check_finite,
    check_weight_files,
)
from mainstem.model.translation import explained


def read_directory(
    directory: Path,
    report: Report,
    *,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """The causal language model in a directory, in eval mode, with every one of its weights from the files.

    Args:
        directory: Holds config.json and weights.
        report: Receives a note when the files hold tensors that the model does not use.
        trust_remote_code: Run Python code of the checkpoint's own.
        allow_pickle: Read pickled weights where there are no safetensors.
        **options: Passed to Transformers: dtype, device_map, attn_implementation.

    Raises:
        NotAModelError: No config.json, no weights, or no type of model that Transformers knows.
        NoLanguageHeadError: Another sort of model: encoder-decoder, vision, a bare base model, a classifier.
        CorruptFileError: Truncated or damaged files, missing weights, weights of other shapes.
        PickleRefusedError: The weights are pickled, and that was not allowed.
        RemoteCodeRefusedError: The model needs code of its own, and that was not allowed.
        NotFiniteError: A weight is NaN or infinite.
        LoadError: Transformers failed otherwise.
    """
    check_configuration(directory, trust_remote_code)
    check_weight_files(directory, allow_pickle)
    with explained(directory):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=None if allow_pickle else True,
            # Code of a checkpoint's own may lie in another repository; nothing else has to be fetched here.
            local_files_only=not trust_remote_code,
            **options,
        )
    module, info = loaded
    check_complete(module, info, directory, report)
    check_finite(module)
    return module


def read_gguf(path: Path, **options: Any) -> PreTrainedModel:
    """The causal language model in a GGUF file, its weights dequantised, in eval mode.

    Args:
        path: The file.
        **options: Passed to Transformers: dtype, device_map, attn_implementation.

    Raises:
        NotAModelError: Not a GGUF file, or an architecture that Transformers does not read.
        CorruptFileError: Truncated or damaged.
        NoLanguageHeadError: Another sort of model.
        NotFiniteError: A weight is NaN or infinite.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise NotAModelError("The file does not start as a GGUF file does", str(path))
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with explained(path, gguf=True):
        config = AutoConfig.from_pretrained(**source)
    check_class(config, str(path))
    # Where a kernel is at hand, Transformers would leave the blocks packed, and there were no matrix to read.
    packing = getattr(transformers, "GgufConfig", None)  # versions before it always dequantise
    dense = {"quantization_config": packing(dequantize=True)} if packing else {}
    # Its progress bar for GGUF files cannot be switched off like the others, and is not ours to print.
    with explained(path, gguf=True), contextlib.redirect_stderr(io.StringIO()):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **source, config=config, **dense, output_loading_info=True, **options
        )
    module, info = loaded
    check_complete(module, info, path, lambda _: None)
    check_finite(module)
    return module
