"""Times and shares of grouped decode in documents are those of their files."""

import math
import re
from pathlib import Path

import pytest

from mtabench.measuring.settled import half_interval_of, settled
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


def time_text(row):
    wide = "" if settled(row) else f" ± {100 * half_interval_of(row):.1f} %"
    return f"{1000 * float(row['median_ms']):.3g}{wide}"


def share_text(rows, of):
    pair = rows[of], rows[CUDNN]
    wide = "" if all(map(settled, pair)) else f" ± {100 * math.hypot(*map(half_interval_of, pair)):.0f} %"
    return f"{100 * share(rows, of):.0f} %{wide}"


def test_times_of_one_sequence(measured):
    lines = table("docs/benchmarks.md", "query heads / KV heads, keys")
    assert len(lines) == 12
    for name, *texts in lines:
        heads, kv_heads, keys = map(int, re.findall(r"\d+", name))
        of = [measured[heads, kv_heads, head_dim, 1, keys] for head_dim in (64, 128)]
        shared = [
            [f"{time_text(rows[one])} ({100 * share(rows, one):.0f} %)" for one in (CONTIGUOUS, PAGES)] for rows in of
        ]
        assert texts == [*shared[0], time_text(of[0][CUDNN]), *shared[1], time_text(of[1][CUDNN])], name


def test_shares_of_several_sequences(measured):
    lines = table("docs/benchmarks.md", "head dim, sequences x keys")
    assert len(lines) == 12
    for name, *texts in lines:
        head_dim, batch, keys = map(int, re.findall(r"\d+", name))
        of = [
            measured[heads, kv_heads, head_dim, batch, keys] for heads, kv_heads in ((16, 8), (32, 8), (64, 8), (64, 4))
        ]
        assert texts == [share_text(rows, one) for rows in of for one in (CONTIGUOUS, PAGES)], name


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
