"""Random heads to compare found heads with: as many others, from anywhere or of the same layers, by their addresses."""

from collections.abc import Sequence

import torch


def random_heads(heads: Sequence[str], count: int, generator: torch.Generator) -> list[str]:
    """Some heads out of several, or all if they are no more."""
    return [heads[int(i)] for i in torch.randperm(len(heads), generator=generator)[:count]]


def same_layer_heads(heads: Sequence[str], others: Sequence[str], generator: torch.Generator) -> list[str]:
    """For each head another one of its layer, as far as there are any."""
    drawn: list[str] = []
    for head in heads:
        layer = head.rpartition("H")[0]
        rest = [one for one in others if one.rpartition("H")[0] == layer and one not in drawn]
        drawn += random_heads(rest, 1, generator)
    return drawn
