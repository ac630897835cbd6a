"""What the basis report's tables for the terminal and its page both say."""

from collections.abc import Mapping
from typing import Any

from mainstem.report.text import plural, visible_or


def text_line(text: Mapping[str, Any]) -> str:
    """What was measured on."""
    source = "" if text["source"] == text["name"] else f" ({visible_or(text['source'])})"
    return (
        f"{visible_or(text['name'])}{source}: {plural(text['tokens'], 'token')} in "
        f"{plural(text['windows'], 'window')} of {text['window']}, {text['stride']} apart"
    )
