"""Ladders, shares and rooflines: what stands on them, and titles computed from planted numbers."""

import numpy as np
import pytest
from chart_cells import conv_cell, faults, lines, oom, plain_cell, said, title, words
from matplotlib.collections import PathCollection


def test_ladder_goes_from_the_slowest_to_the_fastest_with_the_factor_of_each_step(measured):
    times = {"tiled": 20.0, "naive": 90.0, "sdpa-cudnn": 2.0}
    cells = [plain_cell(name, seq, ms * seq / 1024) for seq in (512, 1024) for name, ms in times.items()]
    cells += [plain_cell("broken", 1024, None, status="wrong"), plain_cell("alone", 8192, 1.0)]
    shown = measured("ladder", [*cells, conv_cell("triton", 1024, 5.0)])
    (axes,) = shown.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["naive", "tiled", "sdpa-cudnn"]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in axes.get_lines()] == [(90, 0), (20, 1), (2, 2)]
    assert axes.yaxis_inverted()
    assert said(axes.texts) == ["90 ms", "20 ms", "2 ms", "down 4.5x", "down 10x"]
    assert "no valid time: broken (wrong)" in words(shown)
    assert (
        title(shown) == "Forward: sdpa-cudnn is 45x as fast as naive, 2 steps up the ladder, at 1k tokens, head dim 64"
    )


def test_what_has_no_time_is_named_below_with_the_reason(measured):
    cells = [
        plain_cell(name, 1024, ms, head_dim=head_dim)
        for name, ms in (("c-loops", 90.0), ("c-tiled", 2.0), ("sdpa-flash", 1.0))
        for head_dim in (64, 128)
    ]
    failed = {"status": "unsupported", "reason": "not installed (" + "pip install " * 20 + ")"}
    cells += [plain_cell("flash-attn", 1024, None, head_dim=head_dim, **failed) for head_dim in (64, 128)]
    cells += [plain_cell("cuda-naive", 1024, None, status="oom", reason="17 GiB of scores")]
    shown = measured("ladder", cells)
    for axes in shown.axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == ["c-loops", "c-tiled", "sdpa-flash"]
        assert len(axes.get_lines()) == 3
    for expected in ("cuda-naive at 1k tokens, head dim 64 (out of memory: 17 GiB of scores)",
                     "flash-attn (unsupported: not installed)"):  # fmt: skip
        assert expected in words(shown)
    assert faults(shown) == []


MODEL = {"pass": "train", "layers": 12, "head_dim": 128, "batch": 8}
MTA = {"op": "mta", "mix": "heads", "post_conv_q": 6, "post_conv_k": 11}


def test_a_bar_has_the_plain_model_s_time_over_its_own(measured):
    cells = [
        plain_cell("plain", 2048, 90.0, **MODEL),
        conv_cell("auto", 2048, 100.0, conv_every=4, **MODEL),
        conv_cell("auto", 2048, 120.0, conv_every=1, **MODEL),
        conv_cell("eager", 2048, 360.0, conv_every=1, **MODEL),
        conv_cell("auto", 2048, None, status="oom", conv_every=4, **MODEL | MTA),
        conv_cell("auto", 4096, 100.0, conv_every=4, **MODEL),  # without a plain one beside it
    ]
    shown = measured("share", cells)
    (axes,) = shown.axes
    assert [bar.get_width() for bar in axes.patches] == [90, 75, 25]
    assert said(axes.texts) == ["90 %", "75 %", "25 %"]
    labels = [label.get_text().replace("\n", ": ") for label in axes.get_yticklabels()]
    assert labels == [
        "auto: convolution 6x11, convolution in 1 of 4 layers",
        "auto: convolution 6x11, convolution in all layers",
        "eager: convolution 6x11, convolution in all layers",
    ]
    assert axes.yaxis_inverted()
    assert title(shown) == "Training step: auto has 75 % to 90 % of the plain model's speed"
    assert faults(shown) == []


def test_a_share_rests_on_both_times(measured):
    wide = {"ci95_low_ms": 80.0, "ci95_high_ms": 100.0}
    cells = [plain_cell("plain", 2048, 90.0, **MODEL | wide), conv_cell("auto", 2048, 90.0, conv_every=4, **MODEL)]
    shown = measured("share", cells)
    assert said(shown.axes[0].texts) == ["~100 %"]
    assert "1 of 2 times did not settle" in words(shown)


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
