"""Running Transformers quietly, and saying what it raises in words that help.

Transformers and the libraries under it raise some twenty kinds of exception for a checkpoint that cannot be
read, several of them for the same cause. Types decide here where they can, and words only where there is one
type for everything.

Limits: logging levels and warning filters belong to the process, so another thread is quiet for as long.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub.utils.logging as hub_logging
import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from mainstem.errors import CorruptFileError, LoadError, MainstemError, NotAModelError


@contextmanager
def quiet(progress: bool = False) -> Iterator[None]:
    """Silences Transformers and the Hub's client: warnings and load reports; errors remain.

    Args:
        progress: Leave their progress bars, on standard error, as they are.
    """
    library, hub = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)
    if not progress:
        transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(library)
        hub_logging.set_verbosity(hub)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def explained(path: Path, gguf: bool = False) -> Iterator[None]:
    """Runs Transformers quietly, and turns whatever it raises into an error with a remedy."""
    try:
        with quiet():
            yield
    except MainstemError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise LoadError(
            "The model does not fit into memory", str(path), "Try --dtype bfloat16, or a smaller model."
        ) from error
    except ImportError as error:
        raise LoadError(
            f"The model needs a package that is not installed: {first_line(error)}", str(path), "Install it."
        ) from error
    except Exception as error:
        raise _failure(error, path, gguf) from error


def _failure(error: Exception, path: Path, gguf: bool) -> LoadError:
    line = first_line(error)
    if isinstance(error, SafetensorError):
        return CorruptFileError(f"The weights are truncated or damaged: {line}", str(path))
    if "size mismatch" in str(error) or "ignore_mismatched_sizes" in str(error):
        return CorruptFileError("The weights' shapes are not those of config.json", str(path))
    if "attn_implementation" in line:
        return LoadError(line.partition(". ")[0], str(path), "Leave it out, or give eager or sdpa.")
    if gguf and "not supported" in line:
        return NotAModelError(line, str(path), "Give a checkpoint in safetensors, or upgrade transformers.")
    if gguf and not isinstance(error, OSError):
        # Its reader checks nothing: what a truncated file raises depends on where it was cut.
        return CorruptFileError(f"The GGUF file is truncated or damaged: {line}", str(path))
    return LoadError(f"Transformers could not load the model: {type(error).__name__}: {line}", str(path))


def first_line(error: BaseException) -> str:
    """The first line of a message that says something, or the exception's name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
