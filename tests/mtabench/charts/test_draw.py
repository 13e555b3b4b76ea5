"""`mtabench plot`: which files come out, what cannot be drawn, the same data the same file, texts of strangers."""

import xml.etree.ElementTree as ElementTree
from functools import partial

import matplotlib as mpl
import pytest
from chart_cells import charts_of, conv_cell, faults, figures, oom, plain_cell, texts, title, words, write
from command_line import printed, refused
from matplotlib.figure import Figure

from mtabench.charts import KINDS, draw
from mtabench.charts.data import read_cells
from mtabench.charts.style import DARK
from mtabench.errors import UsageError
from mtabench.results.columns import TABLE


@pytest.fixture
def plot(mtabench):
    return partial(mtabench, "plot")


@pytest.fixture
def sweep(tmp_path):
    """Two head dims; eager runs out of memory at 4k."""
    cells = []
    for head_dim in (64, 128):
        more = {"head_dim": head_dim}
        for seq in (1024, 2048, 4096):
            fits = seq < 4096
            cells.append(conv_cell("eager", seq, seq / 64, speedup=1, **more) if fits else oom("eager", seq, **more))
            cells.append(conv_cell("triton", seq, seq / 1024, speedup=16 if fits else "", **more))
            cells.append(plain_cell("sdpa-flash", seq, seq / 4096, **more))
    return write(tmp_path / "sweep.csv", cells)


def everything():
    """Decode cells that give every kind of chart but the ladder, the overhead and the share."""
    later = (column for column in TABLE if column.role == "measured" and column.since and column.field.numeric)
    measured = dict.fromkeys((column.name for column in later), 1) | {
        "useful_tflops": 3,
        "gbytes_s": 2000,
        "fraction_of_roofline": 0.5,
        "peak_memory_mb": 5,
        "rel_error": 0.01,
        "run_delay": 0,
        "read_gbytes_s": 4000,
    }
    for conv_q, conv_k, head_dim in ((3, 3, 64), (6, 11, 64), (6, 11, 128)):
        shape = {"pass": "decode", "conv_q": conv_q, "conv_k": conv_k, "head_dim": head_dim} | measured
        for seq in (1024, 4096):
            yield conv_cell("eager", seq, 8.0, speedup=1, **shape)
            for splits in ("auto", 2, 4):
                used = {"splits": splits, "splits_used": 2 if splits == "auto" else splits}
                yield conv_cell("triton", seq, 2.0, speedup=4, **shape | used)


def models():
    """A training step of two models and of the plain one."""
    shape = {"pass": "train", "layers": 12, "head_dim": 128}
    yield plain_cell("plain", 1024, 9.0, **shape)
    yield from (conv_cell("triton", 1024, 10.0, conv_every=every, **shape) for every in (1, 4))


def ladder():
    """Three implementations of plain attention at one shape."""
    return [plain_cell(name, 1024, ms) for name, ms in (("naive", 90.0), ("tiled", 9.0), ("sdpa-flash", 1.0))]


def test_every_kind_that_the_results_can_give_is_drawn_and_printed(plot, tmp_path, monkeypatch):
    """As empty figures: each kind is drawn below."""
    monkeypatch.setattr("mtabench.charts.make_figure", lambda *_: Figure())
    decode = read_cells([write(tmp_path / "a.csv", everything())])
    kinds = [kind for kind in KINDS if charts_of(decode, kind)]
    write(tmp_path / "a.csv", [*everything(), *ladder()])
    out = printed(plot("a.csv", "--formats", "svg"))
    expected = ["fwd-time.svg", "fwd-ladder.svg", *(f"decode-{kind}.svg" for kind in kinds)]
    assert sorted(out.splitlines()) == sorted(f"a-charts/{name}" for name in expected)
    assert all((tmp_path / path).read_text().startswith("<?xml") for path in out.splitlines())


def test_a_dark_chart_has_a_name_and_a_page_of_its_own(plot, sweep, tmp_path):
    code, out, _ = plot(sweep, "--kind", "time", "--theme", "light,dark", "--formats", "svg", "--out", ".")
    assert (code, out.splitlines()) == (0, ["fwd-time.svg", "fwd-time-dark.svg"])
    light, dark = ((tmp_path / name).read_text().lower() for name in out.splitlines())
    assert DARK.paper.lower() in dark
    assert DARK.paper.lower() not in light


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        ("overhead", "a time of plain attention"),
        ("share", "a time of the plain model"),
        ("speedup", "a timed baseline"),
        ("heatmap-conv", "at least two convolutions"),
        ("heatmap-head-dim", "at least two head dims"),
        ("roofline", "useful_tflops and gbytes_s"),
        ("bandwidth", "decode cells with gbytes_s"),
        ("memory", "peak_memory_mb"),
        ("splits", "at least two numbers of splits"),
        ("ladder", "at least 3 implementations of plain attention"),
    ],
)
def test_a_kind_that_the_results_cannot_give_is_one_sentence(plot, tmp_path, kind, needed):
    write(tmp_path / "a.csv", [conv_cell("triton", 1024, 2.0), plain_cell("sdpa-flash", 2048, 1.0)])
    result = plot("a.csv", "--kind", f"time,{kind}")
    refused(result, f"a.csv cannot give a chart of kind {kind}; it needs ", needed)
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (("--kind", "tiem"), "there is no kind of chart 'tiem'; did you mean time?"),
        (("--kind", "x"), "expected one or more of overhead, time, speedup, heatmap-conv"),
        (("--theme", "sepia"), "there is no theme 'sepia'; expected one or more of light, dark"),
        (("--formats", "pdf"), "there is no chart format 'pdf'"),
        (("--kind", ","), "--kind"),
        (("--out", "a.png"), "--out a.png is for a folder, in which each chart gets a name; give --out a"),
        (("--out", "sweep.csv"), "cannot write sweep.csv/fwd-overhead.png"),
    ],
)
def test_bad_options_are_one_sentence_and_write_nothing(plot, sweep, tmp_path, typed, sentence):
    refused(plot(sweep, *typed), sentence)
    assert list(tmp_path.iterdir()) == [sweep]


def test_what_one_chart_cannot_show_makes_charts_named_after_it(tmp_path):
    cells = [
        conv_cell("eager", seq, 1.0, dtype=dtype, batch=batch)
        for seq in (1024, 2048)
        for dtype, batch in (("bf16", 1), ("bf16", 4), ("fp16", 1))
    ]
    paths = draw([write(tmp_path / "a.csv", cells)], tmp_path, formats=["svg"])
    assert [path.stem for path in paths] == [
        f"fwd-time-{name}" for name in ("bf16-batch1", "bf16-batch4", "fp16-batch1")
    ]


def test_a_file_is_the_same_each_time_and_carries_no_date(tmp_path):
    path = write(tmp_path / "a.csv", everything())
    first, second = (draw([path], tmp_path / name, ["speedup"]) for name in ("first", "second"))
    assert len(first) == 2
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one
        assert b"<dc:date>" not in one.read_bytes()


def test_settings_of_matplotlib_neither_change_the_charts_nor_are_changed(sweep, tmp_path):
    (expected,) = draw([sweep], tmp_path / "first", kinds=["time"], formats=["svg"])
    with mpl.rc_context({"lines.linewidth": 9, "text.color": "red", "axes.grid": True, "legend.fontsize": 30}):
        before = dict(mpl.rcParams)
        (path,) = draw([sweep], tmp_path / "second", kinds=["time"], formats=["svg"])
        assert dict(mpl.rcParams) == before
    assert path.read_bytes() == expected.read_bytes()


HOSTILE = (
    r"$\frac{1}{0}$",
    "$$ & <script>alert(1)</script> -->]]><svg onload='x'>",
    "X" * 10_000,
    "\N{CJK UNIFIED IDEOGRAPH-4E2D}\N{GRINNING FACE}",
)


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[1:12])
def test_texts_of_a_stranger_are_shown_as_text_and_shortened(tmp_path, text):
    cells = [conv_cell(name, seq, 1.0, device=text, torch=text) for name in ("eager", text) for seq in (1024, 2048)]
    path = write(tmp_path / "a.csv", [*cells, oom(text, 4096, device=text, torch=text)])
    (shown,) = figures(path, "time")
    assert not any(one.get_parse_math() for one in texts(shown))
    assert faults(shown) == []
    assert words(shown).count(text[:9]) >= 4  # at its line, in the note of failed cells, and twice in the caption
    assert len(words(shown)) < 1000
    (svg,) = draw([path], tmp_path, kinds=["time"], formats=["svg"])
    tags = {element.tag.partition("}")[2] for element in ElementTree.parse(svg).iter()}
    assert not tags & {"script", "a", "image", "foreignObject"}


def test_names_too_long_for_a_file_do_not_overwrite_each_other(tmp_path):
    cells = [conv_cell("eager", 1024, 1.0, device="G" * 5000 + end) for end in ("1", "2", "3")]
    paths = draw([write(tmp_path / "a.csv", cells)], tmp_path, formats=["svg"])
    assert len({path.name for path in paths}) == 3
    assert all(len(path.name) < 100 and path.exists() for path in paths)


@pytest.mark.parametrize(
    ("cells", "sentence"),
    [
        ((conv_cell(f"i{n}", 1024, 1.0) for n in range(61)), "61 implementations"),
        (
            (conv_cell("eager", 1024, 1.0, head_dim=n) for n in range(1, 62)),
            r"61 problems \(head dim and operation\)",
        ),
        ((conv_cell("eager", 1024, 1.0, device=f"d{n}") for n in range(101)), "101 combinations of device"),
    ],
    ids=["implementations", "panels", "settings"],
)
def test_more_than_can_be_drawn_is_one_sentence(tmp_path, cells, sentence):
    path = write(tmp_path / "a.csv", cells)
    with pytest.raises(UsageError, match=sentence):
        draw([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def numbers_at_the_bounds():
    """The largest and smallest numbers that a results file may hold."""
    for impl, seq, ms, value in (("eager", 1, 1e-99, 1e-99), ("triton", 10**11, 1e99, 1e99)):
        measures = dict.fromkeys(
            ("useful_tflops", "gbytes_s", "fraction_of_roofline", "peak_memory_mb", "rel_error"), value
        )
        yield conv_cell(impl, seq, None, speedup=1 / value, **measures) | {"median_ms": ms}


CORNERS = {
    "one row": [conv_cell("triton", 1024, 2.0)],
    "all failed": [oom(name, seq) for name in ("eager", "triton", "compile") for seq in (1024, 2048, 4096)],
    "many and long names": [
        cell
        for n in range(10)
        for cell in (
            conv_cell(f"a_name_that_is_much_longer_than_anyone_would_choose_{n}", 1024, n + 1.0, speedup=2),
            oom(f"a_name_that_is_much_longer_than_anyone_would_choose_{n}", 4096),
            conv_cell("eager", 1024, 20, speedup=1),
        )
    ],
    "the bounds": list(numbers_at_the_bounds()),
}


@pytest.mark.parametrize("name", CORNERS)
def test_texts_neither_overlap_nor_leave_the_chart(tmp_path, name):
    path = write(tmp_path / "a.csv", CORNERS[name])
    shown = [figure for kind in KINDS for figure in figures(path, kind, DARK)]
    assert shown
    assert [fault for figure in shown for fault in faults(figure)] == []
    assert all(title(figure).startswith("Forward: ") for figure in shown)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_every_kind_neither_overlap_nor_leave_the_chart(tmp_path, kind):
    """A kind that none of these cells can give needs some of its own."""
    beside = [*everything(), plain_cell("sdpa-flash", 1024, 4.0, **{"pass": "decode"})]
    written = (write(tmp_path / "a.csv", cells) for cells in (everything(), beside, ladder(), models()))
    (shown,) = next(filter(None, (figures(path, kind) for path in written)))
    assert faults(shown) == []
