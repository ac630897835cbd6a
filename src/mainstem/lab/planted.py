"""A model with a planted circuit: the ground truth that methods of circuit discovery are scored on.

`PlantedModel` is a small causal language model of three blocks whose weights are set by hand. Its vocabulary is a start
token and twelve letters in two cases. The task is induction with a twist: after

    start  g  B  k  C  H  e  G      comes  B      the letter after the earlier G, in the case of the last token

    L0H1    writes each position's previous letter into the stream                         previous-token head
    L1H2    finds where the previous letter is the last one, and copies the letter there   induction head
    L1.mlp  neurons 3, 7, 10, 13 carry the last token's case to the prediction's case      a class bit

Everything else is a distractor with random weights: ten heads, two MLPs, twelve neurons. They read the whole stream,
the circuit's dimensions and each other's, and write into dimensions that no part of the circuit reads. One of those
adds the same number to all logits, so logits do depend on distractors, but no difference of logits and no probability
does. There are no norms, so that nothing else couples the parts.

Attention scores are finite (`SHARPNESS`), so that gradients do not vanish through the patterns; the two heads' weights
are above 0.98 where an ideal circuit's would be 1.

Ground truth is meant under resampling: a node or edge is given the value it has in the pair's corrupted run, a random
prompt of other letters whose last token has the other case. Positions are the same in both runs, so that nothing flows
from `embed.pos`, which is in no edge of the circuit. The tests measure, by brute force: resampling any node or edge of
the circuit lowers the logit difference by more than 3.5, any of its four neurons by 2, and resampling everything
outside at once changes it by less than 1e-5.

Cost: 60,000 parameters; a run takes a millisecond.
"""

import math
import random
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from mainstem.lab.by_hand import ByHand, attended, draw, linear
from mainstem.lab.pairs import PromptPair

N_LAYERS, N_HEADS, D_HEAD, D_MLP, CONTEXT = 3, 4, 16, 16, 16
LETTERS, START = 12, 0
D_VOCAB = 1 + 2 * LETTERS

# The stream's dimensions, by what is written there.
LETTER, CASE, POSITION = slice(0, 12), slice(12, 13), slice(13, 29)
PREVIOUS, COPIED, PREDICTED_CASE = slice(29, 41), slice(41, 53), slice(53, 54)
JUNK, SHIFT = slice(54, 64), slice(63, 64)
D_MODEL = 64

SHARPNESS = 7.0
"""By how much the attention score of the right source is above all others."""

LETTER_GAIN, CASE_GAIN = 8.0, 4.0
"""What a copied letter and a predicted case add to the logits of tokens that have them."""

SHORT = 6
"""Letters of a prompt before the last."""


@dataclass(frozen=True, order=True)
class Edge:
    """From a unit that writes to one that reads, or `logits`; the role is query, key, value, or, for others, input."""

    writer: str
    reader: str
    role: str


NODES = ("embed", "L0H1", "L1H2", "L1.mlp")
"""The planted circuit's writers, as addresses."""

NEURONS = ("L1N3", "L1N7", "L1N10", "L1N13")
"""The neurons of L1.mlp that are in the circuit: the first two act for upper case, the others for lower."""

EDGES = (
    Edge("embed", "L0H1", "value"),
    Edge("embed", "L1H2", "query"),
    Edge("embed", "L1H2", "value"),
    Edge("embed", "L1.mlp", "input"),
    Edge("L0H1", "L1H2", "key"),
    Edge("L1H2", "logits", "input"),
    Edge("L1.mlp", "logits", "input"),
)
"""The planted circuit's edges."""


class Attention(nn.Module):
    """Causal attention of four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (linear(D_MODEL, N_HEADS * D_HEAD) for _ in range(3))
        self.output = linear(N_HEADS * D_HEAD, D_MODEL)

    def forward(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What the heads write."""
        return self.output(attended(stream, self.projections(), D_HEAD))

    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        """W_Q, W_K and W_V."""
        return self.query, self.key, self.value


class MLP(nn.Module):
    """Sixteen neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.output = linear(D_MODEL, D_MLP), linear(D_MLP, D_MODEL)

    def forward(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What the neurons write."""
        return self.output(F.relu(self.input(stream)))


class Block(nn.Module):
    """Attention, then the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The stream after the block."""
        stream = stream + self.attention(stream)
        return stream + self.mlp(stream)


class PlantedModel(ByHand):
    """The model, of at most 16 positions; open it with `mainstem.open(PlantedModel())`.

    Args:
        seed: of the distractors' weights; torch's own random state is left alone.
    """

    def __init__(self, seed: int = 0) -> None:
        blocks = [Block() for _ in range(N_LAYERS)]
        super().__init__(D_VOCAB, CONTEXT, D_MODEL, blocks)
        with torch.no_grad():
            self._scatter(blocks, torch.Generator().manual_seed(seed))
            self._plant(blocks)
        self.eval()

    def _scatter(self, blocks: list[Block], generator: torch.Generator) -> None:
        """Fills all weights as if all parts were distractors, and the ends with nothing."""
        for weight in (self.tokens.weight, self.positions.weight, self.unembedding.weight):
            weight.zero_()
        draw(self.tokens.weight[:, JUNK], 0.5, generator)
        for block in blocks:
            for projection in (*block.attention.projections(), block.mlp.input):
                draw(projection.weight, 0.5, generator)
            for output in (block.attention.output, block.mlp.output):
                output.weight.zero_()
                draw(output.weight[JUNK], 0.15, generator)

    def _plant(self, blocks: list[Block]) -> None:
        """Sets the weights of the circuit."""
        sharp = math.sqrt(SHARPNESS * math.sqrt(D_HEAD))
        for letter in range(LETTERS):
            for upper, sign in ((False, -1.0), (True, 1.0)):
                self.tokens.weight[token(letter, upper), LETTER][letter] = 1
                self.tokens.weight[token(letter, upper), CASE] = sign
                self.unembedding.weight[token(letter, upper), COPIED][letter] = LETTER_GAIN
                self.unembedding.weight[token(letter, upper), PREDICTED_CASE] = CASE_GAIN * sign
        self.unembedding.weight[:, SHIFT] = 1
        self.positions.weight[:, POSITION] = torch.eye(CONTEXT)

        copy = torch.eye(LETTERS)
        earlier = torch.eye(CONTEXT).roll(-1, dims=0)  # query p asks for p - 1
        _head(blocks[0].attention, 1, POSITION, sharp * earlier, POSITION, sharp * torch.eye(CONTEXT))
        _moved(blocks[0].attention, 1, LETTER, PREVIOUS, copy)
        _head(blocks[1].attention, 2, LETTER, sharp * copy, PREVIOUS, sharp * copy)
        _moved(blocks[1].attention, 2, LETTER, COPIED, copy)

        mlp = blocks[1].mlp
        for neuron, sign in zip((3, 7, 10, 13), (1.0, 1.0, -1.0, -1.0), strict=True):
            mlp.input.weight[neuron] = mlp.output.weight[:, neuron] = 0
            mlp.input.weight[neuron, CASE] = sign
            mlp.output.weight[PREDICTED_CASE, neuron] = sign / 2


def token(letter: int, upper: bool) -> int:
    """The id of a letter in one of its cases."""
    return 1 + letter + LETTERS * upper


def planted_pairs(count: int, seed: int = 0) -> list[PromptPair]:
    """Pairs on which every node and edge of the circuit matters, as token ids.

    Both prompts are induction prompts of eight tokens; they share no letter, and their last tokens differ in case. The
    wrong answers are the right letter in the wrong case, and another letter of the prompt in the right case.
    """
    rng = random.Random(seed)
    return [_planted_pair(rng) for _ in range(count)]


def _planted_pair(rng: random.Random) -> PromptPair:
    letters, upper = rng.sample(range(LETTERS), LETTERS), rng.random() < 0.5
    clean, corrupted = letters[:SHORT], letters[SHORT:]
    place = rng.randrange(SHORT - 1)
    other = rng.choice([letter for letter in clean if letter not in clean[place : place + 2]])
    return PromptPair(
        clean=_prompt(rng, clean, place, upper),
        corrupted=_prompt(rng, corrupted, rng.randrange(SHORT - 1), not upper),
        answers=(token(clean[place + 1], upper),),
        wrong_answers=(token(clean[place + 1], not upper), token(other, upper)),
    )


def _prompt(rng: random.Random, letters: list[int], place: int, upper: bool) -> tuple[int, ...]:
    """The start, letters in random cases, and the letter at `place` again."""
    return (START, *(token(letter, rng.random() < 0.5) for letter in letters), token(letters[place], upper))


def _rows(head: int) -> slice:
    return slice(head * D_HEAD, (head + 1) * D_HEAD)


def _head(attention: Attention, head: int, queries: slice, query: Tensor, keys: slice, key: Tensor) -> None:
    """Makes a head compare what is in some dimensions at the destination with what is in some at the source."""
    for projection, dimensions, matrix in ((attention.query, queries, query), (attention.key, keys, key)):
        projection.weight[_rows(head)] = 0
        projection.weight[_rows(head)][: len(matrix), dimensions] = matrix


def _moved(attention: Attention, head: int, source: slice, destination: slice, matrix: Tensor) -> None:
    """Makes a head carry what it finds in some dimensions to others."""
    attention.value.weight[_rows(head)] = 0
    attention.value.weight[_rows(head)][: len(matrix), source] = matrix
    attention.output.weight[:, _rows(head)] = 0
    attention.output.weight[destination, _rows(head)][:, : len(matrix)] = matrix
