"""`mtabench report`, through the command line and the Markdown that it writes."""

import re
from pathlib import Path

import pytest
from chart_cells import conv_cell, grid, plain_cell, write
from hostile_cells import COMMANDS, TEXTS, poison
from written_runs import case, rounds, write_run

from mtabench.cli import main
from mtabench.report import page as report_page
from mtabench.report.columns import ReportColumn
from mtabench.report.data import read_report
from mtabench.report.markdown import _field, markdown
from mtabench.report.sentences import figures, summary
from mtabench.results.results_file import samples_path

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*words):
        monkeypatch.setattr("sys.argv", ["mtabench", "report", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, *capsys.readouterr()

    return call


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


def test_page_and_markdown_are_written_beside_the_file(run, tmp_path):
    path = measured(tmp_path / "a.csv")
    code, out, err = run(path)
    assert (code, err) == (0, "")
    assert out.split() == ["report:", str(tmp_path / "a-report.html"), "report:", str(tmp_path / "a-report.md")]
    assert (tmp_path / "a-report.html").read_text().startswith("<!doctype html>")
    assert "# a on some, device" in (tmp_path / "a-report.md").read_text()


@pytest.mark.parametrize(("value", "shown"), [(4077.2, "4,077"), (4190, "4,190"), (407.72, "408"), (4.0772, "4.08")])
def test_numbers_have_the_same_marks_whatever_their_digits(value, shown):
    assert _field({"gbytes_s": value}, ReportColumn("gbytes_s", "GB/s", digits=3)) == shown


def test_a_name_of_another_kind_is_said_with_what_is_written(run, tmp_path):
    path = measured(tmp_path / "a.csv")
    _, out, _ = run(path, "--out", tmp_path / "b.json", "--markdown", tmp_path / "c.txt")
    assert out.splitlines() == [f"report: {tmp_path}/b.json (an HTML page)", f"report: {tmp_path}/c.txt (Markdown)"]
    assert (tmp_path / "b.json").read_text().startswith("<!doctype html>")


def test_a_report_is_replaced_and_another_file_is_not(run, tmp_path):
    path = measured(tmp_path / "a.csv")
    mine = tmp_path / "a-report.md"
    assert run(path)[0] == 0
    assert run(path)[0] == 0
    mine.write_text("notes of a person\n")
    code, _, err = run(path)
    assert code == 2
    assert f"{mine} already exists and is no report of mtabench" in err
    assert mine.read_text() == "notes of a person\n"
    assert run(path, "--overwrite")[0] == 0
    assert "person" not in mine.read_text()


def test_out_moves_both_files_and_markdown_its_own(run, tmp_path):
    path = measured(tmp_path / "a.csv")
    assert run(path, "--out", tmp_path / "new" / "page.html")[0] == 0
    assert sorted(one.name for one in (tmp_path / "new").iterdir()) == ["page.html", "page.md"]
    assert run(path, "--out", tmp_path / "page.html", "--markdown", tmp_path / "text.md")[0] == 0
    assert {one.name for one in tmp_path.iterdir()} == {
        "a.csv", "a.samples.csv", "new", "page.html", "text.md"
    }  # fmt: skip


@pytest.mark.parametrize("option", ["--out", "--markdown"])
@pytest.mark.parametrize("taken", ["a.csv", "a.samples.csv"])
def test_the_results_are_never_overwritten(run, tmp_path, option, taken):
    path = measured(tmp_path / "a.csv")
    before = (tmp_path / taken).read_bytes()
    code, _, err = run(path, option, tmp_path / taken, "--overwrite")
    assert code == 2
    assert "is one of the files that are read" in err
    assert (tmp_path / taken).read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("folder", [".", "/", "..", ""])
def test_a_folder_as_out_is_one_sentence(run, tmp_path, folder):
    code, _, err = run(measured(tmp_path / "a.csv"), "--out", folder)
    assert code == 2
    assert f"--out {folder or '.'} is a folder; give the name of a file" in err


def test_a_file_that_is_no_results_file_is_one_sentence(run, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    code, _, err = run(path)
    assert code == 2
    assert "is not a results file" in err
    assert [path] == list(tmp_path.iterdir())


def test_sentences_are_computed_from_the_file():
    report = read_report(ROOT / "results/nvidia-h200/fwd.csv")
    text = "\n".join(summary(report))
    assert "The forward pass on NVIDIA H200: 60 cells, all with a time" in text
    assert "Fastest conv attention: hopper at 10 of 10 shapes." in text
    assert re.search(r"hopper is \d+ times as fast as eager \(geometric mean of 10 shapes", text)
    assert "throttled in none" in text


def test_slow_cells_are_reported_in_gflops(tmp_path):
    path = write(tmp_path / "a.csv", [plain_cell("eager", 64, 1.0, useful_tflops=6.68e-05)])
    report = read_report(path)
    text = markdown(report)
    assert (text.count("GFLOP/s"), "TFLOP/s" in text) == (1, False)
    assert "| 0.0668 |" in text
    page = report_page.page_data(report)
    assert page["rate"] == ("GFLOP/s", 1e3)
    assert ("GFLOP/s", 1e3) in [(column["label"], column["factor"]) for column in page["columns"]]


def test_what_is_slower_takes_longer_in_the_sentences(tmp_path):
    cells = [*grid({(1024, 64): 0.5, (2048, 64): 0.125}), plain_cell("sdpa-flash", 1024, 256.0)]
    text = "\n".join(summary(read_report(write(tmp_path / "a.csv", cells))))
    assert "triton takes 4.0 times as long as eager (geometric mean of 2 shapes, 2.0 to 8.0)." in text
    assert "attention is 4.0 times as fast as the fastest plain attention there (one shape)." in text


def test_who_is_wrong_in_a_cell_is_no_large_figure(tmp_path):
    """A kernel that is fast where its fault does not show."""
    cells = [*grid({(1024, 64): 2.0, (2048, 64): 2.0}), conv_cell("mine", 1024, 1.0, speedup=64)]
    wrong = conv_cell("mine", 2048, None, status="wrong", reason="it loses the oldest key")
    found = figures(read_report(write(tmp_path / "a.csv", [*cells, wrong])))
    assert [one.words for one in found][:2] == [
        "as fast as eager: triton, geometric mean of 2 shapes",
        "triton, seq 2048",
    ]


def test_a_speedup_over_plain_attention_is_no_second_large_figure():
    """That of a model, whose baseline it is."""
    path = Path(__file__).parents[2] / "results/nvidia-h200/model-1b-train.csv"
    assert [one.words for one in figures(read_report(path))][:2] == [
        "as long as plain attention: auto, geometric mean of 2 shapes",
        "auto, conv every 4",
    ]


def test_failures_and_what_is_not_known_are_in_the_sentences(tmp_path):
    text = "\n".join(summary(read_report(measured(tmp_path / "a.csv"))))
    assert "5 cells, 4 with a time" in text
    assert "1 cell has no valid time: 1 out of memory." in text
    assert "takes 2.0 times as long as the fastest plain attention there (one shape)" in text
    assert "Whether the device was throttled is not known of 4 cells." in text


def test_markdown_shows_times_failures_spread_and_commands(tmp_path):
    text = markdown(read_report(measured(tmp_path / "a.csv")))
    assert re.search(r"^\| 2,048 \| oom \| 4\.\d+ \|  \|$", text, re.MULTILINE)
    assert "- **oom**: out of memory: 26 GiB (1 cell)\n  - eager, seq 2048" in text
    assert re.search(r"\| triton \| 2,048 \|.*\| `[▁▂▃▄▅▆▇█]{12}` \|", text)
    assert "mtabench fwd --impl triton --seq 2048" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith(" |") for line in tables)


def test_missing_samples_are_said(tmp_path):
    path = measured(tmp_path / "a.csv")
    samples_path(path).unlink()
    report = read_report(path)
    assert report.no_samples == "there is no file a.samples.csv beside a.csv"
    assert "Samples are not shown: there is no file a.samples.csv" in markdown(report)


def test_samples_at_odds_with_the_rows_are_said(tmp_path):
    path = measured(tmp_path / "a.csv")
    samples = samples_path(path)
    samples.write_text("".join(samples.read_text().splitlines(keepends=True)[:-3]))
    assert "97 samples" in read_report(path).no_samples


def test_a_file_without_any_time_gives_a_report(run, tmp_path):
    path = write_run(tmp_path / "a.csv", {case(): ("error", "broke"), case(128): ("oom", "")})
    assert run(path)[0] == 0
    text = (tmp_path / "a-report.md").read_text()
    assert "2 cells, none with a time" in text
    assert "Samples are not shown: no cell has a time." in text


def test_hostile_texts_are_text_in_markdown(tmp_path):
    text = markdown(read_report(poison(measured(tmp_path / "a.csv"))))
    assert not re.search(r"<(?!!-- mtabench report -->|!-- -->|/?(details|summary|code)>)", text)
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
    options = "--timer cpu --cache warm --rounds 3 --time-limit 2.5 --cell-timeout 90 --isolate --ranks 2"
    path.write_text(path.read_text().replace("--causal\n", f"--causal {options}\n"))
    assert all(row["command"].endswith(options) for row in read_report(path).rows)


def test_commands_that_mtabench_would_not_write_are_not_offered(tmp_path):
    path = poison(measured(tmp_path / "a.csv"))
    report = read_report(path)
    assert {row["command"] for row in report.rows} == {""}
    assert not any(command in markdown(report) for command in COMMANDS)


def test_hostile_texts_are_data_on_the_page(tmp_path):
    page = report_page.html_page(read_report(poison(measured(tmp_path / "a.csv"))))
    assert page.count("<script") == 6  # ours, and the data
    assert not any(text in page for text in TEXTS[:3])


def test_many_cells_and_samples_are_thinned_and_it_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(report_page, "MOST_CELLS", 3)
    monkeypatch.setattr(report_page, "MOST_SAMPLES_A_CELL", 20)
    data = report_page.page_data(read_report(measured(tmp_path / "a.csv")))
    assert len(data["cells"]["rows"]) == 3
    assert data["notes"] == [
        "The page shows the first 3 of 5 cells; the summary is of all.",
        "Of each cell up to 20 samples are drawn; the numbers beside them are of all.",
    ]
    drawn = data["cells"]["rows"][0][data["cells"]["names"].index("drawn")]
    assert [len(samples) for samples in drawn] == [2] * 10


def test_panels_hold_plain_attention_beside_every_convolution(tmp_path):
    plain = case(64, "sdpa-flash", taps=None)
    cells = {case(64): rounds(2.0), case(64, taps=(3, 3)): rounds(1.0), plain: rounds(0.5)}
    report = read_report(write_run(tmp_path / "a.csv", cells))
    assert report.panels == ["head dim 16, conv 3x3", "head dim 16, conv 6x11"]
    assert [row["panels"] for row in report.rows] == [[1], [0], [0, 1]]


def test_panels_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("mtabench.report.data.MOST_PANELS", 2)
    cells = {case(64, head_dim=head_dim): rounds(1.0) for head_dim in (16, 32, 64)}
    report = read_report(write_run(tmp_path / "a.csv", cells))
    assert [row["panels"] for row in report.rows] == [[0], [1], []]


def test_a_large_figure_has_its_interval_and_no_digit_that_it_hides(tmp_path):
    wide = {"ci95_low_ms": 0.85, "ci95_high_ms": 1.15}  # 15 % of each time, 21 % of their ratio
    cells = [conv_cell("triton", 1024, 1.0, speedup=7.02, **wide)]
    cells += [conv_cell("eager", 1024, 7.02, speedup=1, **{name: 7.02 * value for name, value in wide.items()})]
    report = read_report(write(tmp_path / "a.csv", cells))
    shown = [(one.value, one.interval) for one in figures(report)]
    assert shown[:2] == [("7\N{MULTIPLICATION SIGN}", "± 21 %"), ("1 ms", "± 15 %")]
    assert "triton is 7 times as fast as eager (one shape)." in summary(report)
    assert "**7\N{MULTIPLICATION SIGN}** ± 21 % as fast as eager" in markdown(report)


def test_charts_that_are_too_large_are_a_note(tmp_path):
    cells = [conv_cell(f"i{number}", 1024, 1.0) for number in range(61)]
    data = report_page.page_data(read_report(write(tmp_path / "a.csv", cells)))
    assert (data["charts"], len(data["cells"]["rows"])) == ([], 61)
    assert data["notes"][0].startswith("There are no charts: these results name 61 implementations")


def test_of_several_splits_charts_take_auto(tmp_path):
    cells = {
        case(64, "triton", pass_="decode", splits=splits): rounds(ms)
        for splits, ms in (("auto", 2.0), (1, 3.0), (4, 1.0))
    }
    report = read_report(write_run(tmp_path / "a.csv", cells))
    assert [row["charted"] for row in report.rows] == [True, False, False]
    assert "Of several splits" in "\n".join(summary(report))
