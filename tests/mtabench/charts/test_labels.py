"""Names at the ends of lines: none on another, none on a line, and each as near to its line as the others let it."""

import pytest
from chart_cells import conv_cell, faults, oom, plain_cell, said, words
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mtabench.charts.lines import spread_out


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ([], []),
        ([5.0], [5.0]),
        ([9.0, 5.0, 1.0], [9.0, 5.0, 1.0]),
        ([5.0, 5.0], [5.5, 4.5]),
        ([5.0, 5.0, 5.0, 2.0], [6.0, 5.0, 4.0, 2.0]),
        ([6.0, 5.5, 5.2], [6.567, 5.567, 4.567]),
        ([10.0, 10.0, 9.9], [10.0, 9.0, 8.0]),
        ([0.2, 0.1, 0.0], [2.0, 1.0, 0.0]),
    ],
)
def test_names_are_a_row_apart_and_stay_near(wanted, places):
    assert spread_out(wanted, 1.0, 0.0, 10.0) == pytest.approx(places, abs=1e-3)


def names(axes):
    """The names at lines, with their boxes in pixels."""
    renderer = FigureCanvasAgg(axes.figure).get_renderer()
    return {text.get_text(): text.get_window_extent(renderer) for text in axes.texts if text.get_text()}


def test_lines_are_named_at_their_ends_in_their_order_and_there_is_no_legend(measured):
    cells = [conv_cell(name, seq, ms * seq / 1024) for name, ms in (("eager", 9), ("triton", 1.05), ("hopper", 1))
             for seq in (1024, 4096)]  # fmt: skip
    shown = measured("time", [*cells, plain_cell("sdpa-flash", 1024, 0.99), plain_cell("sdpa-flash", 4096, 3.95)])
    (axes,) = shown.axes
    assert axes.get_legend() is None
    found = names(axes)
    heights = [found[name].y0 for name in ("eager", "triton", "hopper", "sdpa-flash")]
    assert heights == sorted(heights, reverse=True)
    assert all(box.x0 > axes.bbox.x1 for box in found.values())
    assert faults(shown) == []


def test_what_failed_is_said_below_and_marked_nowhere(measured):
    cells = [conv_cell("eager", 1024, 3.0, head_dim=head_dim) for head_dim in (64, 128)]
    cells += [conv_cell("triton", seq, 1.0, head_dim=head_dim) for seq in (1024, 2048, 4096) for head_dim in (64, 128)]
    cells += [oom("eager", 4096, head_dim=64), *(oom("eager", seq, head_dim=128) for seq in (2048, 4096))]
    shown = measured("time", cells)
    assert not [line for axes in shown.axes for line in axes.get_lines() if line.get_marker() == "x"]
    assert (
        "no valid time: eager at 4k, head dim 64, convolution 6x11 (out of memory); eager at 2k, 4k, head dim 128, "
        "convolution 6x11 (out of memory)"
    ) in words(shown)
    same = measured("time", [*cells, oom("eager", 2048, head_dim=64)])
    assert "no valid time: eager at 2k, 4k (out of memory)" in words(same)
    timed = [conv_cell("eager", seq, 1.0) for seq in (1024, 2048)]
    many = [oom(f"i{n}", seq) for n in range(9) for seq in (1024, 2048)]
    expected = "no valid time: i0, i1, i2, i3, i4, i5, and 3 more everywhere (out of memory)"
    assert expected in words(measured("time", [*timed, *many]))
    apart = [oom(f"i{n}", 1024 + n) for n in range(9)]
    assert "i5 at 1029 (out of memory); and 3 more" in words(measured("time", [*timed, *apart]))


def test_overhead_is_over_the_plain_attention_that_is_fastest_most_often(measured):
    cells = [conv_cell("triton", seq, 4.0) for seq in (1024, 2048)]
    cells += [plain_cell("sdpa-cudnn", seq, ms) for seq, ms in ((1024, 2.0), (2048, 1.0))]
    cells += [plain_cell("sdpa-flash", seq, 2.5) for seq in (1024, 2048)]
    shown = measured("overhead", cells)
    (axes,) = shown.axes
    of = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert of == {"triton": [2, 4], "sdpa-cudnn": [1, 1], "sdpa-flash": [1.25, 2.5]}
    assert said([axes.yaxis.label]) == ["time over sdpa-cudnn's"]
    assert "triton takes 2.0x to 4.0x as long as plain attention by sdpa-cudnn" in words(shown)
