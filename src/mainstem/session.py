"""The public face: open a model, trace a prompt, ask the trace.

    >>> import mainstem
    >>> model = mainstem.open("demo")
    >>> trace = model.trace("The capital of France is")
    >>> trace.decompose("heads").certificate.holds
    True

A `Model` holds a module that is never changed and its anatomy, found at first use; a `Trace` (see `mainstem.tracing`)
holds one run. Everything else is in the layers below, which this module only calls; questions about weights and about
runs under edits stand with their answers, in `mainstem.weights.face` and `mainstem.intervene.face`.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mainstem
from mainstem.analysis.certificate import Check
from mainstem.basis.face import Basis
from mainstem.causal.edited import unedited
from mainstem.causal.labels import check_labels
from mainstem.errors import PromptError, TargetError
from mainstem.explain.unit_keys import named_unit
from mainstem.intervene.face import InterventionsFace
from mainstem.lab.decoder import register
from mainstem.lab.pairs import Encoder
from mainstem.model.anatomy import Anatomy
from mainstem.model.directions import direction_target
from mainstem.model.discovery import discover, short_probe_ids
from mainstem.model.loading import LoadedModel, load
from mainstem.model.reach import Reach, measured_reach, stored_reach
from mainstem.results.explanation import Explanation
from mainstem.results.reading import Provenance
from mainstem.run.inputs import Inputs, base_arguments, make_inputs
from mainstem.targets import Target, parse_continuation, parse_target, parse_token, token_text
from mainstem.tracing import Trace
from mainstem.weights.face import WeightsFace

Prompt = str | Sequence[int]


def open(source: str | Path | torch.nn.Module = "demo", *, seed: int = 0, **options: Any) -> "Model":
    """Opens a model.

    Args:
        source: `demo`, a Hub id, a local directory, a `.gguf` file, or a loaded module (with `tokenizer=`).
        seed: of every random choice that an analysis makes.
        options: dtype, device, device_map, revision, trust_remote_code, allow_pickle, attn_implementation, tokenizer;
            see `mainstem.model.loading.load`.

    Raises:
        LoadError: if the model cannot be opened; the message says what to do.
    """
    register()
    return Model(load(source, **options), seed)


def _rows(source: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a batch: several texts or lists of ids, or one of either."""
    several = not isinstance(source, str) and len(source) > 0 and isinstance(source[0], str | list | tuple)
    return list(source) if several else [source]  # type: ignore[list-item, arg-type]


class Model(WeightsFace, InterventionsFace):
    """A causal language model, used in place and never changed."""

    def __init__(self, loaded: LoadedModel, seed: int = 0) -> None:
        self.loaded = loaded
        self.seed = seed

    @property
    def module(self) -> torch.nn.Module:
        """The module itself."""
        return self.loaded.module

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer; None if the model came without one."""
        return self.loaded.tokenizer

    @cached_property
    def anatomy(self) -> Anatomy:
        """The structure of the model's stream, discovered when first asked for.

        Raises:
            RefusedError, ParallelStreamsError: if it cannot be discovered.
        """
        return discover(self.module, **base_arguments(self.module))

    @cached_property
    def labels(self) -> Check:
        """The labels certificate: random units zeroed in a real run (see `mainstem.causal.labels`)."""
        ids = short_probe_ids(self.module)
        with unedited(self.module):
            return check_labels(self.module, self.anatomy, ids, seed=self.seed, **base_arguments(self.module))

    def encode(self, prompt: Prompt, chat: bool = False) -> list[int]:
        """Token ids of a prompt by the tokenizer's own convention; with `chat`, in the model's chat template."""
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise PromptError("This model came without a tokenizer", None, "Give token ids instead of text.")
        if not chat:
            return list(self.tokenizer(prompt)["input_ids"])
        if not getattr(self.tokenizer, "chat_template", None):
            raise PromptError("This model has no chat template", None, "Leave out --chat.")
        messages = [{"role": "user", "content": prompt}]
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(ids["input_ids"])

    @property
    def summary(self) -> dict[str, Any]:
        """Name, size and dtype, for every result."""
        sizes = self.anatomy.sizes
        return {
            "name": self.loaded.name,
            "n_layers": sizes.n_layers,
            "d_model": sizes.d_model,
            "dtype": self.loaded.dtype,
        }

    @property
    def encoder(self) -> Encoder:
        """How this model reads text: what pairs of prompts are encoded with and tasks are generated for."""
        return Encoder(self.encode, self.tokenizer, self._head_width or self.anatomy.sizes.d_vocab)

    def token(self, token: int) -> str:
        """A token as text; `id:7042` if the model came without a tokenizer."""
        return token_text(self.tokenizer, token)

    def trace(self, prompt: Prompt | Sequence[str], positions: Sequence[int] = (-1,), chat: bool = False) -> Trace:
        """Runs the model on a prompt (text or token ids), or on several texts as one left-padded batch.

        Args:
            prompt: what to run on.
            positions: the destinations to keep; others cost another run when they are asked for.
            chat: whether to wrap text in the model's chat template.

        Raises:
            PromptError, TokenError, PositionError: if the prompt or a position is not to be had.
            NotFiniteError: if the run writes NaN; names the layer.
        """
        inputs = self.inputs(prompt, chat)
        inputs.destinations(positions)  # what is wrong with them is said before the stream is discovered
        first = _rows(prompt)[0]
        return Trace(self, inputs, positions, chat, text=first if isinstance(first, str) else None)

    def inputs(self, source: "Prompt | Sequence[Prompt] | Inputs | Trace", chat: bool = False) -> Inputs:
        """What a run takes: of a text, of several as one left-padded batch, or those of a trace.

        Raises:
            PromptError, TokenError: if a prompt is not to be had.
            RunError: if a trace was made under other edits than those that hold now.
        """
        if isinstance(source, Inputs):
            return source
        if isinstance(source, Trace):
            if source.model.module is not self.module:
                raise PromptError("This trace is one of another model", None, "Give its text instead.")
            source.run.require_same_edits()
            return source.inputs
        rows = [self.encode(one, chat) for one in _rows(source)]
        device = next(self.module.parameters()).device
        pad = getattr(self.tokenizer, "pad_token_id", None) or 0
        return make_inputs(self.module, rows, self.input_vocabulary, device, pad)

    def check(
        self,
        prompt: Prompt | Sequence[str],
        positions: Sequence[int] = (-1,),
        chat: bool = False,
        tokens: str | Sequence[str] = (),
        against: str | Sequence[str] = (),
    ) -> None:
        """Refuses a request that is wrong, as far as tokenizer and module show it, without discovering the stream.

        Args:
            prompt: as for `trace`.
            positions: the destinations.
            chat: whether to wrap text in the model's chat template.
            tokens: the target's tokens, or none for the model's own prediction.
            against: its rivals.

        Raises:
            PromptError, TokenError, PositionError, TargetError: as `trace` and `target`.
        """
        self.inputs(prompt, chat).destinations(positions)
        if self._head_width is None:
            return  # how many tokens there are shows in the anatomy only
        if tokens:
            parse_target(tokens, self.tokenizer, self._head_width, against)
        for token in [against] if isinstance(against, str) else against:
            parse_token(token, self.tokenizer, self._head_width)

    @property
    def _head_width(self) -> int | None:
        """The number of tokens that the model predicts, where it shows without the anatomy."""
        head = getattr(self.module, "get_output_embeddings", lambda: None)()
        return head.out_features if isinstance(head, torch.nn.Linear) else None

    @cached_property
    def input_vocabulary(self) -> int:
        """The number of ids that the embedding knows."""
        getter = getattr(self.module, "get_input_embeddings", None)
        table = getter() if getter is not None else None
        weight = getattr(table, "weight", None)
        return self.anatomy.sizes.d_vocab if weight is None else int(weight.shape[0])

    def target(
        self,
        text: str | Sequence[str] = (),
        against: str | Sequence[str] = (),
        *,
        continuation: str | Sequence[int] | None = None,
        direction: str | Path | Sequence[float] | Tensor | None = None,
    ) -> Target:
        """What to explain: a token, a set, a contrast, a continuation, or a direction in the stream.

        Args:
            text: literal text of one token, or `id:7042`; several make a set.
            against: rivals, each written like `text`.
            continuation: text of any length, or token ids, instead of `text`.
            direction: d_model numbers, or a `.safetensors` file that holds them, instead of `text`.

        Raises:
            TokenError, TargetError: if a text is not one token or there is no tokenizer for it, an id is outside the
                vocabulary, a token is its own rival, a direction does not fit, or two kinds are mixed.
        """
        if sum((bool(text), continuation is not None, direction is not None)) > 1:
            raise TargetError("The target mixes tokens, a continuation and a direction", remedy="Name one of them.")
        if against and (continuation is not None or direction is not None):
            raise TargetError("Only tokens can have rivals", remedy="Drop the rivals, or name a token.")
        if (unit := named_unit(direction)) is not None:
            raise TargetError(
                f"What {unit} reads depends on the run", None, f"Ask a trace: `trace.direction({str(unit)!r})`."
            )
        sizes = self.anatomy.sizes
        if direction is not None:
            return direction_target(direction, sizes.d_model)
        if continuation is not None:
            return parse_continuation(continuation, self.tokenizer, sizes.d_vocab)
        return parse_target(text, self.tokenizer, sizes.d_vocab, against)

    def reach(self, measure: bool = False) -> dict[str, Reach] | None:
        """How far each neuron can move each logit, from the user's cache: speeds up the search for negative units.

        Weight-only numbers, by the address of each FFN's first neuron; None if they were not measured for exactly these
        weights. With `measure` they are, once (a product of all neurons with the vocabulary), and stored.
        """
        return measured_reach(self.anatomy) if measure else stored_reach(self.anatomy)

    def explain(self, prompt: Prompt, **options: Any) -> Explanation:
        """Who wrote a prediction; the options are those of `Trace.explain`, and `chat`."""
        chat = bool(options.pop("chat", False))
        position = options.get("position", -1)
        return self.trace(prompt, positions=(position,), chat=chat).explain(**options)

    @cached_property
    def basis(self) -> Basis:
        """Questions about the basis of the stream: kurtosis, outlier features, quantisers, rotations."""
        return Basis(self)

    def provenance(self) -> Provenance:
        """Versions, model, dtype, device, seed and date, for every result."""
        import transformers

        return Provenance(
            mainstem=mainstem.__version__,
            torch=torch.__version__,
            transformers=transformers.__version__,
            model=self.loaded.name,
            revision=self.loaded.revision,
            dtype=self.loaded.dtype,
            device=self.loaded.device,
            seed=self.seed,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )
