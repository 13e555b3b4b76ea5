"""`mtabench report`: which files it writes, and what they say."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from chart_cells import conv_cell, grid, write
from command_line import refused
from hostile_cells import poison
from written_runs import case, rounds, write_run

from mtabench.charts import KINDS
from mtabench.charts.text import TIMES
from mtabench.report import data as report_data
from mtabench.report.data import command_of, html_page, page_data, read_report
from mtabench.results.results_file import read_file

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(mtabench):
    return partial(mtabench, "report")


def measured(path, **more):
    """Two shapes with eager and triton, one of which failed, and plain attention."""
    plain = {"taps": None}
    cells = {
        case(1024): rounds(8.0),
        case(1024, "triton"): rounds(2.0),
        case(1024, "sdpa-flash", **plain): rounds(1.0),
        case(2048): ("oom", "out of memory: 26 GiB"),
        case(2048, "triton"): rounds(4.0),
    }
    return write_run(path, cells, **more)


def test_a_page_is_written_beside_the_run_and_only_a_report_is_replaced(run, tmp_path):
    """Also of a file without any time."""
    path = write_run(tmp_path / "a.csv", {case(): ("error", "broke"), case(128): ("oom", "")})
    page = tmp_path / "a-report.html"
    for _ in range(2):
        assert run(path) == (0, f"report: {page}\n", "")
    assert page.read_text().startswith("<!doctype html>")
    assert "<title>a on some, device</title>" in page.read_text()
    page.write_text("notes of a person\n")
    refused(run(path), f"{page} already exists and is no report of mtabench")
    assert page.read_text() == "notes of a person\n"
    assert run(path, "--overwrite", "--out", page)[0] == 0
    assert "person" not in page.read_text()


@pytest.mark.parametrize("taken", ["a.csv", "a.samples.csv"])
def test_the_results_are_never_overwritten(run, tmp_path, taken):
    path = measured(tmp_path / "a.csv")
    before = (tmp_path / taken).read_bytes()
    refused(run(path, "--out", tmp_path / taken, "--overwrite"), "is one of the files that are read")
    assert (tmp_path / taken).read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_sentences_are_computed_from_the_file():
    text = "\n".join(read_report(ROOT / "results/nvidia-h200/fwd.csv").summary).replace(TIMES, "x")
    assert re.search(r"Forward: hopper is \d+x to \d+x as fast as eager, \d+x in the geometric mean of 10 shapes", text)
    assert re.search(r"Forward: hopper takes [\d.]+x to [\d.]+x as long as plain attention by sdpa-cudnn", text)
    assert re.search(r"Forward: hopper reaches 51 % to 63 % of the roofline", text)


def test_who_is_wrong_in_a_cell_is_no_large_figure(tmp_path):
    """A kernel that is fast where its fault does not show."""
    cells = [*grid({(1024, 64): 2.0, (2048, 64): 2.0}), conv_cell("mine", 1024, 1.0, speedup=64)]
    wrong = conv_cell("mine", 2048, None, status="wrong", reason="it loses the oldest key")
    found = read_report(write(tmp_path / "a.csv", [*cells, wrong])).figures
    assert [one.words for one in found][:2] == [
        "as fast as eager: triton, geometric mean of 2 shapes",
        "triton at 2k tokens",
    ]


def test_hostile_texts_are_text_in_markdown_and_no_command_of_them_is_offered(mtabench, tmp_path):
    path = poison(measured(tmp_path / "a.csv"))
    assert set(map(command_of, read_file(path).rows())) == {""}  # none that mtabench would write
    text = mtabench("show", path, "--markdown")[1]
    assert not re.search(r"<(?!!-- -->|/?code>)", text)
    assert not re.search(r"(?<!\\)\[|://|(?<!\\)!\[|@\w|www\.", text)
    assert not re.search(r"[\x00-\x08\x1b\u2028\u202e]", text)
    widths = {}
    for line in text.splitlines():
        if line.startswith("|"):
            cells = len(re.findall(r"(?<!\\)\|", line))
            assert widths.setdefault("now", cells) == cells
        else:
            widths = {}
    assert max(map(len, text.splitlines())) < 6000
    assert "x" * 500 not in text


def test_commands_that_mtabench_writes_are_offered(tmp_path):
    path = measured(tmp_path / "a.csv")
    options = "--timer cpu --cache warm --rounds 3 --time-limit 2.5 --cell-timeout 90 --isolate"
    path.write_text(path.read_text().replace("--causal\n", f"--causal {options}\n"))
    assert all(command_of(row).endswith(options) for row in read_file(path).rows())


def test_many_cells_are_cut_and_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(report_data, "MOST_CELLS", 3)
    data = page_data(read_report(measured(tmp_path / "a.csv")))
    assert len(data["cells"]["rows"]) == 3
    assert data["notes"] == ["The page shows the first 3 of 5 cells; the summary is of all."]


def test_a_large_figure_has_its_interval_and_no_digit_that_it_hides(tmp_path):
    wide = {"ci95_low_ms": 0.85, "ci95_high_ms": 1.15}  # 15 % of each time, 21 % of their ratio
    cells = [conv_cell("triton", 1024, 1.0, speedup=7.02, **wide)]
    cells += [conv_cell("eager", 1024, 7.02, speedup=1, **{name: 7.02 * value for name, value in wide.items()})]
    report = read_report(write(tmp_path / "a.csv", cells))
    shown = [(one.value, one.interval) for one in report.figures]
    assert shown[:2] == [("7\N{MULTIPLICATION SIGN}", "± 21 %"), ("1 ms", "± 15 %")]
    assert "Forward: triton is 7\N{MULTIPLICATION SIGN} as fast as eager at 1k tokens" in report.summary


def test_a_kind_of_chart_with_a_heading_has_a_section_on_the_page(tmp_path, monkeypatch):
    monkeypatch.setitem(KINDS, "memory", replace(KINDS["memory"], heading="Peak memory"))
    report = read_report(write(tmp_path / "a.csv", [conv_cell("triton", 1024, 1.0, peak_memory_mb=5)]))
    data = page_data(report)
    assert [kind for kind in data["kinds"] if kind in ("speedup", "memory")] == ["speedup", "memory"]
    assert [chart["kind"] for chart in data["charts"]] == ["time", "memory"]
    assert '<h2 id="memory-title">Peak memory</h2>' in html_page(report)


def test_charts_that_are_too_large_are_a_note(tmp_path):
    cells = [conv_cell(f"i{number}", 1024, 1.0) for number in range(61)]
    data = page_data(read_report(write(tmp_path / "a.csv", cells)))
    assert (data["charts"], len(data["cells"]["rows"])) == ([], 61)
    assert data["notes"][0].startswith("There are no charts: these results name 61 implementations")
