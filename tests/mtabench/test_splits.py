"""How good auto's splits are, from rows as a sweep has them and as a file gives them back."""

import pytest

from mta_kernels.operation import Operation
from mtabench.console import PIPE_WIDTH
from mtabench.problem.case import Case
from mtabench.results.facts import RunFacts
from mtabench.results.rows import cell_row
from mtabench.results.splits import choices
from mtabench.sweeps.table import auto_lines, line, results_table


def row(splits, ms, *, used=None, status="ok", run="first", seq=65536, head_dim=64, impl="triton"):
    case = Case("decode", impl, Operation.of((6, 11), head_dim), "bf16", 1, 16, 16, seq, head_dim, splits, "cpu")
    measured = {"median_ms": ms, "ci95_low_ms": 0.999 * ms, "ci95_high_ms": 1.001 * ms} if ms else {}
    return cell_row(case, RunFacts(run, "", {}), status) | {"splits_used": used or splits} | measured


AUTO = row("auto", 0.0841, used=16)
NUMBERS = [row(8, 0.095), row(24, 0.0829), row(64, 0.0901)]


def test_auto_is_set_against_the_fastest_number():
    (found,) = choices([NUMBERS[0], AUTO, *NUMBERS[1:]])
    assert (found.auto, found.best) == (AUTO, NUMBERS[1])
    assert found.slowdown == pytest.approx(0.0841 / 0.0829 - 1)
    assert auto_lines([AUTO, *NUMBERS]) == [
        "auto took 16 splits: 0.0841 ms, 1.4 % slower than the best of those measured (24)"
    ]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([AUTO, row(8, 0.0842)], "auto took 16 splits: 0.0841 ms, the best of those measured"),
        ([AUTO, row(16, 0.0830)], "auto took 16 splits: 0.0841 ms, the best of those measured"),
        ([AUTO, row(24, 0.08409)], "auto took 16 splits: 0.0841 ms, as fast as the best of those measured (24)"),
        (
            [AUTO, row(24, 0.084)],
            "auto took 16 splits: 0.0841 ms, 0.1 % slower than the best of those measured (24); "
            "their 95 % intervals overlap",
        ),
        (
            [row("auto", 3, used=1), row(24, 1)],
            "auto took 1 split: 3 ms, 200.0 % slower than the best of those measured (24)",
        ),
        (
            [AUTO, row(24, 0.05, run="second")],
            "auto took 16 splits: 0.0841 ms, 68.2 % slower than the best of those measured (24); "
            "the two are of different runs",
        ),
        (
            [row("auto", 0.0841) | {"splits_used": ""}, row(24, 0.05)],
            "auto: 0.0841 ms, 68.2 % slower than the best of those measured (24)",
        ),
    ],
    ids=["faster", "its own number", "a tie", "noise", "far off", "another run", "unknown"],
)
def test_the_verdict(rows, sentence):
    assert auto_lines(rows) == [sentence]


def test_nothing_is_said_without_auto_or_without_numbers():
    other_shape = row("auto", 0.05, used=16, seq=4096)
    other_impl = AUTO | {"impl": "another"}
    for rows in ([], [AUTO], NUMBERS, [other_shape, other_impl, *NUMBERS], [row(None, 1, impl="eager"), AUTO]):
        assert auto_lines(rows) == []


def test_each_shape_has_its_sentence_which_names_what_differs():
    rows = [
        row(splits, ms, used=used, seq=seq, head_dim=head_dim)
        for seq, head_dim in ((4096, 64), (4096, 128), (65536, 128))
        for splits, ms, used in (("auto", 2.0, 8), (8, 2.0, None), (16, 1.0, None))
    ]
    end = "auto took 8 splits: 2 ms, 100.0 % slower than the best of those measured (16)"
    assert auto_lines(rows) == [
        f"head dim 64, seq 4k: {end}",
        f"head dim 128, seq 4k: {end}",
        f"head dim 128, seq 64k: {end}",
    ]


def test_splits_are_shown_where_they_vary():
    def column(rows):
        table = results_table(rows, PIPE_WIDTH, len(rows))
        return next((list(c.cells) for c in table.columns if c.header == "splits"), None)

    eager = row(None, 1.0, impl="eager")
    assert column([eager, AUTO, *NUMBERS]) == ["", "auto (16)", "8", "24", "64"]
    assert column([eager, AUTO, row("auto", 1.0, used=8, seq=4096)]) is None
    assert "triton, splits auto (16): 0.0841 ms" in line(AUTO)
    assert "triton, splits 24: 0.0829 ms" in line(NUMBERS[1])
    assert "eager: 1 ms" in line(eager)
