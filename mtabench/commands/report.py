"""The command `mtabench report`: read a results file, write the page and the Markdown, say where they are."""

from __future__ import annotations

from pathlib import Path

from mtabench.errors import UsageError
from mtabench.pages.page import GENERATOR
from mtabench.report.data import read_report
from mtabench.report.markdown import MARK, markdown
from mtabench.report.page import html_page
from mtabench.results.outputs import check_outputs, named, write_text
from mtabench.results.results_file import samples_paths


def run(csv: Path, out: Path | None, markdown_out: Path | None, overwrite: bool) -> int:
    """Write NAME-report.html and NAME-report.md beside NAME.csv, or where `out` and `markdown_out` say.

    With `out` alone the Markdown stands beside the page, under the page's name.

    A file that is there is replaced if it is a report; anything else stays, unless `overwrite` says otherwise. Raises
    UsageError before anything is written.
    """
    if out is not None and out.suffix == ".md":
        raise UsageError(f"--out {out} is for the HTML page; give --markdown {out} for the Markdown")
    page = out or csv.parent / f"{csv.stem}-report.html"
    text = markdown_out or page.parent / f"{page.stem}.md"
    marks = {"--out": GENERATOR, "--markdown": MARK}
    check_outputs({"--out": page, "--markdown": text}, (csv, *samples_paths(csv)), overwrite, marks)
    report = read_report(csv)
    for path, content, suffix in ((page, html_page(report), ".html"), (text, markdown(report), ".md")):
        write_text(path, content)
        print(f"report: {named(path, suffix)}")
    return 0
