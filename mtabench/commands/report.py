"""The command `mtabench report`: read a results file, write the page and the Markdown, say where they are."""

from __future__ import annotations

from pathlib import Path

from mtabench.errors import UsageError
from mtabench.pages.page import GENERATOR
from mtabench.report.data import read_report
from mtabench.report.markdown import MARK, markdown
from mtabench.report.page import html_page
from mtabench.results.outputs import check_reports, written
from mtabench.results.results_file import samples_path

MARK_BYTES = 2000  # at the head of a file, where a report says that it is one


def run(csv: Path, out: Path | None, markdown_out: Path | None, overwrite: bool) -> int:
    """Write NAME-report.html and NAME-report.md beside NAME.csv, or where `out` and `markdown_out` say.

    A file that is there is replaced if it is a report; anything else stays, unless `overwrite` says otherwise. Raises
    UsageError before anything is written.
    """
    if out is not None and out.suffix == ".md":
        raise UsageError(f"--out {out} is for the HTML page; give --markdown {out} for the Markdown")
    page = out or csv.parent / f"{csv.stem}-report.html"
    text = markdown_out or csv.parent / f"{csv.stem}-report.md"
    check_reports({"--out": page, "--markdown": text}, (csv, samples_path(csv)), "the results")
    if not overwrite:
        _check_is_report("--out", page, GENERATOR)
        _check_is_report("--markdown", text, MARK)
    report = read_report(csv)
    contents = {page: html_page(report), text: markdown(report)}
    for path, content in contents.items():
        with written(path) as file:
            file.write(content.encode())
        print(f"report: {path}")
    return 0


def _check_is_report(option: str, path: Path, mark: str) -> None:
    """Raise UsageError for a file that is there and does not begin like a report."""
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            ours = mark.encode() in file.read(MARK_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; give another {option}") from error
    if not ours:
        raise UsageError(
            f"{path} exists and is no report of mtabench; give another {option}, or --overwrite to replace the file"
        )
