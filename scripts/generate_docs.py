"""Writes the tables of docs/results.md from what they describe: the columns of results files, the kinds of charts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from mtabench.charts import KINDS
from mtabench.results.columns import SCHEMA_VERSION, TABLE

PAGE = Path(__file__).parents[1] / "docs/results.md"


def columns() -> Iterator[str]:
    """A line for each column, in the order of the file."""
    yield "| column | unit | since | meaning |"
    yield "| --- | --- | --- | --- |"
    for column in TABLE:
        unit = f" {column.unit} " if column.unit else " "
        yield f"| `{column.name}` |{unit}| {SCHEMA_VERSION}.{column.since} | {column.sentence} |"


def charts() -> Iterator[str]:
    """A line for each kind of chart, in the order in which they are drawn."""
    yield "| kind | needs |"
    yield "| --- | --- |"
    for name, kind in KINDS.items():
        yield f"| `{name}` | {kind.needs} |"


BLOCKS: Mapping[str, Callable[[], Iterator[str]]] = {"columns": columns, "charts": charts}


def generated(text: str) -> str:
    """A page with each block between `<!-- NAME -->` and `<!-- /NAME -->` made anew."""
    for name, lines in BLOCKS.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        block = start + "\n".join(lines()) + "\n" + end
        text, count = re.subn(re.escape(start) + ".*?" + re.escape(end), lambda _, block=block: block, text, flags=re.S)
        if count != 1:
            raise SystemExit(f"{PAGE} has {count} blocks {start.strip()}; expected one")
    return text


if __name__ == "__main__":
    PAGE.write_text(generated(PAGE.read_text()))
