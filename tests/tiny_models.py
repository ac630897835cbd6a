"""Tiny models by name, made by hand or of a family of the zoo."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import handmade
import torch
import transformers
import zoo
from torch import nn

import mainstem
from mainstem.lab.texts import Text
from mainstem.model.anatomy import Anatomy
from mainstem.model.discovery import discover


def build(name: str, **options: Any) -> nn.Module:
    """A model of its own; the options are those of `zoo.build`, and models made by hand have none."""
    return handmade.ALL[name]() if name in handmade.ALL else zoo.build(name, **options)


def arguments(name: str) -> dict[str, Any]:
    """What its forward call is given beside the prompt: models made by hand know no cache."""
    return {} if name in handmade.ALL else {"use_cache": False}


@cache
def discovered(name: str, implementation: str = "eager") -> tuple[nn.Module, Anatomy]:
    """A model that tests share and leave as it is, and its anatomy."""
    model = build(name, attn_implementation=implementation)
    return model, discover(model, **arguments(name))


@contextmanager
def hardly_different(module: nn.Module, other: int, token: int) -> Iterator[None]:
    """Inside, the embedding of `other` is nearly that of `token`: first order is all there is to what they change."""
    table = next(m for m in module.modules() if isinstance(m, nn.Embedding))
    kept = table.weight.detach().clone()
    noise = torch.randn(kept.shape[1], generator=torch.Generator().manual_seed(0), dtype=kept.dtype)
    with torch.no_grad():
        table.weight[other] = kept[token] + 1e-3 * noise * kept.std()
    try:
        yield
    finally:
        with torch.no_grad():
            table.weight.copy_(kept)


WORDS = [*"abcdefghijklmnopqrst"]


def worded(directory, gain: float = 30.0) -> "mainstem.Model":
    """Two blocks of random weights, whose stream has one dimension far larger than the others, and a word tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", *WORDS])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS) + 1, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for norm in (module.model.layers[0].input_layernorm, module.model.layers[1].post_attention_layernorm):
            norm.weight[5] = gain
    module.save_pretrained(directory)
    return mainstem.open(str(directory))


def words(seed: int, name: str = "words", n: int = 80) -> Text:
    """A text of random words that the tokenizer of `worded` knows."""
    drawn = torch.randint(len(WORDS), (n,), generator=torch.Generator().manual_seed(seed))
    return Text(name, "drawn", " ".join(WORDS[i] for i in drawn))
