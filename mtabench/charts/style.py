"""How charts look: a theme for light pages and one for dark ones, and a style for each implementation in both."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pandas as pd
from matplotlib import style

from mtabench import registry
from mtabench.implementations import Style
from mtabench.palette import CHART, GREY, SPARE, STRONG_GREY
from mtabench.registry import names


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


# After Okabe and Ito as those of the implementations, so that the colour-blind can tell them apart, and at least 3:1
# against the page. Plain attention is a yardstick beside conv attention: grey and dashed.
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


@dataclass(frozen=True)
class Look:
    """A theme, and the style of every implementation in it."""

    theme: Theme
    styles: dict[str, Style]

    def colour(self, impl: str) -> str:
        """The implementation's colour on this theme's page."""
        own = self.styles[impl]
        return own.dark_colour if self.theme is DARK else own.colour

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


def own_styles(alone: bool = False) -> dict[str, Style]:
    """The styles that implementations have of their own in every chart, or `alone` in those of plain attention."""
    return {entry.name: entry.style for entry in registry.IMPLEMENTATIONS if entry.style and entry.style.alone == alone}


def styles_of(cells: pd.DataFrame) -> dict[str, Style]:
    """The style of every implementation in the cells; those without one of their own take the spare ones in turn.

    The turn is that of the registry, so that each of its implementations looks the same in every chart.
    """
    plain = cells["op"] == "attention"
    yardsticks = set() if plain.all() else set(cells.loc[plain, "impl"])
    alone = own_styles(alone=True)
    own = own_styles() | {name: style for name, style in alone.items() if name not in yardsticks}
    unknown = sorted(set(cells["impl"]) - set(names()))
    others = [name for name in (*names(), *unknown) if name not in own]
    spare = zip(others, cycle(SPARE_STYLES), cycle(SPARE_YARDSTICKS), strict=False)
    return own | {name: grey if name in yardsticks else colour for name, colour, grey in spare}


def applied(theme: Theme) -> AbstractContextManager[None]:
    """Our style sheet over matplotlib's own defaults, whatever the user's are, and theirs again afterwards.

    Texts are shown as they are, never read as mathematics.
    """
    settings: dict[Any, Any] = {
        "font.family": "DejaVu Sans", "font.size": 8.5, "text.parse_math": False, "text.usetex": False,
        "text.color": theme.ink, "axes.labelcolor": theme.ink, "xtick.color": theme.ink, "ytick.color": theme.ink,
        "axes.titlecolor": theme.ink, "axes.edgecolor": theme.edge, "axes.facecolor": theme.paper,
        "axes.linewidth": 0.7, "figure.facecolor": theme.paper, "legend.labelcolor": theme.ink,
        "svg.hashsalt": "mtabench",  # the same data, the same file
    }  # fmt: skip
    return style.context(settings, after_reset=True)
