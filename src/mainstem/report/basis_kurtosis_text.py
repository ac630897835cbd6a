"""Kurtosis in words: what its tables for the terminal and its page both say."""

from mainstem.report.text import count, plain, plural
from mainstem.results.basis_kurtosis import KurtosisSection

TITLE = "Kurtosis"
CAPTION = (
    "of a token's coordinates, the mean over tokens: 3 if the basis is like any other, more if some coordinates are "
    "special; with and without the first position of windows; after random rotations; of neurons' root mean squares "
    "(1 if all are equal)"
)


def summary(section: KurtosisSection) -> str:
    """How many tokens, and what the null is."""
    null = section.rotations
    return (
        f"{plural(section.tokens['all'], 'token')}, {count(section.tokens['first'])} at a first position; rotated: the "
        f"mean over {plural(null['draws'], 'random rotation')} on {plural(null['tokens'], 'token')}, without first "
        f"positions; a random direction has {plain(section.expectation, 3)}"
    )
