"""A sample of a model's weights, to tell models of the same name apart."""

from torch import nn

EVERY = 1009
"""Of how many weights one is looked at."""


def sampled_sums(module: nn.Module) -> list[str]:
    """For each parameter the sum of a sample of it, in float64, as text: a sum that is NaN is not equal to itself."""
    return [repr(float(each.detach().flatten()[::EVERY].double().sum())) for each in module.parameters()]
