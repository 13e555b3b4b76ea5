"""The lines of a sweep name the splits of a decode, and what auto took."""

from mta_kernels.operation import Operation
from mtabench.problem.case import Case
from mtabench.results.rows import RunFacts, cell_row
from mtabench.sweeps.table import line


def row(splits, ms, *, used=None, status="ok", run="first", seq=65536, head_dim=64, impl="triton"):
    case = Case("decode", impl, Operation.of((6, 11), head_dim), "bf16", 1, 16, 16, seq, head_dim, splits, "cpu")
    measured = {"median_ms": ms, "ci95_low_ms": 0.999 * ms, "ci95_high_ms": 1.001 * ms} if ms else {}
    return cell_row(case, RunFacts(run, "", {}), status) | {"splits_used": used or splits} | measured


def test_lines_name_the_splits():
    assert "triton, splits auto (16): 0.0841 ms" in line(row("auto", 0.0841, used=16))
    assert "triton, splits 24: 0.0829 ms" in line(row(24, 0.0829))
    assert "eager: 1 ms" in line(row(None, 1.0, impl="eager"))
