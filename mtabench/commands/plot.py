"""The command `mtabench plot`: charts from results files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtabench.charts import draw
from mtabench.problem import axes
from mtabench.results.results_file import charts_folder, read_file, say_if_torn


def run(csv_paths: Sequence[Path], kinds: str | None, themes: str, formats: str, out: Path | None) -> int:
    """Draw charts from results files, and print the path of each when it is there."""
    draw(
        csv_paths,
        out or charts_folder(csv_paths[0]),
        axes.parse_names(kinds, "--kind") if kinds is not None else (),
        axes.parse_names(themes, "--theme"),
        axes.parse_names(formats, "--formats"),
        written=lambda path: print(path, flush=True),
    )
    for path in csv_paths:
        say_if_torn(read_file(path))
    return 0
