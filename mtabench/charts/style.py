"""How charts look: a theme for light pages and one for dark ones, and a style for each implementation in both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd

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


class Style(NamedTuple):
    """How an implementation looks in every chart; `dark_colour` is for dark pages."""

    colour: str
    dark_colour: str
    marker: str
    dashes: Any


# Fixed for each implementation; after Okabe and Ito, so that the colour-blind can tell them apart, and at least 3:1
# against the page. Plain attention is a yardstick beside conv attention: grey and dashed.
STYLES = {
    "eager": Style("#000000", "#F5F5F5", "o", "-"),
    "compile": Style("#B8558F", "#E58FC2", "s", "-"),
    "triton": Style("#D55E00", "#FF8533", "^", "-"),
    "hopper": Style("#0072B2", "#4FA3FF", "X", "-"),
    "cuda": Style("#00796B", "#2BC4B0", "p", "-"),
    "cuda-conv": Style("#7A7A00", "#C9C93A", "*", "-"),
    "sdpa-flash": Style("#6E6E6E", "#A3A3A3", "D", (0, (4, 1.6))),
    "sdpa-cudnn": Style("#6E6E6E", "#A3A3A3", "v", (0, (1.2, 1.2))),
    "sdpa-math": Style("#8C8C8C", "#858585", "P", (0, (5, 1.5, 1, 1.5))),
}
# The ladder's rungs, where plain attention is alone: a colour a language, and more of a line the faster they are.
_DOTS, _DASHES = (0, (1.2, 1.2)), (0, (4, 1.6))
RUNG_STYLES = {
    "c-loops": Style("#8A4B08", "#D8A05B", "o", _DOTS),
    "c-tiled": Style("#8A4B08", "#D8A05B", "s", "-"),
    "cuda-naive": Style("#117733", "#3CC46B", "o", _DOTS),
    "cuda-tiled": Style("#117733", "#3CC46B", "s", _DASHES),
    "cuda-flash": Style("#117733", "#3CC46B", "^", "-"),
    "triton-pointer": Style("#7B3FA0", "#C58CF0", "o", _DOTS),
    "triton-descriptor": Style("#7B3FA0", "#C58CF0", "s", _DASHES),
    "triton-fmha": Style("#7B3FA0", "#C58CF0", "^", "-"),
    "cutile-fmha": Style("#0E7C86", "#35C4CF", "^", "-"),
    "flex": Style("#B8558F", "#E58FC2", "D", _DASHES),
    "flash-attn": Style("#0072B2", "#4FA3FF", "v", _DASHES),
    "flash-attn-3": Style("#0072B2", "#4FA3FF", "X", _DOTS),
}
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
        style = self.styles[impl]
        return style.dark_colour if self.theme is DARK else style.colour

    def line(self, impl: str) -> dict[str, Any]:
        """What matplotlib needs to draw the implementation's line."""
        style = self.styles[impl]
        return {
            "color": self.colour(impl), "linestyle": style.dashes, "linewidth": 1.5, "marker": style.marker,
            "markersize": 5.5, "markeredgecolor": self.theme.paper, "markeredgewidth": 0.6,
        }  # fmt: skip

    def hollow(self, impl: str) -> dict[str, Any]:
        """The same for its marks at times that did not settle, which lie over the others."""
        return self.line(impl) | {
            "linestyle": "none", "markerfacecolor": self.theme.paper, "markeredgecolor": self.colour(impl),
            "markeredgewidth": 1.2,
        }  # fmt: skip


def styles_of(cells: pd.DataFrame) -> dict[str, Style]:
    """The style of every implementation in the cells; those without one of their own take the spare ones in turn.

    The turn is that of the registry, so that each of its implementations looks the same in every chart.
    """
    plain = cells["op"] == "attention"
    yardsticks = set() if plain.all() else set(cells.loc[plain, "impl"])
    own = STYLES | {name: style for name, style in RUNG_STYLES.items() if name not in yardsticks}
    unknown = sorted(set(cells["impl"]) - set(names()))
    others = [name for name in (*names(), *unknown) if name not in own]
    spare = zip(others, cycle(SPARE_STYLES), cycle(SPARE_YARDSTICKS), strict=False)
    return own | {name: grey if name in yardsticks else colour for name, colour, grey in spare}


def rc(theme: Theme) -> dict[Any, Any]:
    """Matplotlib's settings: our style sheet. Texts are shown as they are, never read as mathematics."""
    return {
        "font.family": "DejaVu Sans", "font.size": 8.5, "text.parse_math": False, "text.usetex": False,
        "text.color": theme.ink, "axes.labelcolor": theme.ink, "xtick.color": theme.ink, "ytick.color": theme.ink,
        "axes.titlecolor": theme.ink, "axes.edgecolor": theme.edge, "axes.facecolor": theme.paper,
        "axes.linewidth": 0.7, "figure.facecolor": theme.paper, "legend.labelcolor": theme.ink,
        "svg.hashsalt": "mtabench",  # the same data, the same file
    }  # fmt: skip


@contextmanager
def applied(theme: Theme) -> Iterator[None]:
    """Our style sheet over matplotlib's own defaults, whatever the user's are, and theirs again afterwards."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(rc(theme))
        yield
