"""Charts drawn from results files alone: `draw` writes them, and each kind has a file in `kinds`.

A kind makes a `Chart` (`chart`) of cells (`data`). Its title states what the cells show (`findings`). `style` holds its
looks on a light and on a dark page.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from mtabench.charts.chart import Chart, Kind, make_figure
from mtabench.charts.data import read_cells, settings
from mtabench.charts.kinds import load
from mtabench.charts.style import LIGHT, THEMES, Look, Theme, applied, styles_of
from mtabench.errors import UsageError, hint_at
from mtabench.problem.case import PASSES
from mtabench.results.outputs import written

KINDS = load()
FORMATS = ("png", "svg")
DPI = 144


def draw(
    csv_paths: Iterable[str | Path],
    out_dir: str | Path,
    kinds: Sequence[str] = (),
    themes: Sequence[str] = (LIGHT.name,),
    formats: Sequence[str] = FORMATS,
    written: Callable[[Path], object] = lambda path: None,
) -> list[Path]:
    """Draw charts of every pass in the results files; returns the paths of the charts written.

    All kinds that the data can give are drawn, or those named in `kinds`. A file is called PASS-KIND.FORMAT, with
    `-dark` before the dot on a dark page. It holds a stamp of the results, as `stamp` gives it. Settings that one chart
    cannot show together (device, dtype, heads, batch, causal) make charts of their own, named after what differs.
    `written` receives each path as soon as the file is there.

    Raises UsageError for a file that is no results file, and a cell that two files have different rows of. So it does
    for an unwritable folder, an unknown kind, theme or format, and a kind in `kinds` that the data cannot give. But for
    the folder all of this is found before any file is written.
    """
    for what, given, known in (
        ("kind of chart", kinds, KINDS),
        ("theme", themes, THEMES),
        ("chart format", formats, FORMATS),
    ):
        for name in given:
            if name not in known:
                hint = hint_at(name, list(known), "expected one or more of")
                raise UsageError(f"there is no {what} {name!r}; {hint}")
    csv_paths = list(csv_paths)
    cells, made_from = read_cells(csv_paths), stamp(csv_paths)
    styles = styles_of(zip(cells["impl"], cells["op"] == "attention", strict=True))
    paths = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in letters that ours lacks
        charts = _charts(cells, kinds, csv_paths)
        for theme in (THEMES[name] for name in themes):
            look, end = Look(theme, styles), "" if theme is LIGHT else f"-{theme.name}"
            for stem, chart in charts:
                with applied(theme):
                    figure = make_figure(chart, look)
                    for name in formats:
                        paths.append(_save(figure, Path(out_dir) / f"{stem}{end}.{name}", theme, made_from))
                        written(paths[-1])
    return paths


def stamp(csv_paths: Iterable[str | Path]) -> str:
    """The hash of these files that a chart keeps in its metadata, so that an outdated chart is recognized."""
    return "sha256 " + " ".join(hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] for path in csv_paths)


def _charts(cells: pd.DataFrame, kinds: Sequence[str], csv_paths: Sequence[str | Path]) -> list[tuple[str, Chart]]:
    """The charts with their names; raises UsageError for one of `kinds` that these cells cannot give."""
    charts = []
    for name in kinds or KINDS:
        found = list(charts_of(cells, name, KINDS[name]))
        if kinds and not found:
            files = ", ".join(str(path) for path in csv_paths[:3]) + (" and more" if csv_paths[3:] else "")
            raise UsageError(f"{files} cannot give a chart of kind {name}; it needs {KINDS[name].needs}")
        charts += found
    return charts


def charts_of(cells: pd.DataFrame, name: str, kind: Kind) -> Iterator[tuple[str, Chart]]:
    """The charts of one kind that these cells give, each with its name; raises UsageError if one would be too large."""
    for pass_ in PASSES:
        for suffix, setting in settings(cells[cells["pass"] == pass_]):
            chart = kind.chart(setting)
            if chart:
                yield f"{pass_}-{name}{suffix}", chart


def _save(figure: Figure, path: Path, theme: Theme, made_from: str) -> Path:
    metadata = {"Source": made_from, ("Date" if path.suffix == ".svg" else "Software"): None}
    with written(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=DPI, facecolor=theme.paper, metadata=metadata)
    return path
