"""The tokenizer that belongs to a model, if there is one.

A model without a tokenizer can still be asked about token ids, so its absence is reported and not an error;
a tokenizer whose files are there and cannot be read is one. Its conventions (special tokens at the start,
whether a first space is added) are its own: nothing is changed here.

Cost: 0.7 s for 49,152 tokens; a GGUF file's 8 s.
"""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mainstem.errors import CorruptFileError, LoadError, RemoteCodeRefusedError
from mainstem.model.cache import Report
from mainstem.model.translation import first_line, quiet

_FILES = ("tokenizer*", "vocab*", "merges.txt", "spiece.model", "*.tiktoken", "tekken.json", "*.spm")


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds the files of a tokenizer."""
    return any(True for pattern in _FILES for _ in directory.glob(pattern))


def read_tokenizer(
    source: str, report: Report, *, gguf_file: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a directory, a GGUF file or a Hub id; None, reported, if a directory has none.

    Args:
        source: The directory or Hub id.
        report: Receives a note when there is none.
        gguf_file: The name of the GGUF file in the directory, if that is where the tokenizer is.
        trust_remote_code: Run Python code of the tokenizer's own.

    Raises:
        CorruptFileError: Its files are there but cannot be read.
        RemoteCodeRefusedError: It needs code of its own, and that was not allowed.
        LoadError: A Hub id that gives no tokenizer.
    """
    directory = Path(source)
    local = directory.is_dir()
    if local and gguf_file is None and not has_tokenizer(directory):
        report(f"{source} has no tokenizer: give prompts as token ids, or a tokenizer.")
        return None
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(
                source,
                trust_remote_code=trust_remote_code,
                **({} if gguf_file is None else {"gguf_file": gguf_file}),
            )
    except BaseException as error:
        # A panic in the Rust library is no Exception, and means a damaged file as well.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise _failure(error, str(directory / gguf_file) if gguf_file else source, local) from error


def _failure(error: BaseException, where: str, local: bool) -> LoadError:
    line = first_line(error)
    if "trust_remote_code" in str(error):
        return RemoteCodeRefusedError("The tokenizer needs Python code of its own", where)
    if local:
        remedy = "Fetch its files again, or give another tokenizer."
        return CorruptFileError(f"The tokenizer cannot be read: {line}", where, remedy)
    return LoadError(f"No tokenizer could be loaded: {line}", where, "Give a local directory.")
