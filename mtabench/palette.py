"""The colours of pages and charts, each for light and for dark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Colour(NamedTuple):
    """A colour on a light page and on a dark one."""

    light: str
    dark: str


# Custom properties of the pages' style sheets, from which Vega-Lite takes its colours too. The series are told apart in
# both themes and by colour-blind readers.
PAGE: Mapping[str, Colour] = {
    "paper": Colour("#ffffff", "#14171a"),
    "raised": Colour("#f6f7f8", "#1c2024"),
    "ink": Colour("#1b1f23", "#e6e8ea"),
    "quiet": Colour("#5b646d", "#9aa4ae"),
    "line": Colour("#d5dade", "#363d44"),
    "faint": Colour("#eceff1", "#24292e"),
    "accent": Colour("#0b5cad", "#79b8ff"),
    "good": Colour("#1a7f37", "#57c46d"),
    "warn": Colour("#8a5a00", "#e0b252"),
    "bad": Colour("#b42318", "#ff8a7a"),
    "series-1": Colour("#d4521a", "#ff8a4c"),
    "series-2": Colour("#0b6fb8", "#5db4f5"),
    "series-3": Colour("#0f8a63", "#3fcf9f"),
    "series-4": Colour("#a8478a", "#e58fc9"),
    "series-5": Colour("#24292f", "#e6e8ea"),
    "series-6": Colour("#b38600", "#e6c04a"),
    "series-7": Colour("#6e7781", "#8b949e"),
    "series-8": Colour("#5f4bb6", "#a99bf5"),
}
# Charts; `slower`, `equal` and `faster` are the ends and the middle of a heat map.
CHART: Mapping[str, Colour] = {
    "paper": Colour("#FFFFFF", "#15181D"),
    "ink": Colour("#222222", "#E8E8E8"),
    "quiet": Colour("#555555", "#AAB0B8"),
    "edge": Colour("#8A8A8A", "#767D88"),
    "grid": Colour("#DDDDDD", "#333840"),
    "backdrop": Colour("#F2F2F2", "#20252C"),
    "slower": Colour("#B35806", "#E08A3C"),
    "equal": Colour("#F4F4F4", "#2A2F37"),
    "faster": Colour("#08589E", "#6FB7F2"),
}
# Lines of implementations that have no colour of their own.
SPARE = (
    Colour("#009E73", "#1FD99A"), Colour("#4400AA", "#8F7BFF"), Colour("#8A1C1C", "#F0506E"),
    Colour("#A04FE0", "#D98CFF"), Colour("#A0783C", "#D8B98A"),
)  # fmt: skip
# Plain attention beside conv attention, a yardstick.
GREY = Colour("#8C8C8C", "#858585")
STRONG_GREY = Colour("#5A5A5A", "#BDBDBD")
# A badge, which is the same on every page.
BADGE = {"label": "#454c54", "text": "#fff"} | {name: PAGE[name].light for name in ("bad", "warn", "good")}


def style_sheet() -> str:
    """The custom properties of PAGE as CSS."""
    lines = [f"  --{name}: light-dark({colour.light}, {colour.dark});" for name, colour in PAGE.items()]
    return "\n".join([":root {", *lines, "}", ""])
