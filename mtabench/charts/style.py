"""How charts look: a theme for light pages, one for dark ones, and one for our HTML pages, which are either.

Matplotlib takes no CSS. So a chart for an HTML page is drawn in numbered colours, and `in_css` puts pairs for them.
"""

import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from matplotlib import style

from mtabench import registry
from mtabench.implementations import Style
from mtabench.palette import CHART, GREY, SPARE, STRONG_GREY, readable


@dataclass(frozen=True)
class Theme:
    """Colours of a chart, as the palette names them."""

    name: str
    paper: str
    ink: str
    quiet: str
    edge: str
    grid: str
    backdrop: str
    slower: str
    equal: str
    faster: str


LIGHT = Theme("light", **{name: colour.light for name, colour in CHART.items()})
DARK = Theme("dark", **{name: colour.dark for name, colour in CHART.items()})
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}
_PAIRS: list[tuple[str, str]] = []  # the light and the dark colour of each number


def _numbered(light: str, dark: str) -> str:
    if (light, dark) not in _PAIRS:
        _PAIRS.append((light, dark))
    return f"#00{_PAIRS.index((light, dark)) + 1:04x}"  # not 0: matplotlib leaves black fills out


def in_css(svg: str) -> str:
    """The text of an SVG picture of the theme HTML with a CSS colour for light and dark in place of each number."""

    def pair(match: re.Match[str]) -> str:
        return f"light-dark({', '.join(_PAIRS[int(match[1], 16) - 1])})"

    return re.sub(r"#00([0-9a-f]{4})\b", pair, svg)


HTML = Theme("html", **{name: _numbered(*colour) for name, colour in CHART.items()})


@dataclass(frozen=True)
class Look:
    """A theme, and the style of every implementation in it."""

    theme: Theme
    styles: dict[str, Style]

    def colour(self, impl: str) -> str:
        """The implementation's colour on this theme's page."""
        own = self.styles[impl]
        if self.theme is HTML:
            return _numbered(own.colour, own.dark_colour)
        return own.dark_colour if self.theme is DARK else own.colour

    def text(self, impl: str) -> str:
        """The same for its name."""
        if self.theme is HTML:
            return _numbered(*(replace(self, theme=theme).text(impl) for theme in (LIGHT, DARK)))
        return readable(self.colour(impl), self.theme.paper, self.theme.ink)

    def gid(self, rows: Iterable[int], kind: str = "rows") -> str | None:
        """The name in an SVG picture of what shows these rows of a results file, or of their "points".

        None but for HTML.
        """
        return f"{kind} {' '.join(map(str, rows))}" if self.theme is HTML else None

    def line(self, impl: str) -> dict[str, Any]:
        """What matplotlib needs to draw the implementation's line."""
        own = self.styles[impl]
        return {
            "color": self.colour(impl), "linestyle": own.dashes, "linewidth": 1.5, "marker": own.marker,
            "markersize": 5.5, "markeredgecolor": self.theme.paper, "markeredgewidth": 0.6,
        }  # fmt: skip

    def hollow(self, impl: str) -> dict[str, Any]:
        """The same for its marks at times that did not settle, which lie over the others."""
        return self.line(impl) | {
            "linestyle": "none", "markerfacecolor": self.theme.paper, "markeredgecolor": self.colour(impl),
            "markeredgewidth": 1.2,
        }  # fmt: skip


def applied(theme: Theme) -> AbstractContextManager[None]:
    """Our style sheet over matplotlib's own defaults, whatever the user's are, and theirs again afterwards.

    Texts are shown as they are, never read as mathematics.
    """
    settings: dict[Any, Any] = {
        "font.family": "DejaVu Sans", "font.size": 8.5, "text.parse_math": False, "text.usetex": False,
        "text.color": theme.ink, "axes.labelcolor": theme.ink, "xtick.color": theme.ink, "ytick.color": theme.ink,
        "axes.titlecolor": theme.ink, "axes.edgecolor": theme.edge, "axes.facecolor": theme.paper,
        "axes.linewidth": 0.7, "figure.facecolor": theme.paper,
        "svg.hashsalt": "mtabench",  # the same data, the same file
    }  # fmt: skip
    return style.context(settings, after_reset=True)


# After Okabe and Ito as the implementations' styles, so that the colour-blind can distinguish them. The contrast to the
# page is at least 3:1. Plain attention is a yardstick beside conv attention: grey and dashed.
SPARE_STYLES = tuple(
    Style(*colours, marker, dashes)
    for dashes, markers in (("-", "phd<>"), ((0, (5, 1.5)), "h<>dp"))
    for colours, marker in zip(SPARE, markers, strict=True)
)
SPARE_YARDSTICKS = (
    Style(*GREY, "<", (0, (3, 1))),
    Style(*STRONG_GREY, ">", (0, (6, 2))),
    Style(*GREY, "p", (0, (1, 1, 4, 1))),
    Style(*STRONG_GREY, "h", (0, (2, 1, 2, 3))),
)


def own_styles(alone: bool = False) -> dict[str, Style]:
    """The styles that implementations have of their own in every chart, or `alone` in charts of plain attention."""
    return {entry.name: entry.style for entry in registry.IMPLEMENTATIONS if entry.style and entry.style.alone == alone}


def styles_of(shown: Iterable[tuple[str, bool]]) -> dict[str, Style]:
    """The style of every implementation in `shown`, which are its name and whether it computes plain attention.

    Implementations without a style of their own take the spare ones in the registry's order, so that each looks the
    same in every chart.
    """
    pairs = set(shown)
    plain = {name for name, is_plain in pairs if is_plain}
    yardsticks = plain if any(not is_plain for _, is_plain in pairs) else set()
    alone = own_styles(alone=True)
    own = own_styles() | {name: style for name, style in alone.items() if name not in yardsticks}
    known = registry.names()
    unknown = sorted({name for name, _ in pairs} - set(known))
    others = [name for name in (*known, *unknown) if name not in own]
    spare = zip(others, cycle(SPARE_STYLES), cycle(SPARE_YARDSTICKS), strict=False)
    return own | {name: grey if name in yardsticks else colour for name, colour, grey in spare}
