"""What charts are drawn from: each cell once, settings apart, one line an implementation."""

import pytest
from chart_cells import conv_cell, oom, plain_cell, write

from mtabench.charts.data import one_line_each, read_cells, settings
from mtabench.charts.panels import panels, times
from mtabench.charts.style import DARK, LIGHT, SPARE_STYLES, SPARE_YARDSTICKS, Look, own_styles, styles_of
from mtabench.errors import UsageError
from mtabench.palette import contrast


def one_panel(path):
    (_, setting), *others = settings(read_cells([path]))
    assert not others
    panel, *others = panels(one_line_each(setting), lambda group, _: times(group))
    assert not others
    return panel


def test_batches_that_shrink_with_the_sequence_are_one_line(tmp_path):
    cells = [conv_cell("eager", seq, 1.0, batch=max(1, 8192 // seq)) for seq in (1024, 4096, 8192, 16384)]
    (suffix, setting), *others = settings(read_cells([write(tmp_path / "a.csv", cells)]))
    assert (suffix, others) == ("", [])
    assert set(setting["batch_name"]) == {"8k tokens"}


def test_a_cell_with_two_rows_is_refused_and_the_same_row_counts_once(tmp_path):
    cell = conv_cell("eager", 1024, 5.0)
    old = write(tmp_path / "old.csv", [cell])
    new = write(tmp_path / "new.csv", [conv_cell("eager", 2048, 9.0), conv_cell("eager", 1024, 4.0)])
    with pytest.raises(UsageError) as refusal:
        read_cells([new, old])
    assert str(refusal.value).startswith(f"{new} and {old} both have fwd eager bf16 batch 1 heads 16 seq 1024")
    assert "of Test GPU; give one of them, or first `mtabench results merge" in str(refusal.value)
    with pytest.raises(UsageError, match=r"has the cell .* twice"):
        read_cells([write(tmp_path / "twice.csv", [cell, cell | {"median_ms": 6.0}])])
    assert list(read_cells([old, write(tmp_path / "copy.csv", [cell])])["median_ms"]) == [5.0]
    other = write(tmp_path / "other.csv", [cell | {"device": "Other GPU", "median_ms": 6.0}])
    assert list(read_cells([old, other])["median_ms"]) == [5.0, 6.0]


def test_failed_cells_break_the_line_and_are_kept_as_runs(tmp_path):
    cells = [conv_cell("triton", 1024, 2.0), conv_cell("triton", 2048, 3.0, status="wrong")]
    cells += [oom("triton", seq) for seq in (4096, 8192)]
    panel = one_panel(write(tmp_path / "a.csv", cells))
    assert [(failure.word, failure.xs) for failure in panel.failures] == [
        ("wrong", (2048,)),
        ("out of memory", (4096, 8192)),
    ]
    assert list(panel.lines[0].y[:1]) == [2.0]
    assert all(value != value for value in panel.lines[0].y[1:])


def decode_cells(splits, used="", **more):
    """Triton's and eager's cells of two sequence lengths; the fastest number of splits is 2, then 4."""
    for seq, best in ((1024, 2), (4096, 4)):
        yield conv_cell("eager", seq, seq / 64, speedup=1, **{"pass": "decode"})
        for number in splits:
            taken = used if number == "auto" else number
            ms = seq / 1024 + abs((taken or 1) - best)
            ours = {"pass": "decode", "splits": number, "splits_used": taken, "speedup": seq / 64 / ms, **more}
            ours |= {"ci95_low_ms": 0.9 * ms, "ci95_high_ms": 1.1 * ms}
            yield conv_cell("triton", seq, ms, **ours)


@pytest.mark.parametrize(
    ("splits", "label", "expected"),
    [
        (["auto", 2, 4], "triton", [2, 5]),
        ([1, 2, 4], "triton, best splits", [1, 4]),
        ([2], "triton, splits 2", [1, 6]),
        ([""], "triton", [2, 7]),
    ],
)
def test_an_implementation_has_one_line_whatever_its_splits(tmp_path, splits, label, expected):
    path = write(tmp_path / "a.csv", decode_cells(splits, used=1 if splits == [""] else 3))
    eager, triton = one_panel(path).lines
    assert (eager.impl, triton.impl, triton.label) == ("eager", "triton", label)
    assert (list(triton.x), list(triton.y)) == ([1024, 4096], expected)


def test_a_failed_auto_is_not_replaced(tmp_path):
    cells = [*decode_cells([2, 4]), oom("triton", 1024, splits="auto", **{"pass": "decode"})]
    panel = one_panel(write(tmp_path / "a.csv", cells))
    assert [line.impl for line in panel.lines] == ["eager"]
    assert [(failure.label, failure.xs) for failure in panel.failures] == [("triton", (1024,))]


def shown(cells):
    """The implementations of these cells, and whether they compute plain attention."""
    return [(cell["impl"], cell["op"] == "attention") for cell in cells]


def test_plain_attention_is_grey_beside_conv_attention_and_coloured_alone():
    plain = [plain_cell("tiled", 1024, 1.0), plain_cell("sdpa-flash", 1024, 0.5)]
    alone = styles_of(shown(plain))
    beside = styles_of(shown([*plain, conv_cell("mine", 1024, 2.0)]))
    assert alone["tiled"] in SPARE_STYLES
    assert beside["tiled"] in SPARE_YARDSTICKS
    assert beside["mine"] in SPARE_STYLES
    assert alone["sdpa-flash"] == beside["sdpa-flash"] == own_styles()["sdpa-flash"]


EVERY_STYLE = (*own_styles().values(), *own_styles(alone=True).values(), *SPARE_STYLES, *SPARE_YARDSTICKS)


def test_every_line_and_text_stands_out_from_the_page_in_both_themes():
    """WCAG 2.2: 3:1 for graphics, 4.5:1 for text."""
    for style in EVERY_STYLE:
        assert contrast(style.colour, LIGHT.paper) >= 3, style
        assert contrast(style.dark_colour, DARK.paper) >= 3, style
    styles = {str(number): style for number, style in enumerate(EVERY_STYLE)}
    for theme in (LIGHT, DARK):
        assert all(contrast(Look(theme, styles).text(name), theme.paper) >= 4.5 for name in styles)
        assert contrast(theme.ink, theme.paper) >= 4.5
        assert contrast(theme.quiet, theme.backdrop) >= 4.5


def test_no_two_implementations_look_the_same():
    looks = [(style.colour, style.marker, style.dashes) for style in EVERY_STYLE]
    assert len(set(looks)) == len(looks)
