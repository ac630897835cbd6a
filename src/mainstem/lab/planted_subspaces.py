"""A model in which two named pieces of information lie in planted subspaces: the ground truth for named subspaces.

Six blocks without norms. At every position the first block's heads write

    L0H0    the token before it              into PREVIOUS
    L0H1    the token at position 1          into SUBJECT, or, with `apart=False`, into PREVIOUS, too

Blocks 2 and 3 have readers: of 48 neurons ten read PREVIOUS and ten SUBJECT, and so do all sides of heads 0 and 1.
Everything else reads the whole stream by random rows, and writes into dimensions that no reader reads. With
`apart=True` an interchange of one subspace changes its readers as one of everything does, and the other's not at all;
with `apart=False` whatever is told through one subspace is bound up with the other.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mainstem.lab.by_hand import ByHand, attended, draw, linear

N_LAYERS, N_HEADS, D_HEAD, D_MLP, CONTEXT = 6, 6, 16, 48, 16
TOKEN, PREVIOUS, SUBJECT = slice(0, 16), slice(16, 32), slice(32, 48)
POSITION, OTHER = slice(48, 64), slice(64, 88)
D_MODEL = 88

READING = range(2, 4)
"""The blocks with readers."""

READERS = 10
"""Neurons of each subspace in each of those blocks."""

SHARPNESS = 30.0
"""By how much the attention score of the right source is above all others."""


class Block(nn.Module):
    """Causal attention of six heads, then 48 neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (linear(D_MODEL, N_HEADS * D_HEAD) for _ in range(3))
        self.output = linear(N_HEADS * D_HEAD, D_MODEL)
        self.input, self.down = linear(D_MODEL, D_MLP), linear(D_MLP, D_MODEL)

    def forward(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The stream after the block."""
        stream = stream + self.output(attended(stream, (self.query, self.key, self.value), D_HEAD))
        return stream + self.down(F.relu(self.input(stream)))


class PlantedSubspaces(ByHand):
    """The model, of at most 16 positions; open it with `mainstem.open(PlantedSubspaces(d_vocab), tokenizer=...)`.

    Args:
        d_vocab: how many tokens.
        apart: whether the two pieces of information lie in subspaces of their own.
        seed: of all random weights; torch's own random state is left alone.
    """

    def __init__(self, d_vocab: int, apart: bool = True, seed: int = 0) -> None:
        blocks = [Block() for _ in range(N_LAYERS)]
        super().__init__(d_vocab, CONTEXT, D_MODEL, blocks)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self._scatter(blocks, generator)
            _move(blocks[0], 0, torch.eye(CONTEXT).roll(-1, dims=0), PREVIOUS)  # query p asks for p - 1
            first = torch.zeros(CONTEXT, CONTEXT)
            first[1] = 1  # every query asks for position 1
            _move(blocks[0], 1, first, SUBJECT if apart else PREVIOUS)
            for layer in READING:
                _read(blocks[layer], 0, PREVIOUS, generator)
                _read(blocks[layer], 1, SUBJECT if apart else PREVIOUS, generator)
        self.eval()

    def _scatter(self, blocks: list[Block], generator: torch.Generator) -> None:
        """Random weights everywhere, that write into `OTHER` alone."""
        for weight in (self.tokens.weight, self.positions.weight):
            weight.zero_()
        draw(self.tokens.weight[:, TOKEN], 1.0, generator)
        self.positions.weight[:, POSITION] = torch.eye(CONTEXT)
        draw(self.unembedding.weight, 0.1, generator)
        for block in blocks:
            for reading in (block.query, block.key, block.value, block.input):
                draw(reading.weight, 0.1, generator)
            for writing in (block.output, block.down):
                writing.weight.zero_()
                draw(writing.weight[OTHER], 0.05, generator)


def _move(block: Block, head: int, places: Float[Tensor, "pos pos"], into: slice) -> None:
    """A head that copies the token at another position: places [source, destination] is 1 for the right source."""
    rows, sharp = slice(head * D_HEAD, (head + 1) * D_HEAD), math.sqrt(SHARPNESS * math.sqrt(D_HEAD))
    for reading in (block.query, block.key, block.value):
        reading.weight[rows] = 0
    block.query.weight[rows][:CONTEXT, POSITION] = sharp * places
    block.key.weight[rows][:CONTEXT, POSITION] = sharp * torch.eye(CONTEXT)
    block.value.weight[rows, TOKEN] = torch.eye(D_HEAD)
    block.output.weight[:, rows] = 0
    block.output.weight[into, rows] = torch.eye(D_HEAD)


def _read(block: Block, number: int, subspace: slice, generator: torch.Generator) -> None:
    """Makes a head's queries, keys and values, and ten neurons, read nothing but a subspace."""
    rows = slice(number * D_HEAD, (number + 1) * D_HEAD)
    for reading in (block.query, block.key, block.value):
        reading.weight[rows] = 0
        reading.weight[rows, subspace] = 0.3 * torch.linalg.qr(torch.randn(D_HEAD, D_HEAD, generator=generator)).Q
    neurons = slice(number * READERS, (number + 1) * READERS)
    block.input.weight[neurons] = 0
    block.input.weight[neurons, subspace] = torch.randn(READERS, D_HEAD, generator=generator)
