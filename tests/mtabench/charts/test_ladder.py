"""The ladder: rungs, steps, and the title computed from planted numbers."""

from chart_cells import conv_cell, faults, plain_cell, said, title, words

from mtabench.registry import GROUPS


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


def test_head_dims_have_a_panel_each_at_the_length_where_most_is_timed(measured):
    """The slowest rung ends at 4k tokens: the ladder stands there, whole, and not at 8k."""
    cells = []
    for head_dim in (64, 128):
        for seq in (2048, 4096, 8192):
            for step, name in enumerate(GROUPS["ladder"]):
                ms = None if step == 0 and seq == 8192 else seq * head_dim / 2**step
                failed = {"status": "oom", "reason": "out of memory"} if ms is None else {}
                cells.append(plain_cell(name, seq, ms, head_dim=head_dim, **failed))
    shown = measured("ladder", cells)
    assert [axes.get_title(loc="left") for axes in shown.axes] == ["4k tokens, head dim 64", "4k tokens, head dim 128"]
    for axes in shown.axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == list(GROUPS["ladder"])
    assert title(shown).endswith("14 steps up the ladder, at 4k tokens, head dim 128")
    assert faults(shown) == []


def test_a_head_dim_with_few_times_has_no_panel(measured):
    cells = [plain_cell(name, 1024, ms) for name, ms in (("a", 9.0), ("b", 2.0), ("c", 1.0))]
    shown = measured("ladder", [*cells, plain_cell("a", 1024, 18.0, head_dim=128)])
    assert len(shown.axes) == 1
