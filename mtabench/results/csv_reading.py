"""CSV files that may come from a stranger: read within bounds and made printable, or refused."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mtabench.errors import UsageError
from mtabench.escaping import printable, quoted

MOST_COLUMNS = 256
FIRST_ROW = 2  # the line of the first record
MOST_LINE = 1_000_000  # bytes; a field has at most 131072, the limit of Python's reader

_PLAIN = bytes(range(0x20, 0x7F)) + b"\r\n"


@dataclass(frozen=True, slots=True)
class CsvFile:
    """The header of a file and its records, one a line; `rest` is what comes after the last whole line, and left out.

    `records` is read once. Empty header: the file has no whole line.
    """

    header: list[str]
    records: Iterator[list[str]]
    rest: bytes

    @property
    def torn(self) -> bool:
        """Whether the file ends in the middle of a line."""
        return bool(self.rest)

    def columns(self) -> dict[str, list[str]]:
        """The texts of all records by the names in the header; equal texts are one object, which is quick to find."""
        seen: dict[str, str] = {}
        texts, width = [seen.setdefault(text, text) for text in chain.from_iterable(self.records)], len(self.header)
        return {name: texts[place::width] for place, name in enumerate(self.header)}

    def begins(self, columns: Sequence[str]) -> bool:
        """Whether the header is of these columns, whole or, in a file without a whole line, torn."""
        return self.header == list(columns) if self.header else ",".join(columns).encode().startswith(self.rest)


def read_csv(path: Path, most_bytes: int, most_records: int, ends_in_text: bool = False) -> CsvFile:
    """Read a CSV file in UTF-8, with or without a byte order mark; in every field what is not printable is visible.

    One whose name ends in .gz is decompressed, within the same bounds. Empty lines at its end do not count. A last line
    without its end was cut off, unless it `is_whole` and the file's last field `ends_in_text`: an editor saved it so.

    Raises UsageError, here or from `records`, for what is no such file or larger than the bounds.
    """
    content = _content(path, most_bytes)
    if ends_in_text and is_whole(content):
        content += b"\n"
    whole = content[: content.rfind(b"\n") + 1]
    records = _records(path, whole.rstrip(b"\r\n") + b"\n" if whole.strip() else whole, most_records + 1)
    header = next(records, [])
    if whole and not header:
        raise UsageError(f"cannot read {path} as a CSV file: its first line is empty; expected the names of columns")
    if len(header) > MOST_COLUMNS:
        raise UsageError(f"{path} has {len(header)} columns; expected at most {MOST_COLUMNS}")
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{path} has two columns that are called {quoted(twice)}; expected each name once")
    return CsvFile(header, records, content[len(whole) :])


def is_whole(content: bytes) -> bool:
    """Whether the last line of a CSV file lacks its end alone: it has all fields, and ends as the line before.

    The last field of a results file is a command. Commands of one sweep end in the same words.
    """
    head, *others = content.split(b"\n")
    if not others:
        return False
    *others, last = others
    try:
        header, fields = (next(csv.reader([line.decode()], strict=True), []) for line in (head, last))
    except (csv.Error, UnicodeDecodeError):
        return False
    alike = not others or others[-1].strip().rsplit(b" ")[-1] == last.rsplit(b" ")[-1]
    return 1 < len(header) == len(fields) and alike


def check_file(path: Path) -> None:
    """Raise UsageError unless there is such a regular file: a pipe or a device might never end."""
    if not path.exists():
        raise UsageError(f"there is no file {path}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the name of a results file in it")
    if not path.is_file():
        raise UsageError(f"cannot read {path} as a CSV file: it is not a regular file")


def plain_lines(path: Path, most_bytes: int) -> bytes:
    """The whole lines of a file of printable ASCII; raises UsageError, and ValueError for one of other texts."""
    content = _content(path, most_bytes)
    if content.translate(None, _PLAIN) or b'"' in content:
        raise ValueError("not plain")
    return content[: content.rfind(b"\n") + 1]


def _content(path: Path, most_bytes: int) -> bytes:
    """The bytes of a file; raises UsageError."""
    try:
        check_file(path)
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"cannot read {path}: it is no whole file of gzip") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > most_bytes:
        raise UsageError(f"{path} is larger than {most_bytes >> 20} MiB, the most that is read of such a file")
    if b"\0" in content:
        raise UsageError(f"cannot read {path} as a CSV file: it has a byte 0, which no text has")
    return content


def _records(path: Path, content: bytes, most: int) -> Iterator[list[str]]:
    """The header and what follows, each as long as the header and in one line."""
    longest = max(map(len, io.BytesIO(content)), default=0)
    if longest > MOST_LINE:
        number = next(i for i, line in enumerate(io.BytesIO(content), start=1) if len(line) > MOST_LINE)
        raise UsageError(f"line {number} of {path} is longer than {MOST_LINE} bytes")
    if content.count(b"\n") > most:
        raise UsageError(f"{path} has more than {most - 1} rows, the most that are read of such a file")
    plain = not content.translate(None, _PLAIN)  # and so printable
    reader = csv.reader(io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="\n"), strict=True)
    quote = f"of {path} has a quote that does not end; expected one line a row"
    done = length = 0
    try:
        for record in reader:
            done += 1
            length = length or len(record)
            if reader.line_num != done:
                raise UsageError(f"line {done} {quote}")
            if len(record) != length:
                raise UsageError(f"line {done} of {path} has {len(record)} fields, and its header {length}")
            yield record if plain else [printable(field) for field in record]
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {path} as a CSV file: it is not text in UTF-8 ({error.reason})") from error
    except csv.Error as error:
        if reader.line_num > done + 1:
            raise UsageError(f"line {done + 1} {quote}") from error
        raise UsageError(f"cannot read line {done + 1} of {path} as CSV: {error}") from error
