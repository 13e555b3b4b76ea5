"""Shares of the plain model's speed: bars, their numbers, and the title computed from planted ones."""

from chart_cells import conv_cell, faults, plain_cell, said, title, words

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
