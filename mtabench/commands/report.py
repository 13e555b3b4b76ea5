"""The command `mtabench report`: read a results file, write the page, say where it is."""

from pathlib import Path

from mtabench.errors import UsageError
from mtabench.pages.page import GENERATOR
from mtabench.report.data import html_page, read_report
from mtabench.results.outputs import check_outputs, named, write_text
from mtabench.results.results_file import samples_paths


def run(csv: Path, out: Path | None, overwrite: bool) -> int:
    """Write NAME-report.html beside NAME.csv, or where `out` says.

    A file that is there is replaced if it is a report; anything else stays, unless `overwrite` says otherwise. Raises
    UsageError before anything is written.
    """
    if out is not None and out.suffix == ".md":
        raise UsageError(f"--out {out} is for the HTML page; for Markdown type mtabench show {csv} --markdown")
    page = out or csv.parent / f"{csv.stem}-report.html"
    check_outputs({"--out": page}, (csv, *samples_paths(csv)), overwrite, {"--out": GENERATOR})
    write_text(page, html_page(read_report(csv)))
    print(f"report: {named(page, '.html')}")
    return 0
