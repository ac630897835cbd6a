"""The options: those that all commands share, and the words that each choice allows.

The words are repeated here from the modules that define them, because those import torch; a test compares them.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, get_type_hints

import typer

import mainstem
from mainstem.errors import ChoiceError, UsageError

FORMATS = ("table", "json", "html")
SCORES = (
    "increase", "additive", "direct", "log-probability", "probability-increase", "norm", "coefficient",
    "reciprocal-rank", "coefficient-norm", "coefficient-rank", "gradient", "integrated-gradients",
)  # fmt: skip
NORMS = ("frozen", "recompute")
KINDS = ("sublayer", "head", "attention_subvalue", "attention_neuron", "ffn_neuron", "expert_neuron")
DEFAULT_KINDS = ("attention_subvalue", "ffn_neuron", "expert_neuron")
PLACES = ("last", "all")
METRICS = ("logit-difference", "probability", "log-probability", "kl")
GRIDS = ("resid", "attn", "mlp", "mixer", "heads", "heads-positions", "neurons")
DIRECTIONS = ("denoising", "noising")
TASKS = ("indirect-object", "greater-than", "induction", "capitals")
COMPOSITIONS = ("q", "k", "v", "mlp", "neuron")
WRITERS = ("heads", "mlps", "neurons")
EMBEDDINGS = ("plain", "normed")
CHOICES = ("outliers", "variance")
QUANTISERS = (
    *("absmax", "zeropoint", "row-wise", "vector-wise", "zeropoint-vector-wise"),
    *("absmax+mixed", "zeropoint+mixed", "row-wise+mixed", "llm.int8"),
    *("zeropoint-vector-wise+mixed", "smoothquant", "fp8", "w4", "w4a4", "w4a4-smoothquant"),
)
ROTATIONS = ("random", "hadamard", "learned")
OBJECTIVES = ("kurtosis", "rounding")
ABLATED = {"ffn": 25, "attention": 75}

TABULAR = (
    "basis ablate",
    "basis outliers",
    "basis quantise",
    "basis report",
    "basis rounding",
    "circuits",
    "heads",
    "patch",
    "subspace",
)
"""The commands whose results are rows that Parquet can hold."""

DIRECTORIES = ("basis rotate",)
"""The commands whose `--out` is a directory that they make, and whose result goes to standard output."""

SUFFIXES = {".json": "json", ".html": "html", ".htm": "html", ".parquet": "parquet"}
"""What `--out` says about the format, where `--format` says nothing."""


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mainstem {mainstem.__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
]


def formats(command: str) -> tuple[str, ...]:
    """The formats of a command's result."""
    return (*FORMATS, "parquet") if command in TABULAR else FORMATS


def _output(command: str) -> dict[str, object]:
    """The options that say how and where a command's result is written."""
    allowed = formats(command)
    *most, last = (f".{form}" for form in allowed if form != "table")
    metavar, help_out = "FILE", f"Write to a file; its ending {', '.join(most)} or {last} sets the format."
    if command in DIRECTORIES:
        metavar, help_out = "DIR", "A directory to make, with a checkpoint that plain Transformers loads."
    return {
        "format": Annotated[
            str | None,
            typer.Option("--format", "-f", metavar="|".join(allowed), help="Of the result; table by default."),
        ],
        "out": Annotated[Path | None, typer.Option("--out", "-o", metavar=metavar, help=help_out)],
    }


@dataclass(frozen=True)
class Common:
    """What every command takes; the fields' annotations are the options, but for the output, where commands differ."""

    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODEL", help="demo, a Hub id, a directory, or a .gguf file.")
    ] = "demo"
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="float32, bf16, ...; float32 on the CPU by default.")
    ] = None
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="cpu (the default), cuda, cuda:1, ...")] = None
    revision: Annotated[str | None, typer.Option(metavar="REVISION", help="Branch, tag or commit of a Hub id.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with a checkpoint.")
    ] = False
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read pickled weights, which can run code.")] = (
        False
    )
    attn_implementation: Annotated[
        str | None, typer.Option(metavar="NAME", help="eager, sdpa, ..., as Transformers takes it.")
    ] = None
    seed: Annotated[int, typer.Option(metavar="N", help="Of every random choice.")] = 0
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False
    ids: Annotated[bool, typer.Option("--ids", help="The prompt is token ids: '504 3575 282'.")] = False
    format: str | None = None
    out: Path | None = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress messages.")] = False
    version: Version = False

    @classmethod
    def names(cls) -> list[str]:
        """The names of all common options."""
        return [field.name for field in fields(cls)]

    @classmethod
    def annotations(cls, command: str) -> dict[str, object]:
        """Each option's annotation for a command, the metadata included."""
        return get_type_hints(cls, include_extras=True) | _output(command)

    def chosen_format(self) -> str:
        """The format asked for, by `--format` or by the ending of `--out`; tables otherwise."""
        if self.format is not None:
            return self.format
        return SUFFIXES.get(self.out.suffix.lower(), "table") if self.out is not None else "table"


def choice(name: str, given: str, allowed: Sequence[str]) -> str:
    """The word itself, if it is allowed.

    Raises:
        ChoiceError: it is not; the message suggests the nearest that is.
    """
    if given not in allowed:
        raise ChoiceError(name, given, allowed)
    return given


def words(given: Iterable[str]) -> list[str]:
    """Options that may be repeated and may hold several words with commas between them."""
    return [word.strip() for text in given for word in text.split(",") if word.strip()]


def counts(given: str) -> dict[str, int]:
    """What `ffn=25,attention=75` says.

    Raises:
        UsageError: it is not of that form; ChoiceError for an unknown kind.
    """
    found: dict[str, int] = {}
    for part in words([given]):
        kind, _, number = part.partition("=")
        choice("kind to ablate", kind.strip(), tuple(ABLATED))
        if not number.strip().isascii() or not number.strip().isdigit():
            raise UsageError(f"{part!r} is no kind and number", "--ablate", "Write --ablate ffn=25,attention=75.")
        found[kind.strip()] = int(number)
    if not any(found.values()):
        raise UsageError("There is nothing to take out", "--ablate", "Write --ablate ffn=25,attention=75.")
    return found


SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def size(given: str, option: str) -> int:
    """The bytes that `512M`, `2G` or a plain number of bytes says.

    Raises:
        UsageError: it is not of that form, or is nothing.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)(?:i?B)?", given.strip(), re.I)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{given!r} is no amount of memory", option, f"Write, for example, {option} 512M or 2G.")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])
