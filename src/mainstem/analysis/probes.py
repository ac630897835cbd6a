"""Linear probes that tell which token a vector knows of, tested on tokens that the probe has never seen.

A probe is a ridge regression from vectors x of the stream to the embedding e of the token that the question is about,
in closed form: with centred X [n, d_in] and E [n, d_target], W = X^T (X X^T + lambda n I)^-1 E; it tells the candidate
whose centred embedding has the largest cosine with x W. Tokens, not sentences, are split: candidates are tokens that no
training row was about, so that a probe that learns a label for each token by heart is right no more often than by
guessing. A control task with random labels for each type of token (Hewitt and Liang 2019, "Designing and interpreting
probes with control tasks") says the same of probes that classify; but of a question that is itself about the type, it
is only another name for each answer, and as easy. Lambda, in units of the mean squared norm, is the one of `PENALTIES`
that does best on a third of the training tokens, trained on the others.

`main_effects` are the directions along which vectors vary with each of two things alone: those of an additive model,
which the weights of a probe need not be (Haufe et al. 2014).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mainstem.errors import UsageError

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True, eq=False)
class Probe:
    """A trained probe: weights, about the means of both sides."""

    weights: Float[Tensor, "d_in d_target"]
    mean: Float[Tensor, " d_in"]
    target_mean: Float[Tensor, " d_target"]

    def told(
        self, vectors: Float[Tensor, "batch d_in"], candidates: Float[Tensor, "candidate d_target"]
    ) -> Int[Tensor, " batch"]:
        """Which of the candidates each vector is told to know of."""
        found = (vectors.double() - self.mean) @ self.weights
        against = torch.nn.functional.normalize(candidates.double() - self.target_mean, dim=1)
        return (found @ against.T).argmax(1)


def train_probe(
    vectors: Float[Tensor, "batch d_in"],
    types: Int[Tensor, " batch"],
    embeddings: Float[Tensor, "type d_target"],
    seed: int = 0,
) -> Probe:
    """A probe for the embedding of the token that each vector is about.

    Args:
        vectors: what the probe reads.
        types: the row of `embeddings` that each vector is about.
        embeddings: one for each type of token.
        seed: of the split by which the penalty is chosen.

    Raises:
        UsageError: if the vectors are about fewer than six types.
    """
    seen = types.unique()
    if len(seen) < 6:
        raise UsageError("A probe needs six types of tokens at least", f"{len(seen)} types", "Give more of them.")
    tried = seen[torch.randperm(len(seen), generator=torch.Generator().manual_seed(seed))[: len(seen) // 3]]
    held = torch.isin(types, tried)
    wanted = torch.searchsorted(tried.sort().values, types[held])

    def right(penalty: float) -> float:
        probe = _fit(vectors[~held], embeddings[types[~held]], penalty)
        return float((probe.told(vectors[held], embeddings[tried.sort().values]) == wanted).double().mean())

    return _fit(vectors, embeddings[types], max(PENALTIES, key=right))


def main_effects(
    vectors: Float[Tensor, "batch d_in"], factors: Sequence[Int[Tensor, " batch"]]
) -> list[Float[Tensor, "type d_in"]]:
    """Of each factor the effect of each of its types that occur: least squares of vector = constant + one of each."""
    columns = [torch.nn.functional.one_hot(factor.unique(return_inverse=True)[1]).double() for factor in factors]
    wide = vectors.double()
    solved = torch.linalg.lstsq(torch.cat(columns, 1), wide - wide.mean(0), driver="gelsd").solution
    return [part - part.mean(0) for part in solved.split([column.shape[1] for column in columns])]


def _fit(vectors: Float[Tensor, "batch d_in"], targets: Float[Tensor, "batch d_target"], penalty: float) -> Probe:
    wide, wanted = vectors.double(), targets.double()
    mean, target_mean = wide.mean(0), wanted.mean(0)
    centred = wide - mean
    gram = centred @ centred.T
    gram = gram + penalty * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return Probe(centred.T @ torch.linalg.solve(gram, wanted - target_mean), mean, target_mean)
