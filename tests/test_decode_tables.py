"""Shares of grouped decode in the design page equal the shares in their files."""

import re
from pathlib import Path

import pytest

from mtabench.results.results_file import read_file

ROOT = Path(__file__).parents[1]
CONTIGUOUS, PAGES, CUDNN = ("cuda", ""), ("cuda", "128"), ("sdpa-cudnn", "")
GOAL = 0.97


@pytest.fixture(scope="module")
def measured():
    """Rows by query heads, KV heads, head dim, sequences and keys, and of these by implementation and page size."""
    cells = {}
    for name in ("decode-groups", "decode-pages"):
        for row in read_file(ROOT / f"results/nvidia-h200/{name}.csv").rows():
            cell = tuple(int(row[axis]) for axis in ("heads", "kv_heads", "head_dim", "batch", "seq"))
            cells.setdefault(cell, {})[row["impl"], row["page_size"]] = row
    return cells


def table(page, head):
    """The rows of a page's table whose first column is `head`, as texts."""
    (block,) = re.findall(
        rf"^\| {re.escape(head)} \|.*\n\|[- |]+\n((?:\|.*\n)+)", (ROOT / page).read_text(), re.MULTILINE
    )
    return [[text.strip() for text in line.strip("|").split("|")] for line in block.splitlines()]


def share(rows, of):
    return float(rows[CUDNN]["median_ms"]) / float(rows[of]["median_ms"])


def test_cells_that_reach_the_goal(measured):
    page = "docs/design/cuda-decode.md"
    lines = table(page, "query heads a KV head, head dim")
    reached = cells = 0
    for name, *texts in lines:
        group, head_dim = map(int, name.split(", "))
        expected = []
        for several in (False, True):
            of = [
                rows
                for cell, rows in measured.items()
                if (cell[0] // cell[1], cell[2], cell[3] > 1) == (group, head_dim, several)
            ]
            for one in (CONTIGUOUS, PAGES):
                shares = [share(rows, one) for rows in of]
                enough = sum(x >= GOAL for x in shares)
                reached, cells = reached + enough, cells + len(shares)
                expected.append(f"{enough} of {len(shares)}, {100 * min(shares):.0f} to {100 * max(shares):.0f} %")
        assert texts == expected, name
    assert f"{reached} of {cells} cells reach the goal" in (ROOT / page).read_text()
