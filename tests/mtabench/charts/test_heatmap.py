"""Heat maps: the speedups, what failed, and the titles computed from planted numbers."""

import numpy as np
import pytest
from chart_cells import conv_cell, faults, grid, oom, plain_cell, said, title, words
from matplotlib.collections import QuadMesh


def test_heat_map_holds_the_speedups_and_marks_what_failed(measured):
    cells = [*grid({(1024, 64): 2, (4096, 64): 8, (1024, 128): 0.5}), oom("triton", 4096, head_dim=128)]
    shown = measured("heatmap-head-dim", [*cells, conv_cell("triton", 8192, 3.0)])
    (axes,) = shown.axes
    (mesh,) = (item for item in axes.collections if isinstance(item, QuadMesh))
    ratios = np.exp(mesh.get_array().filled(np.nan))
    assert ratios[0][:2] == pytest.approx([2, 8])
    assert ratios[1][0] == pytest.approx(0.5)
    assert set(said(axes.texts)) == {"2.0x", "8.0x", "0.50x", "out of memory", "no baseline"}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1k", "4k", "8k"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["64", "128"]
    assert title(shown) == (
        "Forward: triton is 8.0x as fast as eager at 4k tokens, head dim 64, "
        "and takes 2.0x as long as eager at 1k tokens, head dim 128"
    )


def test_heat_maps_of_convolutions_have_one_for_each_head_dim_and_implementation(measured):
    cells = [
        cell
        for conv_q, conv_k in ((6, 11), (3, 3))
        for cell in grid({(1024, 64): conv_q, (1024, 128): 2}, conv_q=conv_q, conv_k=conv_k)
    ]
    cells += [conv_cell("compile", 1024, 4.0, speedup=16)]
    shown = measured("heatmap-conv", cells)
    names = [axes.get_title(loc="left") for axes in shown.axes]
    assert names == ["compile, head dim 64", "triton, head dim 64", "triton, head dim 128"]
    assert [label.get_text() for label in shown.axes[1].get_yticklabels()] == ["3x3", "6x11"]
    assert said(shown.axes[1].texts) == ["3.0x", "6.0x"]


def test_heat_maps_of_models_hold_long_names_and_mark_what_rests_on_a_plain_time_that_did_not_settle(measured):
    loose = {"ci95_low_ms": 0.9, "ci95_high_ms": 1.1}
    mta = {"op": "mta", "mix": "heads", "post_conv_q": 6, "post_conv_k": 11}
    cells = [plain_cell("plain", 64, 1.0, **loose)]
    for every, steps in ((1, {}), (4, {}), (4, mta)):
        for impl in ("eager", "auto"):
            cells.append(conv_cell(impl, 64, 2.0, conv_every=every, speedup=0.5, baseline="plain", **steps))
    shown = measured("heatmap-conv", [{**cell, "pass": "prefill", "layers": 4} for cell in cells])
    assert faults(shown) == []
    assert [label.get_text() for label in shown.axes[0].get_yticklabels()] == [
        "6x11, in all layers", "6x11, in 1 of 4 layers", "mix heads, 6x11, post 6x11, in 1 of 4 layers"
    ]  # fmt: skip
    assert said(shown.axes[0].texts) == ["~0.5x"] * 3
    assert "bf16 · 4 layers · 16 heads" in words(shown)
