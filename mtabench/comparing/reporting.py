"""How two runs are judged, and where what is found goes: standard output, files, GitHub."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mtabench.comparing import comparison_reports as reports
from mtabench.comparing.compare import Comparison, NotComparableError, parse_fail_on, parse_threshold
from mtabench.console import make_console
from mtabench.errors import UsageError
from mtabench.escaping import in_log
from mtabench.json_output import print_json
from mtabench.options import Comparing
from mtabench.results import outputs
from mtabench.results.outputs import append_text, write_text
from mtabench.results.results_file import samples_paths
from mtabench.tables import print_prose

FORMATS = ("table", "markdown", "json")
# Where two runs cannot be compared they say why, so that CI shows more than a report that is missing.
REPORTS: Mapping[str, Callable[[Comparison | str], str]] = {"markdown": reports.markdown, "junit": reports.junit}


@dataclass(frozen=True, slots=True)
class ComparisonOptions:
    """How to judge, what to print, the files to write by their names in REPORTS, and whether to replace any there."""

    threshold: float
    fail_on: tuple[str, ...]
    format: str
    outputs: Mapping[str, Path]
    overwrite: bool = False


def comparison_options(typed: Comparing) -> ComparisonOptions:
    """The options as typed, parsed; raises UsageError."""
    if typed.format_ not in FORMATS:
        raise UsageError(f"--format {typed.format_!r} is not known; expected one of {', '.join(FORMATS)}")
    chosen = {name: getattr(typed, name) for name in REPORTS if getattr(typed, name) is not None}
    share, fail_on = parse_threshold(typed.threshold), parse_fail_on(typed.fail_on)
    return ComparisonOptions(share, fail_on, typed.format_, chosen, typed.overwrite)


@contextmanager
def refusal_reported(asked: ComparisonOptions) -> Iterator[None]:
    """Let the reports asked for, GitHub's included, say why two runs cannot be compared."""
    try:
        yield
    except NotComparableError as error:
        _write_reports(str(error), asked)
        _tell_github(str(error))
        raise


def report(found: Comparison, asked: ComparisonOptions) -> int:
    """Write and print a comparison as asked, for GitHub too where it runs this; the exit code."""
    _write_reports(found, asked)
    if asked.format == "json":
        print_json("compare", reports.comparison_data(found))
    elif asked.format == "markdown":
        print(in_log(reports.markdown(found)))
    else:
        console = make_console()
        reports.print_cells(console, found)
        for text in reports.conclusions(found):
            print_prose(console, text)
    _tell_github(found)
    return found.exit_code


def _write_reports(found: Comparison | str, asked: ComparisonOptions) -> None:
    for name, path in asked.outputs.items():
        write_text(path, REPORTS[name](found))


def _tell_github(found: Comparison | str) -> None:
    """Print annotations and add to the step summary, where GitHub Actions runs this."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    for text in reports.github_annotations(found):
        print(text)
    if os.environ.get("GITHUB_STEP_SUMMARY"):
        append_text(Path(os.environ["GITHUB_STEP_SUMMARY"]), reports.step_summary(found))


def check_outputs(asked: ComparisonOptions, results: Sequence[Path]) -> None:
    """Raise UsageError for a report asked for that may not be written; `results` are the files compared."""
    files = {f"--{name.replace('_', '-')}": path for name, path in asked.outputs.items()}
    outputs.check_outputs(files, [one for path in results for one in (path, *samples_paths(path))], asked.overwrite)
