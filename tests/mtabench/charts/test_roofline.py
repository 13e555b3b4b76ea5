"""Rooflines: paths, ceilings, and the titles computed from planted numbers."""

import numpy as np
import pytest
from chart_cells import conv_cell, lines, oom, plain_cell, title, words
from matplotlib.collections import PathCollection

MATMUL, COPY = 800.0, 4000.0  # a ridge at 200 FLOP/byte


def roof_cell(make, impl, seq, intensity, share, **more):
    """A cell at a share of the roof, which is as high as the intensity allows; numbers as a file holds them."""
    tflops = share * min(MATMUL, COPY * intensity / 1e3)
    measures = {"useful_tflops": tflops, "gbytes_s": tflops / intensity * 1e3, "fraction_of_roofline": share}
    return make(impl, seq, 1.0, **{name: f"{value:.6g}" for name, value in measures.items()}, **more)


def test_roofline_has_a_path_an_implementation_below_the_ceilings_that_the_rows_pin(measured):
    cells = [roof_cell(conv_cell, "triton", seq, at, share) for seq, at, share in ((512, 50, 0.1), (4096, 400, 0.3))]
    cells += [roof_cell(plain_cell, "sdpa-flash", seq, at, 0.5) for seq, at in ((512, 30), (4096, 300))]
    shown = measured("roofline", [*cells, oom("eager", 4096)])
    (axes,) = shown.axes
    assert lines(axes)["triton"] == [(pytest.approx(50), pytest.approx(20)), (pytest.approx(400), pytest.approx(240))]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    roof = [np.column_stack(line.get_data()) for line in axes.get_lines() if line.get_label().startswith("_")]
    slope, flat = sorted(roof, key=lambda line: line[0][0])
    assert slope[:, 1] / slope[:, 0] == pytest.approx([4, 4])
    assert slope[1] == pytest.approx([200, 800])
    assert flat[:, 1] == pytest.approx([800, 800])
    sizes = [item.get_sizes() for item in axes.collections if isinstance(item, PathCollection)]
    assert all(short < long for short, long in sizes)
    for expected in (
        "matrix products 800 TFLOP/s from the rows; copy bandwidth 4,000 GB/s from the rows",
        "markers grow with the sequence length, from 512 to 4k tokens",
        "no valid time: eager at 4k (out of memory)",
    ):
        assert expected in words(shown)
    assert (
        title(shown) == "Forward: triton reaches 30 % of the roofline at 4k tokens, plain attention by sdpa-flash 50 %"
    )


@pytest.mark.parametrize("missing", [[], [oom("triton", 1024)]], ids=["not measured", "failed"])
def test_a_path_breaks_at_a_length_without_a_value(measured, missing):
    """Whether another implementation was measured there or this one failed."""
    cells = [roof_cell(conv_cell, "triton", seq, at, 0.1) for seq, at in ((512, 50), (2048, 200), (4096, 400))]
    others = missing or [roof_cell(conv_cell, "eager", 1024, 100, 0.1)]
    (axes,) = measured("roofline", [*cells, *others]).axes
    assert [x for x, _ in lines(axes)["triton"]] == pytest.approx([50, np.nan, 200, 400], nan_ok=True)


def test_slow_cells_are_drawn_in_gflops_with_their_ceilings(measured):
    """Rates of a small CPU, whose roof keeps its shape: a ridge at 200 FLOP/byte."""
    shapes = ((256, 25), (512, 50), (1024, 400), (2048, 800))
    cells = [roof_cell(conv_cell, "eager", seq, at, 1e-6) for seq, at in shapes]
    shown = measured("roofline", cells)
    (axes,) = shown.axes
    assert axes.get_ylabel() == "GFLOP/s"
    assert [y for _, y in lines(axes)["eager"]] == pytest.approx([0.1, 0.2, 0.8, 0.8])
    slope, flat = sorted((line.get_ydata() for line in axes.get_lines() if line.get_label()[0] == "_"), key=min)
    assert (slope[-1], *flat) == pytest.approx((800e3, 800e3, 800e3))
    assert "matrix products 800,000 GFLOP/s from the rows" in words(shown)
    assert "copy bandwidth 4,000 GB/s" in words(shown)
    assert "TFLOP/s" not in words(shown)


def test_roofline_without_ceilings_claims_nothing(measured):
    shown = measured("roofline", [conv_cell("triton", 1024, 1.0, useful_tflops=3, gbytes_s=20)])
    assert title(shown) == "Forward: arithmetic against arithmetic intensity"
    assert "the device's ceilings are unknown: neither the rows nor a ceilings.json tell them" in words(shown)
    assert [line.get_label() for line in shown.axes[0].get_lines()] == ["triton"]
