"""How implementations look, the same in charts and on pages: those with a style of their own, and spare ones."""

from collections.abc import Iterable
from itertools import cycle

from mtabench import registry
from mtabench.implementations import Style
from mtabench.palette import GREY, SPARE, STRONG_GREY

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


def own_styles(alone: bool = False) -> dict[str, Style]:
    """The styles that implementations have of their own in every chart, or `alone` in those of plain attention."""
    return {entry.name: entry.style for entry in registry.IMPLEMENTATIONS if entry.style and entry.style.alone == alone}


def styles_of(shown: Iterable[tuple[str, bool]]) -> dict[str, Style]:
    """The style of every implementation in `shown`, which are its name and whether it computes plain attention.

    Those without a style of their own take the spare ones in turn. The turn is that of the registry, so that each of
    its implementations looks the same in every chart.
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
