"""What a model writes, with edits and without, and how probable it holds a text.

Tokens are taken one at a time, the likeliest or drawn at a temperature, with the model's own cache of keys and values
where it has one. Each generation is then checked: one pass over the whole text without a cache, under the same edits,
must give every written token the same log-probability; where it does not, the text is written again without a cache.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mainstem.analysis import warnings as warn
from mainstem.causal.edited import missed_places, unedited
from mainstem.causal.edits import Edit
from mainstem.errors import MainstemError, NotFiniteError, PromptError, UsageError
from mainstem.intervene.intervening import one_prompt
from mainstem.model.outputs import logits_of
from mainstem.results.generation import Compared, Generated, Likelihood
from mainstem.run.inputs import CACHES, cache_argument, context_length
from mainstem.whole_numbers import whole_number

if TYPE_CHECKING:
    from mainstem.session import Model

SLACK = 1e-3
"""How far cached and uncached log-probabilities may be apart, in nats; more in a coarse dtype."""

_COLDEST = torch.finfo(torch.float64).tiny
"""The least temperature that can be divided by: nothing but the likeliest token is drawn long before."""


def generate(
    model: "Model",
    prompt: str | Sequence[int],
    count: int = 20,
    edits: Sequence[Edit] = (),
    temperature: float = 0.0,
    chat: bool = False,
) -> Generated:
    """Writes up to `count` tokens after a prompt.

    Args:
        model: the model.
        prompt: text or token ids.
        count: how many tokens at most.
        edits: made in every pass; their negative positions count from the end of the prompt.
        temperature: 0 for the likeliest token each time; else tokens are drawn, by the model's seed.
        chat: whether to wrap text in the model's chat template.

    Raises:
        UsageError: for a count below 1, or a temperature that is negative, infinite or no number.
        PromptError: if prompt and text do not fit the context, or there are several prompts.
        NotFiniteError: if a run under the edits gives NaN; names the layer.
    """
    count = whole_number("count", count)
    if count < 1:
        raise UsageError(f"{count} tokens cannot be written", None, "Give 1 or more.")
    if not isinstance(temperature, Real) or not 0 <= temperature < math.inf:
        raise UsageError(f"A temperature of {temperature!r} has no meaning", None, "Give 0 or more.")
    ids = one_prompt(model, prompt, chat).ids
    limit = context_length(model.module)
    if limit is not None and ids.shape[1] + count > limit:
        raise PromptError(
            f"{ids.shape[1]} tokens of prompt and {count} written ones do not fit the context of {limit}", None
        )
    return _Writer(model, ids, count, edits, float(temperature)).best()


def compare(
    model: "Model",
    prompt: str | Sequence[int],
    edits: Sequence[Edit],
    count: int = 20,
    continuations: str | Sequence[str] = (),
    temperature: float = 0.0,
    chat: bool = False,
) -> Compared:
    """What the model writes with the edits and without, and how probable it holds chosen texts.

    Args:
        model: the model.
        prompt: text or token ids.
        edits: in the order in which they are made.
        count: how many tokens at most.
        continuations: a text or texts whose probability after the prompt is wanted.
        temperature: as for `generate`.
        chat: whether to wrap text in the model's chat template.

    Raises:
        UsageError, PromptError, EditError, NotFiniteError: as `generate` and `Model.edited`.
    """
    plain = generate(model, prompt, count, (), temperature, chat)
    changed = generate(model, prompt, count, edits, temperature, chat)
    same = next((i for i, (a, b) in enumerate(zip(plain.ids, changed.ids, strict=False)) if a != b), None)
    ids = model.inputs(prompt, chat).ids
    found = warn.chat_warning(bool(getattr(model.tokenizer, "chat_template", None)), chat)
    if edits and plain.log_probabilities == changed.log_probabilities:
        found += warn.unchanged_warning()
    ran = ids.shape[1] + len(changed.ids) - 1  # the last written token is read by no run
    found += [one for edit in edits for one in warn.missed_warning(described(edit), missed_places(edit, ran))]
    texts = [continuations] if isinstance(continuations, str) else continuations
    likelihoods = [_likelihood(model, ids, text, edits) for text in texts]
    return Compared(
        provenance=model.provenance(),
        warnings=[w.as_dict() for w in found],
        model=model.summary,
        prompt={
            "text": prompt if isinstance(prompt, str) else None,
            "tokens": [model.token(token) for token in ids[0].tolist()],
            "ids": ids[0].tolist(),
        },
        edits=[described(edit) for edit in edits],
        count=count,
        temperature=temperature,
        plain=plain,
        edited=changed,
        same=min(len(plain.ids), len(changed.ids)) if same is None else same,
        continuations=likelihoods,
        notes=[
            f"Written {which} the edits without a cache: {made.note}."
            for which, made in (("without", plain), ("with", changed))
            if made.note
        ],
    )


def described(edit: Edit) -> str:
    """An edit in words: the text that it was made of, or else its method, its point, its positions."""
    if edit.written is not None:
        return edit.written
    name = type(edit.method).__name__.lower()
    number = getattr(edit.method, "coefficient", getattr(edit.method, "factor", None))
    places = edit.positions if edit.positions is None or isinstance(edit.positions, str) else list(edit.positions)
    where = "" if places is None else f" at {places}"
    return f"{name} {edit.at}" + ("" if number is None else f" x {number:g}") + where


@dataclass(eq=False)
class _Written:
    ids: list[int]
    log_probabilities: list[float]
    dtype: torch.dtype
    cache: str | None
    stopped: bool = False


class _Writer:
    """Writes one text."""

    def __init__(self, model: "Model", ids: Tensor, count: int, edits: Sequence[Edit], temperature: float) -> None:
        self.model, self.ids, self.count, self.edits, self.temperature = model, ids, count, edits, temperature
        self.ends = _ends(model)

    def best(self) -> Generated:
        """With the model's cache where that gives what the model gives without."""
        argument, causal = cache_argument(self.model.module), self.model.anatomy.causal
        if argument is None or not causal:
            made = self.write(None)
            note = None if argument is None else "the model attends both ways"
            return self._generated(made, self.difference(made) if causal else None, note)
        try:
            made = self.write(argument)
        except MainstemError:
            raise
        except Exception as error:  # of any kind, the model's own or an edit's
            if self._caches(argument):
                raise
            made = self.write(None)
            note = f"the model fails with its own cache: {type(error).__name__}: {error}"
            return self._generated(made, self.difference(made), note)
        difference = self.difference(made)
        if made.cache is None or difference <= max(SLACK, 64 * torch.finfo(made.dtype).eps):
            return self._generated(made, difference)
        made = self.write(None)
        note = f"with its cache the model's log-probabilities differ by up to {difference:.3g} nats"
        return self._generated(made, self.difference(made), note)

    def _caches(self, argument: str) -> bool:
        """Whether the model writes with its cache when nothing is edited."""
        try:
            with unedited(self.model.module):
                _Writer(self.model, self.ids, self.count, (), self.temperature).write(argument)
        except Exception:  # of any kind
            return False
        return True

    @torch.no_grad()
    def write(self, argument: str | None) -> _Written:
        """With a cache under the name that the model gives it, or without."""
        generator = torch.Generator().manual_seed(self.model.seed)
        made = _Written([], [], torch.float32, argument)
        ids, cache = self.ids, None
        with self.model.edited(*self.edits, prompt=self.ids.shape[1]):
            while len(made.ids) < self.count and not made.stopped:
                step, cache = self._step(ids, cache, made)
                made.dtype = step.dtype
                log_p = step.double().log_softmax(-1)
                token = self._choose(log_p, generator)
                made.ids.append(token)
                made.log_probabilities.append(float(log_p[token]))
                made.stopped = token in self.ends
                ids = torch.cat([ids, ids.new_tensor([[token]])], 1)
        return made

    def _step(self, ids: Tensor, cache: Any, made: _Written) -> tuple[Float[Tensor, " d_vocab"], Any]:
        """The logits after the last token."""
        if made.cache is not None:
            known = {} if cache is None else {made.cache: cache}
            result = self.model.module(input_ids=ids if cache is None else ids[:, -1:], use_cache=True, **known)
            cache = next((found for name in CACHES if (found := getattr(result, name, None)) is not None), None)
            made.cache = made.cache if cache is not None else None
        else:
            result = self.model.module(**self._uncached(ids))
        logits = logits_of(result)[0, -1]
        if not torch.isfinite(logits).all():
            self.model.trace(ids[0].tolist())  # names the layer
            raise NotFiniteError("The logits are NaN or infinite under the edits", None, "Make the edits smaller.")
        return logits, cache

    def _uncached(self, ids: Tensor) -> dict[str, Any]:
        return {"input_ids": ids, **self.model.inputs(ids[0].tolist()).forward}

    def _choose(self, log_p: Float[Tensor, " d_vocab"], generator: torch.Generator) -> int:
        if self.temperature == 0:
            return int(log_p.argmax())
        weights = ((log_p - log_p.max()) / max(self.temperature, _COLDEST)).softmax(-1).cpu()
        return int(torch.multinomial(weights, 1, generator=generator))

    def difference(self, made: _Written) -> float:
        """How far the tokens' log-probabilities are from those of one pass without a cache, in nats."""
        found = _log_probabilities(self.model, self.ids, made.ids, self.edits)
        return float((found - torch.tensor(made.log_probabilities).to(found)).abs().max())

    def _generated(self, made: _Written, difference: float | None, note: str | None = None) -> Generated:
        tokens = [self.model.token(token) for token in made.ids]
        text = "".join(tokens) if self.model.tokenizer is None else self.model.tokenizer.decode(made.ids)
        cached = made.cache is not None
        return Generated(tokens, made.ids, made.log_probabilities, text, made.stopped, cached, difference, note)


@torch.no_grad()
def _log_probabilities(
    model: "Model", ids: Tensor, continuation: Sequence[int], edits: Sequence[Edit]
) -> Float[Tensor, " step"]:
    """Of each token of a continuation, in one pass without a cache."""
    whole = torch.cat([ids, ids.new_tensor([list(continuation)])], 1)
    with model.edited(*edits, prompt=ids.shape[1]):
        result = model.module(input_ids=whole, **model.inputs(whole[0].tolist()).forward)
    logits = logits_of(result)[0, ids.shape[1] - 1 : -1]
    chosen = torch.tensor(list(continuation), device=logits.device)[:, None]
    return logits.double().log_softmax(-1).gather(1, chosen)[:, 0]


def _likelihood(model: "Model", ids: Tensor, text: str, edits: Sequence[Edit]) -> Likelihood:
    target = model.target(continuation=text)
    tokens = list(target.continuation)
    plain, changed = (float(_log_probabilities(model, ids, tokens, own).sum()) for own in ((), edits))
    return Likelihood(text, [model.token(token) for token in tokens], plain, changed)


def _ends(model: "Model") -> set[int]:
    """The tokens that end a text, as the model's own configurations say."""
    found: set[int] = set()
    for holder in (getattr(model.module, "generation_config", None), getattr(model.module, "config", None)):
        value = getattr(holder, "eos_token_id", None)
        found |= set(value) if isinstance(value, list | tuple) else set() if value is None else {int(value)}
    return found
