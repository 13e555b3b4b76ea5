"""The command `mtabench plot`: charts from results files."""

from collections.abc import Sequence
from pathlib import Path

from mtabench.charts import FORMATS, draw
from mtabench.errors import UsageError
from mtabench.problem import axes
from mtabench.results.results_file import charts_folder, read_file, say_if_torn


def run(csv_paths: Sequence[Path], kinds: str | None, themes: str, formats: str, out: Path | None) -> int:
    """Draw charts from results files, and print the path of each when it is there."""
    if out is not None and out.suffix[1:] in FORMATS:
        raise UsageError(f"--out {out} is for a folder, in which each chart gets a name; give --out {out.stem}")
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
