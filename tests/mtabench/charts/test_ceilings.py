"""The ceilings that rows pin, and the ceilings of ceilings.json beside them."""

import pytest
from chart_cells import conv_cell, write

from mtabench.charts.ceilings import known_ceilings
from mtabench.charts.data import read_cells
from mtabench.measuring.ceilings import Ceilings, keep_ceilings

MATMUL, COPY = 806.7, 4240.4
PLACE = {"device": "Test GPU", "driver": "1.2", "torch": "2.11.0"}


def cell(seq, intensity, share=0.37, matmul=MATMUL, copy=COPY, **more):
    """A cell as a file holds it, with six digits."""
    tflops = share * min(matmul, copy * intensity / 1e3)
    measures = {"useful_tflops": tflops, "gbytes_s": tflops / intensity * 1e3, "fraction_of_roofline": share}
    return conv_cell("triton", seq, 1.0, **{name: f"{value:.6g}" for name, value in measures.items()}, **more)


def ceilings(tmp_path, cells):
    return known_ceilings(read_cells([write(tmp_path / "a.csv", cells)]))


@pytest.mark.parametrize(
    ("intensities", "matmul", "copy"),
    [
        ((500, 1000), MATMUL, None),
        ((1, 1.5), None, COPY),
        ((1, 1.5, 500, 1000), MATMUL, COPY),
        ((1, 1000), None, None),  # either may bind in each: two rows do not tell
        ((1, 1), None, None),
        ((500, 500), None, None),
        ((1, 500, 1000), MATMUL, None),
    ],
)
def test_two_rows_of_different_intensity_below_one_ceiling_pin_it(tmp_path, intensities, matmul, copy):
    cells = [cell(2**n, intensity, share=0.1 + n / 10) for n, intensity in enumerate(intensities)]
    found = ceilings(tmp_path, cells)
    assert found.matmul_tflops == (pytest.approx(matmul, rel=1e-4) if matmul else None)
    assert found.copy_gbytes_s == (pytest.approx(copy, rel=1e-4) if copy else None)


def test_rows_of_different_runs_do_not_pin_a_ceiling_together(tmp_path):
    found = ceilings(tmp_path, [cell(1, 500, run_id="a"), cell(2, 1000, run_id="b")])
    assert found.matmul_tflops is None


def test_what_no_row_pins_is_looked_up_beside_the_file(tmp_path):
    keep_ceilings(tmp_path / "ceilings.json", PLACE, {"bf16": Ceilings(4000.0, 700.0), "fp16": Ceilings(1.0, 1.0)})
    found = ceilings(tmp_path, [cell(1, 500), cell(2, 1000)])
    assert found.matmul_tflops == pytest.approx(MATMUL, rel=1e-4)  # the rows go first
    assert found.copy_gbytes_s == 4000
    assert found.note.endswith(
        "matrix products 807 TFLOP/s from the rows; copy bandwidth 4,000 GB/s from ceilings.json"
    )


@pytest.mark.parametrize("driver", ["", None])
def test_a_cpu_has_no_driver_in_either_file(tmp_path, driver):
    keep_ceilings(tmp_path / "ceilings.json", PLACE | {"driver": driver}, {"bf16": Ceilings(20.0, 0.5)})
    assert ceilings(tmp_path, [cell(1, 500, driver="")])[:2] == (0.5, 20)


@pytest.mark.parametrize("name", ["decode", "generate"])
def test_reading_is_looked_up_for_cached_passes_alone(tmp_path, name):
    keep_ceilings(tmp_path / "ceilings.json", PLACE, {"bf16": Ceilings(4000.0, 700.0, 4600.0)})
    fwd, decode = cell(1, 500), cell(2, 1) | {"pass": name}
    assert ceilings(tmp_path, [fwd]).memory("fwd") == (4000, "copy bandwidth")
    assert ceilings(tmp_path, [decode]).memory(name) == (4600, "read bandwidth")
    both = ceilings(tmp_path, [fwd, decode])
    assert (both.memory("fwd")[0], both.memory(name)[0]) == (4000, 4600)
    assert both.note.endswith(
        "copy bandwidth 4,000 GB/s from ceilings.json; read bandwidth 4,600 GB/s from ceilings.json"
    )


def test_ceilings_of_another_place_are_not_taken(tmp_path):
    keep_ceilings(tmp_path / "ceilings.json", PLACE | {"torch": "2.0"}, {"bf16": Ceilings(20.0, 0.5)})
    assert ceilings(tmp_path, [cell(1, 500)])[:2] == (None, None)
