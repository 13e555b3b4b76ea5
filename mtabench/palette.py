"""The colours of pages and charts, each for light and for dark."""

from collections.abc import Mapping
from typing import NamedTuple


class Colour(NamedTuple):
    """A colour on a light page and on a dark one."""

    light: str
    dark: str


# Custom properties of the pages' style sheets, from which the charts on them take theirs too.
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
}
# Charts; `slower`, `equal` and `faster` are the ends and the middle of a heat map.
CHART: Mapping[str, Colour] = {
    **{name: PAGE[name] for name in ("paper", "ink", "quiet")},
    "edge": Colour("#8a8f94", "#767d88"),
    "grid": PAGE["line"],
    "backdrop": PAGE["raised"],
    "slower": Colour("#b35806", "#e08a3c"),
    "equal": Colour("#f4f4f4", "#2a2f37"),
    "faster": Colour("#08589e", "#6fb7f2"),
}
# Lines of implementations that have no colour of their own.
SPARE = (
    Colour("#009E73", "#1FD99A"), Colour("#4400AA", "#8F7BFF"), Colour("#8A1C1C", "#F0506E"),
    Colour("#A04FE0", "#D98CFF"), Colour("#A0783C", "#D8B98A"),
)  # fmt: skip
# Plain attention beside conv attention, a yardstick.
GREY = Colour("#8C8C8C", "#858585")
STRONG_GREY = Colour("#5A5A5A", "#BDBDBD")


LEAST_CONTRAST = 4.5  # of a text against the page, as WCAG asks for


def contrast(one: str, other: str) -> float:
    """How much two colours differ in brightness, from 1 to 21, as WCAG computes it; each is #rrggbb."""
    low, high = sorted(0.05 + _luminance(colour) for colour in (one, other))
    return high / low


def readable(colour: str, paper: str, ink: str) -> str:
    """A line's colour for a text on this page: with as much of the ink in it as makes it readable."""
    for share in range(0, 100, 5):
        mixed = _mixed(colour, ink, share / 100)
        if contrast(mixed, paper) >= LEAST_CONTRAST:
            return mixed
    return ink


def _luminance(colour: str) -> float:
    parts = [value / 255 for value in bytes.fromhex(colour[1:])]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _mixed(one: str, other: str, share: float) -> str:
    pairs = zip(bytes.fromhex(one[1:]), bytes.fromhex(other[1:]), strict=True)
    return f"#{bytes(round(a + (b - a) * share) for a, b in pairs).hex()}"


def style_sheet() -> str:
    """The custom properties of PAGE as CSS."""
    lines = [f"  --{name}: light-dark({colour.light}, {colour.dark});" for name, colour in PAGE.items()]
    return "\n".join([":root {", *lines, "}", ""])
