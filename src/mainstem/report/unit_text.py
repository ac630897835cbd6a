"""What tables and pages say alike of a single unit."""

from mainstem.report.text import count, plain, signed
from mainstem.results.unit import UnitReading


def null_sentence(unit: UnitReading) -> str:
    """How the unit's tokens compare with those of random directions."""
    n = unit.null
    spread = f"{plain(n.null_max_mean)} ± {plain(n.null_max_deviation)}"
    sides = [name for name, beyond in (("promotes", n.promotes_beyond), ("suppresses", n.suppresses_beyond)) if beyond]
    verdict = (
        f"what it {' and '.join(sides)} is more than 99% of them give"
        if sides
        else "by their size alone these tokens are no more than what a random direction gives"
    )
    return (
        f"{count(n.directions)} random directions of this norm have a largest logit of {spread}; the unit's is "
        f"{signed(n.z_promotes, 1)} and its smallest {signed(n.z_suppresses, 1)} deviations beyond that: {verdict}."
    )
