"""What the basis report recommends, as a page."""

from mainstem.report import page as p
from mainstem.results.basis_recommendation import RecommendationSection


def recommendation_section(section: RecommendationSection) -> str:
    """The section of the page: each recommendation with its reasons below it."""
    items = "".join(
        f"<dt>{p.esc(advice.about)}: {p.esc(advice.text)}</dt>"
        + "".join(f"<dd>{p.esc(reason)}</dd>" for reason in advice.reasons)
        for advice in section.advice
    )
    caption = "on the texts measured; harmless: change of the loss and KL below 0.01 nats a token"
    return p.section("Recommendation", p.esc(caption), f"<dl class='advice'>{items}</dl>")
