"""The one vocabulary of tensor axes.

Every tensor annotation in Mainstem is written with these words, as jaxtyping reads them:
`Float[Tensor, "batch pos d_model"]`. Two annotations that use the same word in one function mean the same
size, and with `pytest` this is checked at every call. A sum or product of words (`"n_heads*d_head"`), a
number, and jaxtyping's own marks (`...`, `*batch`, `#batch`, `_`) are allowed beside them. One axis alone
is written with a leading space, `Float[Tensor, " pos"]`, so that linters do not take it for a name.

Limits: words only. The module imports nothing, so that everything can import it.
"""

from collections.abc import Mapping
from types import MappingProxyType

AXES: Mapping[str, str] = MappingProxyType(
    {
        # where in the text
        "batch": "sequences that run together; rows may be padded on the left",
        "pos": "token positions; where two kinds meet, the destination: the position that is written to",
        "source": "the positions that attention reads from",
        "destination": "the positions asked for, out of pos",
        "pair": "rows of a flat list of (batch, position) pairs",
        "token": "batch and pos made flat: tokens routed to experts, or counted in a text",
        "sample": "the tokens, out of those counted, of which medians are taken",
        "window": "windows that a long text is cut into",
        "type": "distinct tokens that a probe can be about",
        "candidate": "tokens that a probe chooses from",
        "d_target": "dimensions of what a probe tells",
        # the stream and what writes into it
        "d_model": "dimensions of the residual stream",
        "layer": "blocks, in the order of execution",
        "n_heads": "attention heads (query heads)",
        "n_key_value_heads": "key/value heads; head h reads number h // (n_heads / n_key_value_heads)",
        "group": "query heads that share one key/value head",
        "head": "some heads out of a sublayer's, in a given order",
        "d_head": "dimensions of a head's query and key",
        "d_value": "dimensions of a head's value, where it differs from d_head",
        "d_mlp": "neurons of a dense MLP",
        "neuron": "some neurons out of a sublayer's, in a given order",
        "n_experts": "routed experts of a sublayer",
        "expert": "some experts out of a sublayer's: those that a token was routed to",
        "d_expert": "neurons of one expert",
        "d_in": "inputs of a linear map",
        "d_out": "outputs of a linear map",
        # small images and the networks that tell them apart
        "channel": "channels of an image, or of a convolution's output",
        "height": "rows of an image or a map",
        "width": "columns of an image or a map",
        "category": "classes of images",
        # the answer
        "chosen": "tokens that are listed, out of the vocabulary",
        "out": "outputs of a token table: what a source promotes",
        "role": "the three places of a skip trigram: source, destination, output",
        "bin": "classes of nearly equal size",
        "angle": "cosines at which a tail is known",
        "value": "numbers that something is asked at",
        "rank": "the columns of the first of two factors, and the rows of the second",
        "stack": "leading axes: matrices that are computed together",
        "d_vocab": "tokens of the vocabulary, as the unembedding counts them",
        "part": "the parts of a decomposition",
        "unit": "units that are scored together",
        "top": "the best k of something",
        "point": "points of a quadrature",
        "base": "distinct streams that units are added to",
        "step": "tokens of a continuation",
        "dimension": "some dimensions of the stream, in a given order",
        "other": "dimensions that others are compared with",
        "direction": "directions of the stream that are read together",
        "query": "earlier units that activate one",
        "sender": "units whose writes are followed along paths",
        "receiver": "what is read at the end of a path: queries, keys, values, inputs, logits",
        "prompt": "prompts of a set, each with a run of its own",
        "writer": "what writes into the stream, as a graph of edges has it: embeddings, heads, other sublayers",
        "reader": "what reads the stream: heads' queries, keys and values, other sublayers, the logits",
        "draw": "draws of a bootstrap, or of a null",
        "measure": "what a probe measures of a pattern: a behaviour, and its null",
        "run": "runs of one prompt, each with an edit of its own",
        "row": "rows that are computed together, whatever they are of",
        "column": "columns of a table whose rows are rows",
        "cell": "cells of a grid, row by row: each what one run takes from another",
        "entry": "numbers that a neuron is computed from: its gate, its up value",
    }
)
"""Each word with its meaning."""
