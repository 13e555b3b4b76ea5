"""Plans of cells against what committed runs of an H200 measured: memory, and the least time; `explain` shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from command_line import make_runner, printed, refused

from mta_kernels.operation import Operation
from mtabench.errors import UsageError
from mtabench.prediction.devices import find_device, known_device, rates_of
from mtabench.prediction.plans import plan_of
from mtabench.prediction.predict import predict, unpredicted
from mtabench.problem.case import Case
from mtabench.registry import implementation_of
from mtabench.results.results_file import read_results

RESULTS = Path(__file__).parents[2] / "results/nvidia-h200"
H200 = find_device("h200")
CELL = Case("fwd", "hopper", Operation.of((6, 11), 64), "bf16", 1, 16, 16, 4096, 64, None, "cuda")


def measured(name: str) -> pd.DataFrame:
    """Planned cells of a results file with their plans' peak in MB and least time in ms."""
    rows = []
    for row in read_results(RESULTS / name).to_dict("records"):
        case = Case.of_row(row, "cuda")
        if row["status"] == "ok" and implementation_of(case).planned:
            prediction = predict(case, H200, rates_of(H200))
            peak = plan_of(case, H200.planned).peak_bytes / 1e6
            rows.append({**row, "planned_mb": peak, "least_ms": prediction.seconds * 1e3})
    return pd.DataFrame(rows)


@pytest.mark.parametrize("name", ["fwd.csv", "hopper-bwd.csv", "mta-all-fwd.csv"])
def test_no_cell_is_much_faster_than_its_least_time(name):
    """Bytes are of whole tensors: a little too many where a kernel reads parts of some."""
    cells = measured(name)
    assert len(cells) > 2
    assert (cells["least_ms"] < 1.5 * cells["median_ms"]).all()


def test_more_work_takes_longer_and_a_faster_device_less():
    h100 = find_device("h100")
    for case in (CELL, replace(CELL, pass_="bwd"), replace(CELL, impl="triton"), replace(CELL, impl="eager")):
        longer = replace(case, seq=2 * case.seq)
        assert predict(longer, H200, rates_of(H200)).seconds > predict(case, H200, rates_of(H200)).seconds
        assert predict(case, h100, rates_of(h100)).seconds >= predict(case, H200, rates_of(H200)).seconds


def test_what_is_not_planned_says_so():
    assert "cuda-conv is not planned; eager, " in unpredicted(replace(CELL, impl="cuda-conv"))
    assert "is no Hopper GPU" in unpredicted(CELL, find_device("a100"))
    assert "head_dim 300" in unpredicted(replace(CELL, head_dim=300))
    assert unpredicted(replace(CELL, impl="sdpa-cudnn", operation=Operation.of(None, 64))) is None


def test_ceilings_that_were_measured_are_taken():
    assert (H200.planned.sm_count, H200.planned.shared_memory) == (132, 227 * 1024)
    assert rates_of(H200).memory_bytes == 4242e9
    assert "data sheet" in rates_of(find_device("b200")).source
    assert known_device("NVIDIA A10") is None
    with pytest.raises(UsageError, match="did you mean h200"):
        find_device("h20")


def test_explain_shows_kernels(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    mtabench = make_runner(monkeypatch, capsys, tmp_path, columns=160)
    out = printed(mtabench("explain", "fwd", "--impl", "hopper", "--seq", "4k", "--device-name", "h200"))
    line = next(line.split() for line in out.splitlines() if line.startswith("hopper_forward"))
    assert line == ["hopper_forward", "cuda", "1", "132", "512", "178", "135"]
    assert " ms, by products" in out
    out = printed(mtabench("explain", "bwd", "--seq", "4k", "--device-name", "h200"))  # by auto
    assert "hopper_backward" in out
    assert " tokens a sequence fit in 1" in out
    refused(mtabench("explain", "fwd", "--seq", "4k"), "--device-name h200")
