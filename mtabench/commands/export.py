"""The command `mtabench export`: a results file for papers, pull requests, spreadsheets and programs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mtabench.errors import UsageError
from mtabench.escaping import in_latex, in_log, in_spreadsheet
from mtabench.results.columns import TABLE, values_of
from mtabench.results.outputs import check_outputs, write_text
from mtabench.results.result_view import make_view, markdown_of, up_to_rank
from mtabench.results.results_file import COLUMNS, read_file, samples_paths, say_if_torn
from mtabench.results.row_filter import parse_where, select, sort_key

Rows = Sequence[Mapping[str, str]]

HIGHEST_RANK = {"markdown": 8, "latex": 4}  # of the columns shown: a page is narrower than a screen


def run(
    path: Path, out: Path | None, format_: str | None, where: Sequence[str], sort: str | None, overwrite: bool
) -> int:
    """Write the rows for which `where` holds to `out`, or print them; raises UsageError.

    The format is that of `format_`, else that of the suffix of `out`, else Markdown.
    """
    chosen = _format(out, format_)
    conditions, in_order = parse_where(where), sort_key(sort) if sort is not None else list
    if out is not None:
        check_outputs({"--out": out}, [path, *samples_paths(path)], overwrite)
    file = read_file(path, with_rows=True)
    say_if_torn(file)
    rows = in_order(select(file.rows(), conditions, path))
    content = chosen.write(rows)
    if out is None:
        print(in_log(str(content)), end="")
    else:
        write_text(out, content)
        print(out)
    return 0


def _format(out: Path | None, name: str | None) -> Format:
    """The format that is asked for; raises UsageError."""
    if name is not None and name not in FORMATS:
        raise UsageError(f"--format {name!r} is not known; expected one of {', '.join(FORMATS)}")
    if out is None:
        found = FORMATS[name or "markdown"]
        if not found.printed:
            raise UsageError(f"--format {name} is not for printing; give --out FILE{found.suffix}")
        return found
    if name is not None:
        if out.suffix != FORMATS[name].suffix:
            raise UsageError(f"--format {name} is written to a file {FORMATS[name].suffix}, and --out is {out}")
        return FORMATS[name]
    usual = {one.suffix: one for one in FORMATS.values()}
    if out.suffix not in usual:
        raise UsageError(f"--out {out} has no suffix that names a format; expected one of {', '.join(usual)}")
    return usual[out.suffix]


def markdown(rows: Rows) -> str:
    """A table in GitHub's Markdown under what all rows share."""
    return markdown_of(up_to_rank(make_view(rows), HIGHEST_RANK["markdown"]))


def latex(rows: Rows) -> str:
    """A table environment for LaTeX with the package booktabs; what all rows share is its caption."""
    view = up_to_rank(make_view(rows), HIGHEST_RANK["latex"])
    columns = view.columns
    caption = "; ".join(", ".join(facts) for facts in (view.setting, view.device) if facts)
    notes = [f"{column.name}: {column.legend}" for column in columns if column.legend]
    notes += [f"[{i}] {reason}" for i, reason in enumerate(view.reasons, start=1)]
    lines = [
        "% \\usepackage{booktabs}",
        "\\begin{table}",
        "\\centering",
        f"\\caption{{{in_latex('. '.join([caption, *notes]))}.}}",
        f"\\begin{{tabular}}{{{''.join('r' if column.right else 'l' for column in columns)}}}",
        "\\toprule",
        _latex_row([in_latex(column.name) for column in columns]),
        _latex_row([in_latex(f"({column.unit})") if column.unit else "" for column in columns]),
        "\\midrule",
        *(_latex_row([in_latex(column.texts[i]) for column in columns]) for i in range(len(rows))),
        "\\bottomrule",
        "\\end{tabular}",
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def parquet(rows: Rows) -> bytes:
    """Every column of every row, typed, null where nothing is known."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UsageError("Parquet needs pyarrow, which is not installed; pip install 'mtabench[parquet]'") from error
    import pandas as pd

    table = pd.DataFrame([values_of(row) for row in rows])
    for name, field in ((column.name, column.field) for column in TABLE):
        if field.parquet == "time":
            table[name] = pd.to_datetime(table[name], utc=True)
        else:
            table[name] = table[name].astype(field.parquet or ("float64" if field.numeric else "bool"))
    buffer = io.BytesIO()
    table.to_parquet(buffer, engine="pyarrow", index=False)
    return buffer.getvalue()


def spreadsheet(rows: Rows) -> bytes:
    """Every column of every row as CSV in which a spreadsheet finds no formula, and Excel the encoding."""
    import pandas as pd

    table = pd.DataFrame(list(rows), columns=list(COLUMNS), dtype=object).map(in_spreadsheet)
    return table.to_csv(index=False, lineterminator="\r\n").encode("utf-8-sig")


def _latex_row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


class Format(NamedTuple):
    """A format with the suffix of its files."""

    suffix: str
    write: Callable[[Rows], str | bytes]
    printed: bool = True


FORMATS: Mapping[str, Format] = {
    "markdown": Format(".md", markdown),
    "latex": Format(".tex", latex),
    "parquet": Format(".parquet", parquet, printed=False),
    "csv": Format(".csv", spreadsheet, printed=False),
    "jsonl": Format(".jsonl", lambda rows: "".join(f"{json.dumps(values_of(row), allow_nan=False)}\n" for row in rows)),
}
