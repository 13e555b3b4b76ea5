"""The results file: one CSV row a cell, raw samples beside it, and how it is read. Its columns: columns.py.

A file may come from a stranger: what is read is bounded, checked column by column, and printable. A last line
that lacks fields was cut off by a kill and is dropped. How it is written: writer.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtabench.errors import UsageError
from mtabench.escaping import in_log, printable, quoted
from mtabench.problem.case import Case
from mtabench.results.columns import SCHEMA_VERSION, TABLE
from mtabench.results.csv_reading import FIRST_ROW, read_csv
from mtabench.results.fields import Check

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = tuple(column.name for column in TABLE)
# What identifies a cell within a file; `cell_of` makes the column `cell` of the samples file of it.
KEY_COLUMNS = tuple(column.name for column in TABLE if column.role == "cell")
MEASURED_COLUMNS = tuple(column.name for column in TABLE if column.role == "measured")
NUMERIC_COLUMNS = tuple(column.name for column in TABLE if column.field.numeric)
# How many columns of KEY_COLUMNS a file of each version has.
_KEYS_OF_VERSIONS = tuple(
    sum(column.role == "cell" and column.since <= since for column in TABLE)
    for since in sorted({column.since for column in TABLE if column.role == "cell"})
)
LATER_COLUMNS = tuple(column.name for column in TABLE if column.since)  # older files do not have these
SAMPLE_COLUMNS = ("run_id", "cell", "round", "sample", "ms")
MOST_BYTES, MOST_ROWS = 64 << 20, 100_000  # a row takes about 450 bytes; all of them are held in memory

Row = Mapping[str, Any]
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResultsFile:
    """A results file as checked texts by column, those that this mtabench does not know included.

    `torn` if it ends in the middle of a row, which is left out.
    """

    path: Path
    columns: Mapping[str, list[str]]
    torn: bool

    def rows(self) -> list[dict[str, str]]:
        """The rows, with the texts by column name."""
        return [dict(zip(self.columns, texts, strict=True)) for texts in zip(*self.columns.values(), strict=True)]


def text_of(value: object) -> str:
    """A value as it stands in the file: empty for None, NaN and infinities, printable and on one line."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return printable(" ".join(str(value).split()))


def of_gpu(row: Mapping[str, Any]) -> bool:
    """Whether a row was measured on a GPU: its machine has a driver, or CUDA."""
    return bool(row.get("driver") or row.get("cuda"))


def key_of(case: Case) -> Key:
    """The texts of KEY_COLUMNS for a cell: they show whether a file already has it."""
    columns = case.columns
    return tuple(text_of(columns[name]) for name in KEY_COLUMNS)


def key_of_row(row: Mapping[str, str]) -> Key:
    """The same for a row as it stands in a file."""
    return tuple(row[name] for name in KEY_COLUMNS)


def cell_of(key: Key) -> str:
    """A key as one text, joined with "/"; columns that older files lack are left out where all of them are empty."""
    return "/".join(key[: next(count for count in _KEYS_OF_VERSIONS if not any(key[count:]))])


def samples_path(path: Path) -> Path:
    """Where the raw samples of `path` go: NAME.samples.csv beside NAME.csv."""
    return path.parent / f"{path.stem if path.suffix == '.csv' else path.name}.samples.csv"


def samples_paths(path: Path) -> tuple[Path, Path]:
    """Both names that the samples of `path` may have: as they are, and compressed with gzip."""
    plain = samples_path(path)
    return plain, plain.with_name(f"{plain.name}.gz")


def find_samples(path: Path) -> Path:
    """The samples beside `path`, in whichever form they are; the plain name where there are none."""
    plain, compressed = samples_paths(path)
    return compressed if compressed.exists() and not plain.exists() else plain


def read_file(path: Path | str, with_rows: bool = False) -> ResultsFile:
    """The rows of a results file, maybe none, as texts that the columns' checks let pass.

    Raises UsageError for a file that is missing, too large, of another schema_version, or without a column of it. So it
    does for an invalid field, and `with_rows` for a file without rows.
    """
    path = Path(path)
    file = read_csv(path, MOST_BYTES, MOST_ROWS, ends_in_text=True)
    if not file.header and not file.begins(COLUMNS):
        raise UsageError(f"{path} is not a results file of mtabench: it has no whole line")
    header = file.header or COLUMNS
    missing = [name for name in COLUMNS if name not in (*header, *LATER_COLUMNS)]
    if missing:
        raise UsageError(
            f"{path} is not a results file of mtabench: it has no column {missing[0]}"
            + (f" and {len(missing) - 1} more are missing" if missing[1:] else "")
        )
    columns = file.columns() or {name: [] for name in header}
    columns |= {name: [""] * len(columns["schema_version"]) for name in LATER_COLUMNS if name not in columns}
    for number, version in enumerate(columns["schema_version"], start=FIRST_ROW):
        if version != str(SCHEMA_VERSION):
            raise UsageError(
                f"{path} has schema version {version[:20] or '(none)'} in line {number}, "
                f"and this mtabench reads version {SCHEMA_VERSION}"
            )
    for column in TABLE:
        if column.field.check:
            columns[column.name] = _checked(path, column.name, columns[column.name], column.field.check)
    if with_rows and not columns["schema_version"]:
        raise UsageError(f"{path} is empty: it has no rows")
    return ResultsFile(path, columns, file.torn)


def charts_folder(csv_path: Path) -> Path:
    """Charts have the same names for every sweep, so each results file has a folder of its own."""
    return csv_path.parent / f"{csv_path.stem}-charts"


def say_if_torn(file: ResultsFile) -> None:
    """Say on stderr that a row of the file is left out, if one is."""
    if file.torn:
        print(in_log(printable(f"{file.path} ends in the middle of a row, which is left out")), file=sys.stderr)


def read_results(path: Path | str) -> pd.DataFrame:
    """The rows of a results file: NUMERIC_COLUMNS as numbers (NaN where empty), `causal` bool, the rest text.

    Raises UsageError where `read_file` does, and for a file without rows.
    """
    import pandas as pd

    rows = records(read_file(path, with_rows=True).columns)
    kinds: dict[str, Any] = dict.fromkeys(NUMERIC_COLUMNS, float) | {"causal": bool}
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype=object).astype(kinds)


def records(columns: Mapping[str, Sequence[str]], names: Sequence[str] = COLUMNS) -> list[dict[str, Any]]:
    """Checked texts by column as rows of numbers, NaN where empty, of `causal` as a bool, and of texts."""
    values: dict[str, Sequence[Any]] = {name: columns[name] for name in names}
    values |= {name: [float(text or "nan") for text in columns[name]] for name in names if name in NUMERIC_COLUMNS}
    values["causal"] = [text == "true" for text in columns["causal"]]
    return [dict(zip(names, row, strict=True)) for row in zip(*values.values(), strict=True)]


def _checked(path: Path, name: str, texts: Sequence[str], check: Check) -> list[str]:
    """The texts of a column as mtabench writes them; each that stands there is checked once."""
    found = dict.fromkeys(texts, "")
    for text in found:
        try:
            found[text] = check(text)
        except ValueError as error:
            line, there = texts.index(text) + FIRST_ROW, quoted(text) if text else "nothing"
            raise UsageError(f"line {line} of {path} has {there} in the column {name}; expected {error}") from None
    return list(map(found.__getitem__, texts))
