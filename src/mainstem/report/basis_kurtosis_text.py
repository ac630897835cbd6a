"""Kurtosis in words: what its tables for the terminal and its page both say."""

from mainstem.report.text import count, plain, plural
from mainstem.results.basis_kurtosis import KurtosisSection, PointRow

TITLE = "Kurtosis"
CAPTION = (
    "of a token's coordinates, the mean over tokens: about 3 if the basis is like any other, more if some coordinates "
    "are special; rotated: after random rotations; of neurons: of the coordinates' root mean squares over tokens, 1 if "
    "all are equal"
)


def stream(section: KurtosisSection) -> list[PointRow]:
    """The states of the stream."""
    return [row for row in section.points if row.kind == "stream"]


def inputs(section: KurtosisSection) -> list[PointRow]:
    """What sublayers read."""
    return [row for row in section.points if row.kind == "input"]


def verdict(section: KurtosisSection) -> str:
    """Whether the basis is privileged, in the middle of the stack and at most."""
    states = stream(section)
    middle, largest = states[len(states) // 2], max(states, key=lambda row: row.without_first)
    rotated = [row.rotated for row in states]
    above = sum(row.without_first > row.rotated_largest for row in states)
    return (
        f"{plain(middle.without_first, 1)} mid-stack and {plain(largest.without_first, 1)} at most (after "
        f"{largest.name}), without first positions; {plain(min(rotated))} to {plain(max(rotated))} after random "
        f"rotations: {above} of {len(states)} states are above every rotation"
    )


def summary(section: KurtosisSection) -> str:
    """How many tokens, and what the null is."""
    null = section.rotations
    return (
        f"{plural(section.tokens['all'], 'token')}, {count(section.tokens['first'])} at a first position; rotated: the "
        f"mean over {plural(null['draws'], 'random rotation')} on {plural(null['tokens'], 'token')}, without first "
        f"positions; a random direction has {plain(section.expectation, 3)}"
    )
