"""The command `mtabench compare`: read two runs, compare them, print what changed, write the reports asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mtabench import comparison_reports as reports
from mtabench.compare import Comparison, compare, parse_threshold
from mtabench.errors import UsageError
from mtabench.results import samples_path
from mtabench.runs import read_run
from mtabench.table import make_console

FORMATS = ("table", "markdown")
REPORTS: Mapping[str, Callable[[Comparison], str]] = {
    "markdown": reports.markdown,
    "junit": reports.junit,
    "github_action_benchmark": lambda found: reports.github_action_benchmark(found.head),
    "bencher": lambda found: reports.bencher(found.head),
}


def compare_files(
    base: Path, head: Path, threshold: str, strict: bool, format_: str, outputs: Mapping[str, Path | None]
) -> int:
    """Compare two results files and say what changed; the exit code. `outputs` has files by the names in REPORTS.

    Nothing is written unless the two could be compared.
    """
    if format_ not in FORMATS:
        raise UsageError(f"--format {format_!r} is not known; expected one of {', '.join(FORMATS)}")
    share = parse_threshold(threshold)
    chosen = {name: path for name, path in outputs.items() if path is not None}
    _check_outputs(chosen, (base, head))
    found = compare(read_run(base), read_run(head), share, strict)
    for name, path in chosen.items():
        _write(path, REPORTS[name](found))
    if format_ == "markdown":
        print(reports.markdown(found))
    else:
        console = make_console()
        console.print(reports.table(found))
        for text in (*found.notes, reports.summary(found)):
            console.print(text, soft_wrap=True, markup=False, highlight=False)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for text in reports.github_annotations(found):
            print(text)
        if os.environ.get("GITHUB_STEP_SUMMARY"):
            _write(Path(os.environ["GITHUB_STEP_SUMMARY"]), reports.step_summary(found), mode="a")
    return found.exit_code


def _check_outputs(chosen: Mapping[str, Path], inputs: Sequence[Path]) -> None:
    """Raise UsageError for a report that would overwrite what is compared, or another report."""
    taken = {path.resolve() for results in inputs for path in (results, samples_path(results))}
    for name, path in chosen.items():
        option = f"--{name.replace('_', '-')} {path}"
        if path.is_dir():
            raise UsageError(f"{option} is a folder; give the name of a file")
        if path.resolve() in taken:
            raise UsageError(f"{option} would overwrite what is compared or another report; give another name")
        taken.add(path.resolve())


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another name") from error
