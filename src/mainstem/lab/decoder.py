"""A small decoder to train and look into, written to be read from top to bottom.

    x = embed[token] (+ position)
    for each block:     x = x + attention(x)
                        x = x + mlp(x)            left out where d_mlp is None
    logits = unembed(x)

Everything that an experiment varies is an option of `DecoderConfig`; how the stream is read and written stands in
`decoder_sublayer`, attention in `decoder_attention`. It is a Transformers model: `save_pretrained` gives a directory
with config.json and safetensors, `mainstem.open` opens it, `generate` continues a prompt.

No matrix has a bias. Weights start as in GPT-2 (Radford et al. 2019, section 2.3): normal of standard deviation
`initializer_range`, those that write into the stream divided by the root of the number of sublayers.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutputWithPast

from mainstem.errors import PromptError
from mainstem.lab.decoder_attention import Attention, Context, causal
from mainstem.lab.decoder_config import DecoderConfig, check_config
from mainstem.lab.decoder_sublayer import Norm, Read, Rotation, Write, rotations


class MLP(nn.Module):
    """d_mlp neurons with GELU."""

    def __init__(self, config: DecoderConfig, d_mlp: int, read: Rotation, write: Rotation) -> None:
        super().__init__()
        self.read = Read(config, d_mlp, read)
        self.write = Write(config, d_mlp, write)

    def forward(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What the neurons write into the stream."""
        return self.write(F.gelu(self.read(stream)))


class Block(nn.Module):
    """Attention, then, unless the model has none, an MLP."""

    def __init__(self, config: DecoderConfig, layer: int, places: Iterator[Rotation]) -> None:
        super().__init__()
        self.attention = Attention(config, layer, next(places), next(places))
        self.mlp = None if config.d_mlp is None else MLP(config, config.d_mlp, next(places), next(places))

    def forward(
        self, stream: Float[Tensor, "batch pos d_model"], context: Context
    ) -> Float[Tensor, "batch pos d_model"]:
        """The stream after the block."""
        stream = stream + self.attention(stream, context)
        return stream if self.mlp is None else stream + self.mlp(stream)


class Embedding(nn.Embedding):
    """Rows of a table, written into the stream."""

    rotation: Tensor | None

    def __init__(self, rows: int, d_model: int, rotation: Rotation) -> None:
        super().__init__(rows, d_model)
        self.register_buffer("rotation", rotation)

    def forward(self, ids: Int[Tensor, "#batch pos"]) -> Float[Tensor, "#batch pos d_model"]:
        """The row of each id."""
        return F.embedding(ids, self.weight if self.rotation is None else self.weight @ self.rotation)


class Decoder(PreTrainedModel, GenerationMixin):
    """The whole model; `decoder` makes one from a seed."""

    config_class = DecoderConfig
    _tied_weights_keys = {"unembed.weight": "embed.weight"}  # noqa: RUF012 (what Transformers calls them)
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        places = rotations(config)
        place = next(places)
        self.embed = Embedding(config.vocab_size, config.d_model, place)
        self.positions = None
        if config.positions in ("learned", "sinusoidal"):
            self.positions = Embedding(config.max_positions, config.d_model, None if place is None else place.clone())
            self.positions.weight.requires_grad = config.positions == "learned"
        self.blocks = nn.ModuleList(Block(config, layer, places) for layer in range(config.n_layers))
        self.unembed = Read(config, config.vocab_size, next(places))
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"],
        attention_mask: Int[Tensor, "batch source"] | None = None,
        cache: Cache | None = None,
        use_cache: bool = False,
        return_dict: bool = True,
    ) -> CausalLMOutputWithPast:
        """The logits at every position.

        Args:
            input_ids: the tokens; after those in the cache, if there is one.
            attention_mask: 0 where a token, of the cache's or of these, is padding, on the left or on the right.
            cache: keys and values of earlier tokens, to which these are added.
            use_cache: whether to begin a cache where none is given.
            return_dict: for Transformers' sake; there is always a named result.

        Raises:
            PromptError: more tokens than `max_positions`.
        """
        if cache is None and use_cache:
            cache = DynamicCache()
        context = self.context(input_ids, attention_mask, cache)
        stream = self.embed(input_ids)
        if self.positions is not None:
            stream = stream + self.positions(context.positions[:, -input_ids.shape[1] :])
        for block in self.blocks:
            stream = block(stream, context)
        return CausalLMOutputWithPast(logits=self.unembed(stream), cache=cache)

    def context(self, ids: Int[Tensor, "batch pos"], mask: Tensor | None, cache: Cache | None) -> Context:
        """Positions, and which sources each destination may read."""
        length = ids.shape[1]
        sources = length + (0 if cache is None else cache.get_seq_length())
        if sources > self.config.max_positions:
            raise PromptError(
                f"{sources} tokens are more than the context holds",
                f"max_positions is {self.config.max_positions}",
                "Give a shorter prompt.",
            )
        if mask is None:
            positions = torch.arange(sources, device=ids.device)[None]
            allowed = None if length == sources else causal(length, sources, ids.device)[None, None]
            return Context(positions, allowed, False, cache)
        itself = torch.ones(length, sources, dtype=torch.bool, device=ids.device).triu(sources - length)
        allowed = causal(length, sources, ids.device) & (mask[:, None, None].bool() | itself)
        return Context((mask.cumsum(-1) - 1).clamp(min=0), allowed, True, cache)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        """What holds the unembedding."""
        return self.unembed

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Called by Transformers for each module, of a new model and for what a checkpoint does not hold."""
        std = self.config.initializer_range
        if isinstance(module, Embedding) and not module.weight.requires_grad:
            init.copy_(module.weight, sinusoids(*module.weight.shape) * std * math.sqrt(2))
        elif isinstance(module, Write):
            init.normal_(module.weight, std=std / math.sqrt(self._n_sublayers))
        elif isinstance(module, Embedding | Read):
            init.normal_(module.weight, std=std)
        elif isinstance(module, Norm):
            for parameter, start in ((module.gain, 1.0), (module.bias, 0.0)):
                if parameter is not None:
                    init.constant_(parameter, start)
        elif isinstance(module, Attention) and module.smear is not None:
            init.zeros_(module.smear)

    @property
    def _n_sublayers(self) -> int:
        return self.config.n_layers * (1 if self.config.d_mlp is None else 2)


def sinusoids(rows: int, d_model: int) -> Float[Tensor, "pos d_model"]:
    """sin and cos of position * 10000^(-2 j / d_model), of root mean square 1 / sqrt(2) (Vaswani et al. 2017, 3.5)."""
    half = (d_model + 1) // 2
    angles = torch.arange(rows)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :d_model]


def decoder(config: DecoderConfig, seed: int = 0) -> Decoder:
    """A decoder with random weights that depend on the seed alone; on the CPU, in evaluation mode.

    Raises:
        ChoiceError: an unknown option, or an unknown value of one.
        UsageError: sizes or options that do not go together.
    """
    check_config(config)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        return Decoder(config).eval()


def register() -> None:
    """Makes the decoder known to Transformers' Auto classes, so that a saved one opens without code of its own."""
    AutoConfig.register(DecoderConfig.model_type, DecoderConfig, exist_ok=True)
    AutoModelForCausalLM.register(DecoderConfig, Decoder, exist_ok=True)
