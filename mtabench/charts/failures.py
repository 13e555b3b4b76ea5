"""What has no valid time, as a note below a chart: a mark among the lines would read as a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtabench.charts.panels import Panel
from mtabench.charts.text import shortened
from mtabench.problem.axes import short

MOST = 6  # lines or groups of them that are named; a number says how many more there are
Places = tuple[int, ...]


def failure_note(shown: Sequence[Panel], place: Callable[[str], str] = lambda xs: xs) -> list[str]:
    """Which lines lack a valid time, where on the x axis and why; nothing if all have one.

    Lines with the same gaps for the same reason are named together. The panel is named where the others differ.
    `place` says what the values on the x axis are.
    """
    of_line: dict[tuple[str, str, Places], list[str]] = {}
    for panel in shown:
        together: dict[tuple[str, str], list[int]] = {}
        for failure in panel.failures:
            together.setdefault((failure.label, failure.word), []).extend(failure.xs)
        for (label, word), xs in together.items():
            of_line.setdefault((label, word, tuple(sorted(set(xs)))), []).append(panel.title)
    found: dict[tuple[str, Places, tuple[str, ...]], list[str]] = {}
    for (label, word, places), titles in of_line.items():
        found.setdefault((word, places, tuple(titles)), []).append(shortened(label))
    whole = {int(x) for panel in shown for line in panel.lines for x in line.x}
    texts = []
    for (word, places, in_panels), labels in found.items():
        everywhere = len(whole) > 1 and whole <= set(places)
        where = "everywhere" if everywhere else f"at {place(shortened(', '.join(short(x) for x in places)))}"
        of = "" if len(in_panels) == len(shown) else f", {shortened(' and '.join(in_panels), 80)}"
        texts.append(f"{_listed(labels, ', ')} {where}{of} ({word})")
    return [f"no valid time: {_listed(texts, '; ')}"] if texts else []


def _listed(texts: Sequence[str], between: str) -> str:
    more = [f"and {len(texts) - MOST} more"] if len(texts) > MOST else []
    return between.join([*texts[:MOST], *more])
