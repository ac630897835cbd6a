"""Every error that Mainstem raises on purpose, and what a message says.

    MainstemError
    ├── UsageError (2)                   the request cannot be carried out as written
    │   ├── PromptError                  empty, or longer than the context
    │   ├── TextError                    a reference text that is missing, empty, or shorter than a window
    │   ├── ImagesError                  images that are missing or damaged, or need a package to be read
    │   ├── PositionError                no such position in the prompt
    │   ├── TokenError                   a text or id that is not one token of the vocabulary
    │   ├── UnitError                    not a unit's address
    │   │   └── NotChosenError           a neuron of an expert that the router did not choose
    │   ├── TargetError                  tokens that make no target together
    │   ├── PairError                    a clean and a corrupted prompt that make no pair, or a bad file of pairs
    │   ├── MetricError                  a metric that is not defined for these answers or these two runs
    │   ├── EditError                    an edit that cannot be made, or two that contradict each other
    │   └── ChoiceError                  an unknown level, score, norm, kind ...
    ├── LoadError (1)                    the model did not get into memory
    │   ├── NotAModelError               a directory, file or class that holds no causal language model
    │   ├── NoLanguageHeadError          a model without a map from the stream to the vocabulary
    │   ├── CorruptFileError             truncated or damaged weights
    │   ├── HashMismatchError            a download that is not the file that was asked for
    │   ├── OfflineError                 first use, and no network
    │   ├── PickleRefusedError           weights stored as a pickle, which can run code
    │   ├── RemoteCodeRefusedError       a checkpoint that wants to run code of its own
    │   ├── CacheError                   the cache cannot be written: read-only, disk full
    │   └── InterruptedDownloadError     a download that did not finish
    ├── AnatomyError (1)                 the residual stream's structure
    │   ├── RefusedError                 a structure that cannot be discovered
    │   ├── ParallelStreamsError         several residual streams side by side
    │   └── LevelRefusedError            a level that this sublayer cannot be split to
    ├── RunError (1)                     a forward pass
    │   └── NotFiniteError               NaN or infinity; names the layer
    ├── TrainingError (1)                a small model's training
    │   ├── DivergedError                the loss is no number any more; names the step
    │   └── CheckpointError              a checkpoint of another training, a damaged one, or one that cannot be written
    └── CertificateError (1)             the account is not complete; names the first layer and part

The number is the exit status of the command line; it holds for the whole branch. Each message is one
readable sentence or two: what is wrong, where, and at the end what to do about it. A class has a remedy
of its own for the places that know no better one, so that no message ends without.

Limits: a bug of Mainstem's own is not in this tree, and shows as an ordinary Python exception.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import ClassVar


class MainstemError(Exception):
    """The root: something went wrong in a way that can be explained.

    Attributes:
        what: What is wrong, a sentence with its capital letter and without its full stop. It may begin with what the
            user gave, as it was given: a quoted text, a unit's address.
        where: The place, as the user knows it: a unit's address, a file, a position.
        remedy: What to do next, a sentence.
    """

    exit_code: ClassVar[int] = 1
    default_remedy: ClassVar[str] = "Run `mainstem --help`, or see the documentation."

    def __init__(self, what: str, where: str | None = None, remedy: str | None = None) -> None:
        # The arguments go to Exception as they came, so that copies and pickles can rebuild it.
        super().__init__(what, where, remedy)
        self.what = what
        self.where = where
        self.remedy = remedy if remedy is not None else self.default_remedy

    @property
    def description(self) -> str:
        """What is wrong and where, without the remedy and without a full stop."""
        what = self.what.rstrip().removesuffix(".")
        return f"{what} ({self.where})" if self.where else what

    def __str__(self) -> str:
        ending = "" if self.description.endswith(("?", "!")) else "."
        return f"{self.description}{ending} {self.remedy}"


# --- wrong usage ------------------------------------------------------------------------------------------


class UsageError(MainstemError):
    """The request cannot be carried out as written; the exit status is 2."""

    exit_code = 2
    default_remedy = "Run the command with --help to see what it accepts."


class PromptError(UsageError):
    """The prompt is empty, or longer than the model's context."""

    default_remedy = "Give a prompt of at least one token that fits the model's context."


class TextError(UsageError):
    """A reference text that is missing or empty, or shorter than a window."""

    default_remedy = "Give a longer text, or leave it out for the one that comes with Mainstem."


class ImagesError(UsageError):
    """Images that are missing or damaged, or that need a package which is not installed."""

    default_remedy = "Give another directory, or take the digits of scikit-learn."


class PositionError(UsageError):
    """The prompt has no such position."""

    default_remedy = "Positions count from 0, or backwards from -1, the last token."


class TokenError(UsageError):
    """A text or an id that is not exactly one token of the model's vocabulary."""

    default_remedy = "Name a token by its text, with its leading space if it has one, or by id:NUMBER."


class UnitError(UsageError):
    """A text that is not the address of a unit, or a unit that the model does not have."""

    default_remedy = "Addresses look like embed, L5.attn, L5.mlp.bias, L9H8, L9H8@3, L9H8.17, L27N846, L12E3N40."


class NotChosenError(UnitError):
    """A neuron of an expert that the router did not choose at the destination."""

    default_remedy = "Ask about the neurons of an expert that was chosen there."


class TargetError(UsageError):
    """Tokens that make no target together, such as a contrast of a token with itself."""

    default_remedy = "Name one token or more as the target, and only other tokens as its rivals."


class PairError(UsageError):
    """A clean and a corrupted prompt that make no pair, a file of pairs that cannot be read, or pairs not to be had."""

    default_remedy = "Give two prompts of equal token length that differ, and answers of one token each."


class MetricError(UsageError):
    """A metric of a patched run that is not defined: no wrong answers, or the same for both runs it is scaled by."""

    default_remedy = "Choose another metric, other answers, or prompts on which the model's answers differ."


class EditError(UsageError):
    """An edit that cannot be made at its point, or two that contradict each other."""

    default_remedy = "See `mainstem.points` for what can be edited, and `Edit` for how."


class ChoiceError(UsageError):
    """A word that is not among those allowed; the message suggests the nearest that is.

    Args:
        name: What is chosen, as the user knows it: "level", "score", "norm" ...
        given: The word that was given.
        allowed: The words that would have been right, in the order to show them.
        where: The place, if it is not plain from the name.
        remedy: Replaces the list of allowed words.
    """

    def __init__(
        self,
        name: str,
        given: object,
        allowed: Iterable[str],
        where: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.name = name
        self.given = given
        self.allowed: Sequence[str] = tuple(allowed)
        near = difflib.get_close_matches(str(given).lower(), self.allowed, n=1)
        suggestion = f"Did you mean {near[0]!r}? " if near else ""
        listed = ", ".join(self.allowed) or "nothing, here"
        super().__init__(f"Unknown {name} {given!r}", where, remedy or f"{suggestion}Choose one of: {listed}.")
        self.args = (name, given, self.allowed, where, remedy)


# --- loading ----------------------------------------------------------------------------------------------


class LoadError(MainstemError):
    """The model did not get into memory."""

    default_remedy = "Try --model demo, a Hub id, a local directory or a .gguf file."


class NotAModelError(LoadError):
    """A directory, file or class that holds no causal language model."""

    default_remedy = (
        "Give a directory with config.json and safetensors weights of a causal language model, "
        "a .gguf file, a Hub id, or demo."
    )


class NoLanguageHeadError(LoadError):
    """A model without a map from the stream to the vocabulary."""

    default_remedy = "Load the variant with a language-model head, not the bare encoder or decoder."


class CorruptFileError(LoadError):
    """Weights that are truncated or damaged."""

    default_remedy = "Delete the file and fetch it again."


class HashMismatchError(LoadError):
    """A download that is not the file that was asked for; it was not used.

    Args:
        what: What was fetched.
        where: The file or its origin.
        remedy: What to do next.
        expected: The digest that it should have.
        found: The digest that it has.
    """

    default_remedy = "Nothing was kept. Try again; if it happens twice, another file is offered there: do not use it."

    def __init__(
        self,
        what: str,
        where: str | None = None,
        remedy: str | None = None,
        expected: str | None = None,
        found: str | None = None,
    ) -> None:
        super().__init__(what, where, remedy)
        self.expected = expected
        self.found = found
        self.args = (what, where, remedy, expected, found)

    @property
    def description(self) -> str:
        """What was fetched, where, and both digests."""
        if self.expected is None or self.found is None:
            return super().description
        return f"{super().description}: expected sha256 {self.expected}, found {self.found}"


class OfflineError(LoadError):
    """The model is not in the cache, and there is no network to fetch it."""

    default_remedy = "Connect to a network once, or give --model a local directory or .gguf file."


class PickleRefusedError(LoadError):
    """Weights stored as a pickle, which can run any code when it is opened."""

    default_remedy = "Convert the weights to safetensors, or, if you trust their author, allow pickles explicitly."


class RemoteCodeRefusedError(LoadError):
    """A checkpoint that wants to run Python code of its own."""

    default_remedy = "Read that code; if you trust it, ask for it explicitly with trust_remote_code."


class CacheError(LoadError):
    """The cache cannot be written: a read-only directory, a full disk."""

    default_remedy = "Free some space, or point MAINSTEM_CACHE at a directory that can be written."


class InterruptedDownloadError(LoadError):
    """A download that did not finish; nothing half-fetched is kept as if it were whole."""

    default_remedy = "Run the same command again: the download restarts and the cache is intact."


# --- anatomy ----------------------------------------------------------------------------------------------


class AnatomyError(MainstemError):
    """Something about the residual stream's structure that Mainstem will not guess.

    Args:
        what: What cannot be had.
        where: The module or unit concerned.
        reason: Why; what was seen in the traced run. It goes on after a colon, so it begins with a small letter.
        remedy: What to do next.
    """

    default_remedy = "Run `mainstem anatomy` on the model to see what was discovered."

    def __init__(
        self,
        what: str,
        where: str | None = None,
        reason: str | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(what, where, remedy)
        self.reason = reason
        self.args = (what, where, reason, remedy)

    @property
    def description(self) -> str:
        """What cannot be had, where, and the reason."""
        reason = f": {self.reason.rstrip().removesuffix('.')}" if self.reason else ""
        return f"{super().description}{reason}"


class RefusedError(AnatomyError):
    """A structure that cannot be discovered from the traced run."""

    default_remedy = "Mainstem refuses rather than guesses; please report the model's class and this message."


class ParallelStreamsError(AnatomyError):
    """The model carries several residual streams side by side, which is not supported."""

    default_remedy = "Use a model with a single residual stream."


class LevelRefusedError(AnatomyError):
    """A level of decomposition that is not to be had for this sublayer, with the reason."""

    default_remedy = "Ask for a coarser level: `sublayers` is always there."


# --- running ----------------------------------------------------------------------------------------------


class RunError(MainstemError):
    """A forward pass did not give what it should."""

    default_remedy = "Try a shorter prompt, or --dtype float32."


class NotFiniteError(RunError):
    """NaN or infinity in the weights or in the run; `where` names the first layer."""

    default_remedy = "Check the checkpoint's weights at that layer, or run in a wider dtype: --dtype float32."


class TrainingError(MainstemError):
    """The training of a small model did not finish."""

    default_remedy = "Train again with another recipe."


class DivergedError(TrainingError):
    """The loss became NaN or infinite.

    Args:
        what: What happened.
        where: The step and the optimiser.
        remedy: What to do next.
        training: What was recorded until then, a `mainstem.lab.training.Training`.
    """

    default_remedy = "Use a smaller learning rate, a longer warmup, or gradient clipping."

    def __init__(self, what: str, where: str | None = None, remedy: str | None = None, training: object = None) -> None:
        super().__init__(what, where, remedy)
        self.training = training
        self.args = (what, where, remedy, training)


class CheckpointError(TrainingError):
    """A checkpoint that belongs to another training, that is damaged, or that cannot be written."""

    default_remedy = "Name another folder, or delete this one to begin again."


class CertificateError(MainstemError):
    """The parts do not account for what the model computed, so the answer is withheld.

    Args:
        what: Which certificate failed, and by how much.
        where: The first layer and part that fail, as a unit's address.
        remedy: What to do next.
        relative_error: The error found, relative to what the model computed.
        tolerance: The error that rounding can explain.
    """

    default_remedy = "Run in a wider dtype (--dtype float32); if it fails there too, please report the model's class."

    def __init__(
        self,
        what: str,
        where: str | None = None,
        remedy: str | None = None,
        relative_error: float | None = None,
        tolerance: float | None = None,
    ) -> None:
        super().__init__(what, where, remedy)
        self.relative_error = relative_error
        self.tolerance = tolerance
        self.args = (what, where, remedy, relative_error, tolerance)

    @property
    def description(self) -> str:
        """Which certificate failed, where, and the error beside its tolerance."""
        if self.relative_error is None or self.tolerance is None:
            return super().description
        return f"{super().description}: relative error {self.relative_error:.2g}, tolerance {self.tolerance:.2g}"
