"""What a small decoder is made of: every choice an argument, and what does not go together refused.

The choices are those that the laboratory's experiments are about. A configuration is plain data, saved as config.json
beside the weights; what an option means stands with the code that it changes (`decoder`, `decoder_attention`,
`decoder_sublayer`).
"""

from inspect import signature
from typing import Any, Literal, get_args

from transformers import PreTrainedConfig

from mainstem.errors import ChoiceError, UsageError
from mainstem.whole_numbers import whole_number

Norm = Literal["layer", "rms", "rms_single", "none"]
Positions = Literal["learned", "sinusoidal", "rotary", "none"]
Attention = Literal["softmax", "softmax_1", "clipped"]
Rotation = Literal["none", "shared", "independent"]

CHOICES = {"norm": Norm, "positions": Positions, "attention": Attention, "rotation": Rotation}


class DecoderConfig(PreTrainedConfig):
    """The configuration of a `Decoder`.

    Args:
        vocab_size: the number of tokens.
        d_model: the width of the stream.
        n_layers: the number of blocks.
        n_heads: of each attention; d_head is d_model / n_heads.
        d_mlp: the number of neurons of each MLP; None: attention only.
        norm: what stands before each read: LayerNorm, RMSNorm with a gain for each dimension, RMSNorm with a single
            gain, or nothing.
        positions: a learned or a sinusoidal vector added to the stream, rotary queries and keys, or none: then the
            order of tokens shows only in which are earlier.
        smeared_keys: whether each key is mixed with the one before it, a learned share for each head.
        attention: the function from scores to the pattern.
        gamma: of "clipped" attention, the lower end of the stretched softmax, below 0.
        gated_attention: whether each head's result is multiplied with a sigmoid of what the attention reads.
        rotation: whether activations are rotated at each read and back at each write: not, by one rotation, or by
            another one at each place.
        rotation_seed: the rotations are drawn from it.
        max_positions: the longest context.
        tied_embeddings: whether the unembedding is the embedding.
        initializer_range: the standard deviation of the weights at the start.
        norm_eps: what is added to the mean square in a norm.
    """

    model_type = "mainstem-decoder"
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_positions",
        "tie_word_embeddings": "tied_embeddings",
    }

    def __init__(
        self,
        vocab_size: int = 256,
        d_model: int = 64,
        n_layers: int = 2,
        n_heads: int = 4,
        d_mlp: int | None = None,
        norm: Norm = "layer",
        positions: Positions = "learned",
        smeared_keys: bool = False,
        attention: Attention = "softmax",
        gamma: float | None = None,
        gated_attention: bool = False,
        rotation: Rotation = "none",
        rotation_seed: int = 0,
        max_positions: int = 256,
        tied_embeddings: bool = False,
        initializer_range: float = 0.02,
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.n_layers = n_layers
        self.n_heads = n_heads
        self.d_mlp = d_mlp
        self.norm = norm
        self.positions = positions
        self.smeared_keys = smeared_keys
        self.attention = attention
        self.gamma = gamma
        self.gated_attention = gated_attention
        self.rotation = rotation
        self.rotation_seed = rotation_seed
        self.max_positions = max_positions
        self.tied_embeddings = tied_embeddings
        self.initializer_range = initializer_range
        self.norm_eps = norm_eps
        super().__init__(**kwargs)

    @property
    def d_head(self) -> int:
        """The width of one head."""
        return self.d_model // self.n_heads


def check_config(config: DecoderConfig) -> None:
    """Refuses what cannot be built, before anything is.

    Raises:
        ChoiceError: an unknown option, or an unknown value of one.
        UsageError: sizes or options that do not go together.
    """
    known = set(DecoderConfig().to_dict())
    for name in vars(config):
        if name not in known and not name.startswith("_"):
            raise ChoiceError("option of a decoder", name, sorted(_options()))
    for name, values in CHOICES.items():
        if getattr(config, name) not in get_args(values):
            raise ChoiceError(name, getattr(config, name), get_args(values))
    for name in ("vocab_size", "d_model", "n_layers", "n_heads", "max_positions"):
        whole_number(name, getattr(config, name), 1)
    if config.d_mlp is not None:
        whole_number("d_mlp", config.d_mlp, 1)
    if config.d_model % config.n_heads:
        raise UsageError(
            f"A d_model of {config.d_model} cannot be divided among {config.n_heads} heads",
            None,
            f"Give a multiple of {config.n_heads}.",
        )
    if config.positions == "rotary" and config.d_head % 2:
        raise UsageError(
            f"Rotary positions turn pairs of coordinates, and d_head is {config.d_head}",
            None,
            "Choose d_model and n_heads so that d_model / n_heads is even, or other positions.",
        )
    if config.attention == "clipped" and (config.gamma is None or config.gamma > 0):
        raise UsageError(
            f"Clipped attention with gamma {config.gamma}", None, "Give a gamma of at most 0, such as -0.03."
        )
    if config.attention != "clipped" and config.gamma is not None:
        raise UsageError(
            f"A gamma belongs to clipped attention, and attention is {config.attention!r}", None, "Leave it out."
        )


def _options() -> list[str]:
    """The names of the arguments."""
    return [name for name in signature(DecoderConfig.__init__).parameters if name not in ("self", "kwargs")]
