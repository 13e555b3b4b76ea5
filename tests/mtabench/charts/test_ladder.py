"""The ladder: rungs, steps, and the title computed from planted numbers."""

from chart_cells import conv_cell, faults, plain_cell, said, title, words


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
