"""The ladder: rungs, steps, and the title computed from planted numbers."""

from chart_cells import conv_cell, plain_cell, said, title


def test_ladder_goes_from_the_slowest_to_the_fastest_with_the_factor_of_each_step(measured):
    times = {"tiled": 20.0, "naive": 90.0, "sdpa-cudnn": 2.0}
    cells = [plain_cell(name, seq, ms * seq / 1024) for seq in (512, 1024) for name, ms in times.items()]
    cells += [plain_cell("broken", 1024, None, status="wrong"), plain_cell("alone", 8192, 1.0)]
    shown = measured("ladder", [*cells, conv_cell("triton", 1024, 5.0)])
    (axes,) = shown.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["naive", "tiled", "sdpa-cudnn", "broken"]
    points = [line for line in axes.get_lines() if len(line.get_xdata()) == 1 and line.get_marker() != "x"]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in points] == [(90, 0), (20, 1), (2, 2)]
    assert axes.yaxis_inverted()
    assert said(axes.texts) == ["90 ms", "20 ms", "down 4.5x", "2 ms", "down 10x", "wrong"]
    assert (
        title(shown) == "Forward: sdpa-cudnn is 45x as fast as naive, 2 steps up the ladder, at 1k tokens, head dim 64"
    )
