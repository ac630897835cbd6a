"""Fetching a model's files from the Hugging Face Hub into the Hub's own cache.

The files are fetched first, as one snapshot at one commit, and then read like any local directory; so a model
from the Hub meets the same checks, and no weights, code or conversion are fetched on the way. Only files at
the top of the repository are taken: weights in subfolders are other formats or other models.

Cost: the download, once; later a few small requests, or none with HF_HUB_OFFLINE=1. Without a network the
client tries for about 25 s before it gives up.
"""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from mainstem.errors import CacheError, InterruptedDownloadError, LoadError, NotAModelError, OfflineError
from mainstem.model.cache import Report
from mainstem.model.translation import first_line, quiet

_TEXT = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm", "*.safetensors"]
_ONLINE = "Connect to a network once, or give a local directory, a .gguf file or demo."


@dataclass(frozen=True)
class Snapshot:
    """A repository's files on disk, and the commit they are of."""

    directory: Path
    revision: str


def fetch(
    name: str,
    report: Report,
    *,
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Snapshot:
    """The files of a model on the Hub, from its cache if they are there.

    Args:
        name: The Hub id, `owner/name`.
        report: Receives progress messages.
        revision: A branch, tag or commit; the default branch if None.
        allow_pickle: Fetch pickled weights as well.
        trust_remote_code: Fetch Python code as well.

    Raises:
        NotAModelError: No such repository or revision, or not an id.
        LoadError: A gated repository.
        OfflineError: No network, and not in the cache.
        InterruptedDownloadError: The connection broke off.
        CacheError: The disk is full or the Hub's cache cannot be written.
    """
    patterns = [*_TEXT, *(["*.bin"] if allow_pickle else []), *(["*.py"] if trust_remote_code else [])]
    report(f"Looking for {name} on the Hugging Face Hub ...")
    try:
        with quiet(progress=True):
            found = snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"])
    except Exception as error:  # httpx and requests, whichever the client uses, raise their own
        raise _failure(error, name, revision) from error
    directory = Path(found)
    return Snapshot(directory, revision=directory.name)


def _failure(error: Exception, name: str, revision: str | None) -> LoadError:
    line = first_line(error)
    if isinstance(error, GatedRepoError):
        return LoadError(
            "Access to this repository must be granted by its owners",
            name,
            "Ask for access on its page, then run `hf auth login`.",
        )
    if isinstance(error, RevisionNotFoundError):
        return NotAModelError(f"The repository has no revision {revision!r}", name, "Give a branch, tag or commit.")
    if isinstance(error, HFValidationError):
        return NotAModelError(f"There is no such directory, and it is no Hub id: {name!r}")
    if isinstance(error, RepositoryNotFoundError):
        return NotAModelError(
            "There is no such directory, and no such public repository on the Hub",
            name,
            "Check the spelling; for a private repository run `hf auth login`.",
        )
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return OfflineError("There is no such directory, and the Hub cannot be reached", name, _ONLINE)
    if isinstance(error, HfHubHTTPError):
        return LoadError(f"The Hub answered with an error: {line}", name, "Try again later.")
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
        return CacheError(
            f"The Hub's cache cannot be written: {line}", name, "Point HF_HOME at a directory with space."
        )
    return InterruptedDownloadError(f"The download broke off: {type(error).__name__}: {line}", name)
