"""Writes tables of documents: what the code says, and what the committed results say.

    python scripts/generate_docs.py [--check]

With --check nothing is written: the pages that would change are printed, and the exit code is 1 if there are any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmark_tables import BLOCKS

from mtabench.charts import KINDS
from mtabench.registry import IMPLEMENTATIONS
from mtabench.results.columns import SCHEMA_VERSION, TABLE

DOCS = Path(__file__).parents[1] / "docs"


def implementations() -> Iterator[str]:
    """A line for each implementation, in the order of `mtabench list`; docs/models.md has the whole models."""
    yield "| name | computes | passes | devices | what it is |"
    yield "| --- | --- | --- | --- | --- |"
    for entry in (entry for entry in IMPLEMENTATIONS if "train" not in entry.passes):
        computes = {"attention": "plain attention"}.get(entry.op, entry.op.replace("-", " "))
        left_out = entry.no_expanded_dout
        unchecked = f"not verified with dout of one row expanded over all: {left_out}" if left_out else ""
        what = "; ".join(filter(None, (entry.summary.removeprefix("plain attention: "), entry.note, unchecked)))
        devices = ", ".join(entry.devices).upper()
        yield f"| `{entry.name}` | {computes} | {', '.join(entry.passes)} | {devices} | {what} |"


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


Block = Callable[[], Iterator[str]]
PAGES: Mapping[Path, Mapping[str, Block]] = {
    DOCS / "implementations.md": {"implementations": implementations},
    DOCS / "results.md": {"columns": columns, "charts": charts},
    DOCS / "benchmarks.md": {name: lines for name, lines in BLOCKS.items() if name != "readme"},
    DOCS.parent / "README.md": {"readme": BLOCKS["readme"]},
}


def generated(page: Path) -> str:
    """A page with each block between `<!-- NAME -->` and `<!-- /NAME -->` made anew."""
    text = page.read_text()
    for name, lines in PAGES[page].items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        block = start + "\n".join(lines()) + "\n" + end
        text, count = re.subn(re.escape(start) + ".*?" + re.escape(end), lambda _, block=block: block, text, flags=re.S)
        if count != 1:
            raise SystemExit(f"{page} has {count} blocks {start.strip()}; expected one")
    return text


def main(words: list[str]) -> int:
    """Writes the pages that are not as they should be, or only names them."""
    if words not in ([], ["--check"]):
        print(f"got {' '.join(words)!r}, expected --check or nothing", file=sys.stderr)
        return 2
    stale = {page: text for page in PAGES if (text := generated(page)) != page.read_text()}
    for page, text in stale.items():
        if words:
            print(page.relative_to(DOCS.parent))
        else:
            page.write_text(text)
    return int(bool(words and stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
