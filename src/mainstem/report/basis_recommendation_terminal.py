"""What the basis report recommends, for the terminal."""

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from mainstem.report import terminal as t
from mainstem.results.basis_recommendation import RecommendationSection


def print_recommendation(console: Console, section: RecommendationSection) -> None:
    """Prints each recommendation with its reasons below it."""
    console.print(
        t.heading(
            "Recommendation", "on the texts measured; harmless: change of the loss and KL below 0.01 nats a token"
        )
    )
    for advice in section.advice:
        console.print(t.labelled(advice.about, Text(advice.text)))
        for reason in advice.reasons:
            console.print(Padding(Text(reason, "quiet"), (0, 0, 0, 4)))
