"""The results file: one CSV row a cell, appended whole and flushed to disk; raw samples beside it.

A line that does not end in a newline was cut off by a kill and is dropped. One process writes it at a time.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtabench.case import Case
from mtabench.errors import MtabenchError, UsageError
from mtabench.lock import FileLock
from mtabench.registry import splitting_names

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
STATUSES = ("ok", "unsupported", "wrong", "oom", "error", "timeout", "invalid")

# What identifies a cell within a file; joined with "/" it is the column `cell` of the samples file.
KEY_COLUMNS = (
    "pass", "impl", "op", "dtype", "batch", "heads", "kv_heads", "seq", "head_dim", "conv_q", "conv_k",
    "causal", "splits",
)  # fmt: skip
MEASURED_COLUMNS = (
    "rounds", "samples", "median_ms", "p10_ms", "p90_ms", "ci95_low_ms", "ci95_high_ms", "baseline",
    "speedup", "useful_tflops", "executed_tflops", "gbytes_s", "fraction_of_roofline", "peak_memory_mb",
    "rel_error", "timer", "cache", "sm_clock_mhz", "throttled",
)  # fmt: skip
COLUMNS = (
    "schema_version", "run_id", "started_utc", *KEY_COLUMNS, "splits_used", "status", "reason",
    *MEASURED_COLUMNS, "device", "driver", "cuda", "torch", "triton", "mtabench", "git_sha", "git_dirty",
    "repro",
)  # fmt: skip
SAMPLE_COLUMNS = ("run_id", "cell", "round", "sample", "ms")
NUMERIC_COLUMNS = (
    "schema_version", "batch", "heads", "kv_heads", "seq", "head_dim", "conv_q", "conv_k",
    *(name for name in MEASURED_COLUMNS if name not in ("baseline", "timer", "cache", "throttled")),
)  # fmt: skip

Row = Mapping[str, Any]
Key = tuple[str, ...]


def text_of(value: object) -> str:
    """A value as it stands in the file: empty for None, NaN and infinities, never more than one line."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return " ".join(str(value).split())


def key_of(case: Case) -> Key:
    """The texts of KEY_COLUMNS for a cell: what tells whether a file already has it."""
    values = (
        case.pass_, case.impl, case.op, case.dtype, case.batch, case.heads, case.kv_heads, case.seq,
        case.head_dim, case.conv_q, case.conv_k, case.causal, case.splits,
    )  # fmt: skip
    return tuple(text_of(value) for value in values)


def key_of_row(row: Mapping[str, str]) -> Key:
    """The same for a row as it stands in a file."""
    return tuple(row[name] for name in KEY_COLUMNS)


def samples_path(path: Path) -> Path:
    """Where the raw samples of `path` go: NAME.samples.csv beside NAME.csv."""
    return path.with_name((path.stem if path.suffix == ".csv" else path.name) + ".samples.csv")


def check_destination(path: Path, resume: bool) -> list[dict[str, str]]:
    """The rows that a sweep to `path` will find there; raises UsageError if it may not write. Touches nothing."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the name of a CSV file in it")
    FileLock(path).check()
    rows = _check_file(path, resume)
    writable = path if path.exists() else _nearest_folder(path)
    if not os.access(writable, os.W_OK):
        raise UsageError(f"cannot write {path}: {writable} is not writable; give another --out")
    return rows


class Writer:
    """Appends whole rows to one results file, held by an exclusive lock until `close`.

    `done` maps the key of each cell the file already has to its row. Raises UsageError if another process
    writes the file, if it exists and `resume` is false, if it has another schema, or if it can't be written.
    """

    def __init__(self, path: Path, *, resume: bool = False, command: str = "") -> None:
        check_destination(path, resume)
        self.path = path
        self.samples_path = samples_path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(path)
            self._lock.acquire(command)
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; give another --out") from error
        try:
            self.done = {key_of_row(row): row for row in _check_file(path, resume)}
            _prepare(self.samples_path, SAMPLE_COLUMNS)
            _prepare(path, COLUMNS)
        except BaseException:
            self._lock.release()
            raise

    def write(self, rows: Sequence[Row], samples: Iterable[Sequence[object]] = ()) -> None:
        """Append rows (values by column name) and their samples (SAMPLE_COLUMNS); on disk when it returns."""
        sample_lines = list(samples)
        if sample_lines:  # before the rows, so that every row in the file has its samples
            _append(self.samples_path, _csv_text(sample_lines))
        texts = [[text_of(row.get(name)) for name in COLUMNS] for row in rows]
        _append(self.path, _csv_text(texts))
        for line in texts:
            row = dict(zip(COLUMNS, line, strict=True))
            self.done[key_of_row(row)] = row

    def close(self) -> None:
        """Give the file back."""
        self._lock.release()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_results(path: Path | str) -> pd.DataFrame:
    """The rows of a results file: NUMERIC_COLUMNS as numbers (NaN where empty), `causal` bool, the rest text.

    Raises UsageError for a file that is missing, empty, of another schema_version, or without a column of it.
    """
    import pandas as pd

    path = Path(path)
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    rows = _read_rows(path)
    if not rows:
        raise UsageError(f"{path} has no rows")
    table = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    for name in NUMERIC_COLUMNS:
        try:
            table[name] = pd.to_numeric(table[name].replace("", None)).astype(float)
        except ValueError as error:
            raise UsageError(f"{path} has something other than a number in the column {name}") from error
    table["causal"] = table["causal"] == "true"
    return table


def _check_file(path: Path, resume: bool) -> list[dict[str, str]]:
    """The rows that a sweep to `path` finds there; UsageError if it may not add to them."""
    if not path.exists() or not path.stat().st_size:
        return []
    if not resume:
        raise UsageError(f"{path} already exists; give --resume to complete it, or another --out")
    rows = _read_rows(path)
    if rows and tuple(rows[0]) != COLUMNS:
        raise UsageError(f"{path} has other columns than this mtabench writes; give another --out")
    return rows


def _read_rows(path: Path) -> list[dict[str, str]]:
    """The whole rows of a file, checked against the schema; none if it does not exist or is empty."""
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path} as a CSV file: {error}") from error
    whole = text[: text.rfind("\n") + 1]
    lines = csv.reader(io.StringIO(whole, newline=""))
    header = next(lines, None)
    if header is None:
        return []
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise UsageError(
            f"{path} is not a results file of mtabench: it has no column {missing[0]}"
            + (f" and {len(missing) - 1} more are missing" if missing[1:] else "")
        )
    rows = []
    for number, line in enumerate(lines, start=2):
        if len(line) != len(header):
            raise UsageError(f"line {number} of {path} has {len(line)} fields, and its header {len(header)}")
        row = dict(zip(header, line, strict=True))
        if row["schema_version"] != str(SCHEMA_VERSION):
            raise UsageError(
                f"{path} has schema version {row['schema_version'] or '(none)'} in line {number}, "
                f"and this mtabench reads version {SCHEMA_VERSION}"
            )
        if row["pass"] == "decode" and not row["splits"] and row["impl"] in splitting_names():
            row["splits"] = "auto"  # files from before splits could be swept leave it empty
        rows.append(row)
    return rows


def _prepare(path: Path, columns: Sequence[str]) -> None:
    """Cut off a torn last line, and start an empty file with its header."""
    try:
        with path.open("ab+") as file:
            file.seek(0)
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
            empty = b"\n" not in content
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another --out") from error
    if empty:
        _append(path, _csv_text([columns]))


def _append(path: Path, text: str) -> None:
    """Append a text in one write and wait for the disk; on a failure the file is as it was."""
    try:
        with path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                data = text.encode()
                if file.write(data) != len(data):
                    raise OSError(0, "no room left for a whole row")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise
    except OSError as error:
        raise MtabenchError(f"cannot write {path}: {error.strerror}; the rows before are kept") from error


def _csv_text(lines: Iterable[Sequence[object]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([text_of(value) for value in line] for line in lines)
    return text.getvalue()


def _nearest_folder(path: Path) -> Path:
    """The folder that exists and in which `path` would be made; UsageError if a file is in the way."""
    for folder in path.absolute().parents:
        if folder.is_dir():
            return folder
        if folder.exists():
            raise UsageError(f"cannot write {path}: {folder} is a file, not a folder; give another --out")
    return Path("/")
