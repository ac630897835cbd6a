"""How concentrated an attention pattern is, and how far another pattern is from it.

The attention softmax's top-1 mass is the largest weight of each destination (Dettmers et al. 2022, LLM.int8(),
section 4: "top-1 attention softmax probability mass"); it is not the probability of the likeliest token, which is the
top-1 mass of the output softmax. The first position is left out: it has nothing but itself to look at.
"""

import torch
from jaxtyping import Float
from torch import Tensor

MEASURES = ("top", "first", "moved")


def pattern_measures(
    pattern: Float[Tensor, "pos source"], regular: Float[Tensor, "pos source"]
) -> Float[Tensor, " measure"]:
    """Three means over destinations but the first, in the order of `MEASURES`, float64.

    `top` the largest weight, `first` the weight of the first source, `moved` how much weight is elsewhere than in the
    regular pattern (total variation, from 0 to 1). NaN where there is one position.
    """
    rows, before = pattern[1:].double(), regular[1:].double()
    moved = (rows - before).abs().sum(-1) / 2
    return torch.stack([rows.amax(-1).mean(), rows[:, 0].mean(), moved.mean()])
