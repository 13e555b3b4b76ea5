"""Charts: what is drawn from a results file, what marks a failed cell, and which files come out."""

import csv
import re

import matplotlib as mpl
import pytest

from mtabench.case import PASSES
from mtabench.chart_data import panels, read_cells, settings, split_panels
from mtabench.charts import draw
from mtabench.errors import UsageError
from mtabench.results import COLUMNS, SCHEMA_VERSION

DEFAULTS = {
    "schema_version": SCHEMA_VERSION, "run_id": "r1", "started_utc": "2026-01-02T03:04:05Z",
    "pass": "fwd", "dtype": "bf16", "batch": 1, "heads": 16, "kv_heads": 16, "head_dim": 64,
    "causal": "true", "status": "ok", "cache": "cold", "device": "Test GPU", "driver": "1.2",
    "cuda": "13.0", "torch": "2.11.0", "triton": "3.6.0", "mtabench": "0.1.0",
    "git_sha": "abcdef0123456789", "git_dirty": "false",
}  # fmt: skip


def conv_cell(impl, seq, ms, *, speedup="", **more):
    more = {"conv_q": 6, "conv_k": 11, "baseline": "eager" if speedup else "", **more}
    return {**timed(ms), "op": "conv-attention", "impl": impl, "seq": seq, "speedup": speedup, **more}


def plain_cell(impl, seq, ms, **more):
    return {**timed(ms), "op": "attention", "impl": impl, "seq": seq, **more}


def timed(ms):
    return {"median_ms": ms, "p10_ms": 0.9 * ms, "p90_ms": 1.2 * ms} if ms else {}


def oom(impl, seq, **more):
    return conv_cell(impl, seq, None, status="oom", reason="it does not fit", **more)


def write(path, cells):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows({**DEFAULTS, **cell} for cell in cells)
    return path


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


def one_panel(path, speedup=False):
    cells = read_cells([path])
    (_, setting), *others = settings(cells)
    assert not others
    panel, *others = panels(setting, speedup)
    assert not others
    return panel


def svg_words(path):
    """The texts of an SVG: matplotlib draws letters as paths, with the text before them as a comment."""
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_two_charts_a_pass_in_each_format(sweep, tmp_path):
    paths = draw([sweep], tmp_path / "new" / "charts")
    names = ["fwd-time.png", "fwd-time.svg", "fwd-speedup.png", "fwd-speedup.svg"]
    assert [path.name for path in paths] == names
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert paths[1].read_text().startswith("<?xml")


def test_every_pass_in_a_file_has_its_charts(tmp_path):
    cells = [conv_cell("eager", 1024, 3, speedup=1, **{"pass": pass_}) for pass_ in PASSES]
    paths = draw([write(tmp_path / "all.csv", cells)], tmp_path, formats=["svg"])
    assert [path.stem for path in paths] == [f"{p}-{kind}" for p in PASSES for kind in ("time", "speedup")]


def test_chart_says_what_was_measured(sweep, tmp_path):
    time, speedup = (svg_words(path) for path in draw([sweep], tmp_path, formats=["svg"]))
    for words in (time, speedup):
        text = "\n".join(words)
        for expected in (
            "head dim 64, convolution 6x11", "head dim 128, convolution 6x11", "1k", "2k", "4k", "triton",
            "sdpa-flash (plain attention)", "eager: out of memory", "bf16", "16 heads", "batch 1", "causal",
            "Test GPU",
            "driver 1.2", "cuda 13.0", "torch 2.11.0", "triton 3.6.0", "mtabench 0.1.0", "git abcdef012",
        ):  # fmt: skip
            assert expected in text, expected
    assert "time (ms)" in time
    assert "speedup over eager" in speedup
    assert "eager (the baseline)" in speedup


def test_svg_is_the_same_each_time_and_carries_no_date(sweep, tmp_path):
    first = [path.read_bytes() for path in draw([sweep], tmp_path / "first")]
    assert first == [path.read_bytes() for path in draw([sweep], tmp_path / "second")]
    assert not any(b"<dc:date>" in content for content in first)


def test_global_matplotlib_state_is_left_alone(sweep, tmp_path):
    before = dict(mpl.rcParams)
    draw([sweep], tmp_path, formats=["svg"])
    assert dict(mpl.rcParams) == before


def test_line_and_band_hold_the_numbers_of_the_file(tmp_path):
    path = write(tmp_path / "a.csv", [conv_cell("triton", 2048, 4.0), conv_cell("triton", 1024, 2.0)])
    (line,) = one_panel(path).lines
    assert list(line.x) == [1024, 2048]
    assert list(line.y) == [2.0, 4.0]
    assert list(line.low) == [1.8, 3.6]
    assert list(line.high) == [2.4, 4.8]


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


def test_plain_attention_is_compared_with_the_baseline_of_the_panel(tmp_path):
    cells = [conv_cell("eager", 1024, 12.0, speedup=1, conv_q=3, conv_k=3)]
    cells += [conv_cell("eager", 1024, 20.0, speedup=1), plain_cell("sdpa-flash", 1024, 0.5)]
    (_, setting) = next(settings(read_cells([write(tmp_path / "a.csv", cells)])))
    ratios = {
        panel.title: line.y[0] for panel in panels(setting, speedup=True) for line in panel.lines if line.yardstick
    }
    assert ratios == {"head dim 64, convolution 3x3": 24.0, "head dim 64, convolution 6x11": 40.0}


def test_speedup_band_follows_the_percentiles_of_the_time(tmp_path):
    cells = [conv_cell("eager", 1024, 20.0, speedup=1), conv_cell("triton", 1024, 2.0, speedup=10)]
    triton = one_panel(write(tmp_path / "a.csv", cells), speedup=True).lines[1]
    assert triton.y[0] == 10
    assert triton.low[0] == pytest.approx(10 / 1.2)
    assert triton.high[0] == pytest.approx(10 / 0.9)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (
            [oom("eager", 1024), plain_cell("sdpa-flash", 1024, None, status="unsupported")],
            "no cell has a valid time",
        ),
        ([conv_cell("triton", 1024, 2.0)], "no speedup: the baseline has no time"),
        ([plain_cell("sdpa-flash", 1024, 2.0)], "head dim 64, plain attention"),
        ([oom("triton", seq) for seq in (1024, 2048, 4096)], "triton: out of memory"),
    ],
    ids=["only failures", "no baseline", "only plain attention", "one long run of failures"],
)
def test_odd_files_still_give_charts(tmp_path, cells, expected):
    paths = draw([write(tmp_path / "odd.csv", cells)], tmp_path, formats=["svg"])
    assert [path.name for path in paths] == ["fwd-time.svg", "fwd-speedup.svg"]
    assert any(expected in words for path in paths for words in svg_words(path))


def test_batches_that_shrink_with_the_sequence_are_one_line(tmp_path):
    cells = [conv_cell("eager", seq, 1.0, batch=max(1, 8192 // seq)) for seq in (1024, 4096, 8192, 16384)]
    (suffix, setting), *others = settings(read_cells([write(tmp_path / "a.csv", cells)]))
    assert (suffix, others) == ("", [])
    assert set(setting["batch_name"]) == {"8k tokens"}


def test_what_one_chart_cannot_show_makes_charts_named_after_it(tmp_path):
    cells = [
        conv_cell("eager", seq, 1.0, dtype=dtype, batch=batch)
        for seq in (1024, 2048)
        for dtype, batch in (("bf16", 1), ("bf16", 4), ("fp16", 1))
    ]
    paths = draw([write(tmp_path / "a.csv", cells)], tmp_path, formats=["svg"])
    assert [path.stem for path in paths if "time" in path.stem] == [
        "fwd-time-bf16-batch1",
        "fwd-time-bf16-batch4",
        "fwd-time-fp16-batch1",
    ]


def test_a_cell_in_two_files_counts_once_the_latest(tmp_path):
    old = write(tmp_path / "old.csv", [conv_cell("eager", 1024, 5.0, started_utc="2026-01-01T00:00:00Z")])
    new = write(tmp_path / "new.csv", [conv_cell("eager", 1024, 4.0, started_utc="2026-02-01T00:00:00Z")])
    assert list(read_cells([new, old])["median_ms"]) == [4.0]


def decode_cells(splits, used="", **more):
    """Triton's and eager's cells of two sequence lengths; the fastest number of splits is 2, then 4."""
    for seq, best in ((1024, 2), (4096, 4)):
        yield conv_cell("eager", seq, seq / 64, speedup=1, **{"pass": "decode"})
        for number in splits:
            taken = used if number == "auto" else number
            ms = seq / 1024 + abs((taken or 1) - best)
            ours = {"pass": "decode", "splits": number, "splits_used": taken, "speedup": seq / 64 / ms, **more}
            yield conv_cell("triton", seq, ms, **ours)


@pytest.mark.parametrize(
    ("splits", "label", "times"),
    [
        (["auto", 2, 4], "triton", [2, 5]),
        ([1, 2, 4], "triton, best splits", [1, 4]),
        ([2], "triton, splits 2", [1, 6]),
        ([""], "triton", [2, 7]),
    ],
)
def test_an_implementation_has_one_line_whatever_its_splits(tmp_path, splits, label, times):
    path = write(tmp_path / "a.csv", decode_cells(splits, used=1 if splits == [""] else 3))
    for speedup in (False, True):
        eager, triton = one_panel(path, speedup=speedup).lines
        assert (eager.impl, triton.impl, triton.label) == ("eager", "triton", label)
        assert list(triton.x) == [1024, 4096]
        if not speedup:
            assert list(triton.y) == times
        else:
            assert list(triton.y) == pytest.approx([16 / times[0], 64 / times[1]])


def test_best_splits_leave_failures_out_where_another_number_succeeds(tmp_path):
    cells = [conv_cell("triton", 1024, 5.0, splits=2), conv_cell("triton", 1024, 1.0, splits=4, status="invalid")]
    cells += [oom("triton", 2048, splits=splits) for splits in (2, 4)]
    panel = one_panel(write(tmp_path / "a.csv", [{**cell, "pass": "decode"} for cell in cells]))
    assert list(panel.lines[0].y[:1]) == [5.0]
    assert [(failure.label, failure.xs) for failure in panel.failures] == [("triton, best splits", (2048,))]


def test_a_failed_auto_is_not_replaced(tmp_path):
    cells = [*decode_cells([2, 4]), oom("triton", 1024, splits="auto", **{"pass": "decode"})]
    panel = one_panel(write(tmp_path / "a.csv", cells))
    assert [line.impl for line in panel.lines] == ["eager"]
    assert [(failure.label, failure.xs) for failure in panel.failures] == [("triton", (1024,))]


def test_auto_of_a_file_without_splits_is_the_same_cell(tmp_path):
    old = [{**cell, "started_utc": "2026-01-01T00:00:00Z"} for cell in decode_cells([""])]
    files = [write(tmp_path / "old.csv", old), write(tmp_path / "new.csv", decode_cells(["auto"], used=2))]
    cells = read_cells(files)
    assert cells.loc[cells["impl"] == "triton", "splits_used"].tolist() == ["2", "2"]


def test_time_against_splits_has_a_line_a_length_and_marks_auto(tmp_path):
    cells = [*decode_cells(["auto", 1, 4, 2], used=3), oom("triton", 4096, splits=8, **{"pass": "decode"})]
    path = write(tmp_path / "a.csv", cells)
    paths = draw([path], tmp_path, formats=["svg"])
    assert [path.stem for path in paths] == ["decode-time", "decode-speedup", "decode-splits"]
    text = "\n".join(svg_words(paths[2]))
    for expected in ("triton, head dim 64, convolution 6x11", "seq 1k", "seq 4k", "auto", "seq 4k: out of memory"):
        assert expected in text
    assert "eager" not in text
    (panel,) = split_panels(read_cells([path]))
    short, long = panel.lines
    assert (list(short.x), list(short.y), short.auto) == ([1, 2, 4], [2, 1, 3], (3, 2))
    assert (list(long.x), list(long.y[:3]), long.auto) == ([1, 2, 4, 8], [7, 6, 4], (3, 5))
    assert list(short.low) == pytest.approx([1.8, 0.9, 2.7])
    assert [(failure.label, failure.xs) for failure in panel.failures] == [("seq 4k", (8,))]


@pytest.mark.parametrize("splits", [["auto"], ["auto", 2], [2], [""]])
def test_one_number_of_splits_makes_no_chart_against_splits(tmp_path, splits):
    paths = draw([write(tmp_path / "a.csv", decode_cells(splits, used=3))], tmp_path, formats=["svg"])
    assert [path.stem for path in paths] == ["decode-time", "decode-speedup"]


def test_bad_input_is_one_sentence_and_writes_nothing(sweep, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="'pdf' is not known; expected png or svg"):
        draw([sweep], out, formats=["pdf"])
    with pytest.raises(UsageError, match="no results file"):
        draw([], out)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="no column"):
        draw([tmp_path / "other.csv"], out)
    assert not out.exists()
    with pytest.raises(UsageError, match="cannot write the chart"):
        draw([sweep], sweep)  # a file where the folder should be
