"""Charts with lines: what stands on them, and their titles computed from planted numbers."""

import numpy as np
import pytest
from chart_cells import conv_cell, grid, lines, oom, plain_cell, tick_labels, title, words
from matplotlib.colors import to_hex

from mtabench.charts.style import own_styles


def test_time_shows_the_medians_of_the_file_and_what_was_measured(measured):
    cells = [conv_cell("triton", 2048, 4.0), conv_cell("triton", 1024, 2.0), conv_cell("compile", 1024, 8.0)]
    shown = measured("time", [*cells, plain_cell("sdpa-flash", 1024, 1.0), oom("triton", 4096)])
    (axes,) = shown.axes
    assert lines(axes)["triton"][:2] == [(1024, 2.0), (2048, 4.0)]
    assert np.isnan(lines(axes)["triton"][2][1])
    assert lines(axes)["sdpa-flash"] == [(1024, 1.0)]
    assert [label.get_text() for label in tick_labels(axes.xaxis)] == ["1k", "2k", "4k"]
    for expected in (
        "head dim 64, convolution 6x11", "time (ms)", "sequence length (tokens)", "sdpa-flash",
        "no valid time: triton at 4k (out of memory)", "bf16", "16 heads", "batch 1", "causal", "cold cache",
        "Test GPU", "driver 1.2", "cuda 13.0", "torch 2.11.0", "triton 3.6.0", "mtabench 0.1.0", "git abcdef012",
    ):  # fmt: skip
        assert expected in words(shown), expected


def test_a_line_breaks_at_a_length_that_others_have_and_it_has_not(measured):
    lengths = (1024, 2048, 4096, 8192)
    cells = [conv_cell("eager", seq, 2.0) for seq in lengths]
    cells += [conv_cell("triton", seq, 1.0) for seq in lengths if seq != 4096]  # 4096 was not measured
    cells += [conv_cell("compile", seq, 1.0) if seq != 2048 else oom("compile", seq) for seq in lengths]
    cells += [conv_cell("triton", seq, 1.0, head_dim=128) for seq in (1024, 8192)]  # nobody has others
    axes, wide = measured("time", cells).axes
    drawn = {label: [x for x, y in points if np.isfinite(y)] for label, points in lines(axes).items()}
    assert drawn == {"eager": [*lengths], "triton": [1024, 2048, 8192], "compile": [1024, 4096, 8192]}
    assert [np.isnan(y) for _, y in lines(axes)["triton"]] == [False, False, True, False]
    assert [np.isnan(y) for _, y in lines(axes)["compile"]] == [False, True, False, False]
    assert not any(np.isnan(y) for _, y in lines(axes)["eager"])
    assert lines(wide)["triton"] == [(1024, 1.0), (8192, 1.0)]
    assert [len(bands.get_paths()) for bands in axes.collections[::2]] == [1, 2, 2]  # as the lines


def within(ms, share):
    """A time whose 95 % interval reaches so far to both sides, as a part of it."""
    return {"ci95_low_ms": ms * np.exp(-share), "ci95_high_ms": ms * np.exp(share)}


@pytest.mark.parametrize(
    ("kind", "value", "half"),
    [("time", 2.0, 0.03), ("speedup", 8.0, 0.05), ("overhead", 2.0, 0.05), ("bandwidth", 2.0, 0.03)],
)
def test_bands_are_the_intervals_of_what_is_drawn(measured, kind, value, half):
    """A ratio's interval is wider than either time's: 0.03 and 0.04 make 0.05."""
    cells = []
    for seq in (1024, 2048):
        cells += [conv_cell("eager", seq, 16.0, speedup=1, **within(16.0, 0.04))]
        cells += [conv_cell("triton", seq, 2.0, speedup=8, gbytes_s=2.0, **within(2.0, 0.03))]
        cells += [plain_cell("sdpa-flash", seq, 1.0, **within(1.0, 0.04))]
    (axes,) = measured(kind, [cell | {"pass": "decode"} for cell in cells]).axes
    ours = own_styles()["triton"].colour
    (band,) = (one for one in axes.collections[::2] if to_hex(one.get_facecolor()[0]) == ours.lower())
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((value * np.exp(-half), value * np.exp(half)))


@pytest.mark.parametrize(
    ("share", "finding"),
    [
        (0.0, "is 7.0x as fast as eager at 4k tokens"),
        (0.005, "is 7.0x as fast as eager at 4k tokens"),
        (0.15, "is 7x as fast as eager at 4k tokens"),
        (3.0, "is as fast as eager at 4k tokens"),  # the interval holds 1
    ],
)
@pytest.mark.parametrize("kind", ["time", "speedup"])
def test_a_title_has_no_digit_that_its_interval_hides(titled, kind, share, finding):
    cells = [conv_cell("eager", 4096, 7.02, speedup=1, **within(7.02, share))]
    cells += [conv_cell("triton", 4096, 1.0, speedup=7.02, **within(1.0, share))]
    assert titled(kind, cells) == f"Forward: triton {finding}"


@pytest.mark.parametrize(
    ("cells", "finding"),
    [
        ([*grid({(1024, 64): 4, (4096, 64): 16})], "triton is 16x as fast as eager at 4k tokens"),
        (
            [*grid({(4096, 64): 4, (4096, 128): 16})],
            "triton is 8.0x as fast as eager at 4k tokens (geometric mean of 2 shapes)",
        ),
        (
            [
                *grid({(4096, 64): 4, (4096, 128): 16}),
                *(plain_cell("sdpa-flash", 4096, 1, head_dim=head_dim) for head_dim in (64, 128)),
            ],
            "triton is 8.0x as fast as eager and takes 8.0x as long as plain attention by sdpa-flash at 4k tokens "
            "(geometric means of 2 shapes)",
        ),
        (  # of two yardsticks the faster
            [*grid({(4096, 64): 64}), plain_cell("sdpa-flash", 4096, 4.0), plain_cell("sdpa-cudnn", 4096, 0.8)],
            "triton is 64x as fast as eager and takes 1.25x as long as plain attention by sdpa-cudnn at 4k tokens",
        ),
        (  # no claim about the yardstick from one of two shapes
            [*grid({(4096, 64): 4, (4096, 128): 16}), plain_cell("sdpa-flash", 4096, 1)],
            "triton is 8.0x as fast as eager at 4k tokens (geometric mean of 2 shapes)",
        ),
        (  # eager fits at one head dim only, and the title names it
            [*grid({(1024, 64): 4, (1024, 128): 4, (4096, 64): 5}), oom("eager", 4096, head_dim=128)],
            "triton is 5.0x as fast as eager at 4k tokens, head dim 64",
        ),
        ([*grid({(4096, 64): 0.25})], "triton takes 4.0x as long as eager at 4k tokens"),
        ([*grid({(4096, 64): 1.001})], "triton is as fast as eager at 4k tokens"),
        ([conv_cell("triton", 4096, 2.0), plain_cell("sdpa-flash", 4096, 1)],
         "triton takes 2.0x as long as plain attention by sdpa-flash at 4k tokens"),
        ([conv_cell("triton", 4096, 2.0), conv_cell("compile", 4096, 1.0)], "time against sequence length"),
        (  # splits that auto did not choose are named
            [*grid({(4096, 64): 1}), conv_cell("triton", 4096, 16.0, speedup=4, splits=8, splits_used=8)],
            "triton, best splits is 4.0x as fast as eager at 4k tokens",
        ),
        ([oom("eager", 4096), oom("triton", 4096)], "time against sequence length"),
        ([conv_cell("eager", 4096, 2.0, speedup=1), oom("triton", 4096)], "time against sequence length"),
    ],
)  # fmt: skip
def test_the_title_of_time_states_the_longest_sequence_that_all_share(titled, cells, finding):
    assert titled("time", cells) == f"Forward: {finding}"


def test_speedup_of_plain_attention_is_over_the_baseline_of_its_panel(measured):
    cells = [conv_cell("eager", 1024, 12.0, speedup=1, conv_q=3, conv_k=3), conv_cell("eager", 1024, 20.0, speedup=1)]
    cells += [conv_cell("triton", 1024, 2.0, speedup=10), plain_cell("sdpa-flash", 1024, 0.5)]
    small, large = measured("speedup", cells).axes
    assert lines(small)["sdpa-flash"] == [(1024, 24.0)]
    assert lines(large)["sdpa-flash"] == [(1024, 40.0)]
    assert lines(large)["triton"] == [(1024, 10.0)]
    assert lines(large)["eager"] == [(1024, 1.0)]
    assert large.get_title(loc="left") == "head dim 64, convolution 6x11"


@pytest.mark.parametrize(
    ("speedups", "finding"),
    [
        ({(1024, 64): 2, (4096, 64): 8},
         "triton is 2.0x to 8.0x as fast as eager, 4.0x in the geometric mean of 2 shapes"),
        ({(1024, 64): 0.5, (4096, 64): 0.125},
         "triton takes 2.0x to 8.0x as long as eager, 4.0x in the geometric mean of 2 shapes"),
        ({(1024, 64): 0.5, (4096, 64): 2},
         "triton is 0.50x to 2.0x as fast as eager, 1.00x in the geometric mean of 2 shapes"),
        ({(1024, 64): 0.125, (4096, 64): 2},
         "triton takes 0.50x to 8.0x as long as eager, 2.0x in the geometric mean of 2 shapes"),
        ({(1024, 64): 3, (4096, 64): 3}, "triton is 3.0x as fast as eager in all of 2 shapes"),
        ({(1024, 64): 142}, "triton is 142x as fast as eager at 1k tokens"),
    ],
)  # fmt: skip
def test_the_title_of_speedup_states_its_range(titled, speedups, finding):
    assert titled("speedup", grid(speedups)) == f"Forward: {finding}"


def test_memory_shows_the_peaks_and_who_takes_more(measured, titled):
    cells = [conv_cell("eager", seq, 8.0, speedup=1, peak_memory_mb=seq) for seq in (1024, 4096)]
    cells += [conv_cell("triton", seq, 1.0, speedup=8, peak_memory_mb=64) for seq in (1024, 4096)]
    shown = measured("memory", [*cells, conv_cell("compile", 1024, 9.0, peak_memory_mb=0)])
    assert lines(shown.axes[0])["triton"] == [(1024, 64), (4096, 64)]
    assert title(shown) == "Forward: eager takes 64x the memory of triton at 4k tokens"
    assert "peak memory (MB)" in words(shown)
    swapped = [cell | {"impl": {"eager": "triton", "triton": "eager"}[cell["impl"]]} for cell in cells]
    assert titled("memory", swapped) == "Forward: triton takes 64x the memory of eager at 4k tokens"


def splits_cells(auto_ms):
    for seq, times in ((1024, (4.0, 2.0, 3.0)), (4096, (9.0, 8.0, 7.0))):
        for splits, ms in zip((1, 2, 4), times, strict=True):
            yield conv_cell("triton", seq, ms, splits=splits, splits_used=splits, **{"pass": "decode"})
        if auto_ms:
            yield conv_cell("triton", seq, auto_ms[seq], splits="auto", splits_used=3, **{"pass": "decode"})


@pytest.mark.parametrize(
    ("auto_ms", "finding"),
    [
        (
            {1024: 2.01, 4096: 7.1},
            "triton's auto is within 1.5 % of the best number of splits measured in all of 2 shapes",
        ),
        (
            {1024: 1.9, 4096: 7},
            "triton's auto takes no longer than the best number of splits measured in all of 2 shapes",
        ),
        (None, "time against splits of the keys"),
    ],
)
def test_splits_mark_what_auto_took(measured, auto_ms, finding):
    shown = measured("splits", [*splits_cells(auto_ms), conv_cell("eager", 1024, 20.0, **{"pass": "decode"})])
    (axes,) = shown.axes
    assert lines(axes)["1k keys"] == [(1, 4), (2, 2), (4, 3)]
    stars = [(*line.get_xdata(), *line.get_ydata()) for line in axes.get_lines() if line.get_marker() == "*"]
    assert stars == ([(3, auto_ms[1024]), (3, auto_ms[4096])] if auto_ms else [])
    assert ("stars: what auto chose" in words(shown)) == bool(auto_ms)
    assert "eager" not in words(shown)
    assert title(shown) == f"Decode: {finding}"


def test_bandwidth_draws_the_memory_limit(measured):
    """Plain attention moves the same bytes for fewer FLOPs: two intensities below one limit of 4000 GB/s."""
    cells = [
        make(impl, seq, 1.0, useful_tflops=rate * flops, gbytes_s=rate * 1e3, fraction_of_roofline=rate / 4)
        | {"pass": "decode"}
        for make, impl, rates, flops in ((conv_cell, "triton", (1, 3), 1.5), (plain_cell, "sdpa-flash", (2, 3.6), 1))
        for seq, rate in zip((1024, 4096), rates, strict=True)
    ]  # fmt: skip
    shown = measured("bandwidth", cells)
    (axes,) = shown.axes
    assert lines(axes)["triton"] == [(1024, 1000), (4096, 3000)]
    (limit,) = (line for line in axes.get_lines() if list(line.get_xdata()) == [0, 1])
    assert limit.get_ydata() == pytest.approx([4000, 4000])
    assert axes.get_ylim()[0] == 0
    assert "copy bandwidth 4,000 GB/s" in words(shown)
    assert "copy bandwidth 4,000 GB/s from the rows; reading alone, which may be faster, was not measured" in words(
        shown
    )
    assert (
        title(shown) == "Decode: triton reads the cache at 3,000 GB/s at 4k cached tokens, 75 % of the copy bandwidth"
    )


def test_the_memory_limit_of_decode_is_the_bandwidth_of_reading_where_rows_name_it(measured, titled):
    cells = [
        conv_cell("triton", seq, 1.0, useful_tflops=4.5, gbytes_s=4500, fraction_of_roofline=0.9, read_gbytes_s=5000)
        | {"pass": "decode"}
        for seq in (1024, 4096)
    ]
    shown = measured("bandwidth", cells)
    (limit,) = (line for line in shown.axes[0].get_lines() if list(line.get_xdata()) == [0, 1])
    assert limit.get_ydata() == pytest.approx([5000, 5000])
    assert "read bandwidth 5,000 GB/s from the rows" in words(shown)
    assert "copy bandwidth" not in words(shown)
    assert title(shown).endswith("at 4,500 GB/s at 4k cached tokens, 90 % of the read bandwidth")
    assert "90 % of the roofline at" in titled("roofline", cells)
    older = [cell | {"read_gbytes_s": ""} for cell in cells]
    assert "90 % of the roofline of a copy at" in titled("roofline", older)
