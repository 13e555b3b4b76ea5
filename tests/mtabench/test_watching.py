"""What is shown while a sweep runs and when it ends: a bar with the time left, and what to type next."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from written_runs import ENVIRONMENT, case, rounds

from mtabench.console import PipeTolerantWriter, make_console
from mtabench.errors import NothingTimedError
from mtabench.measuring.timing import Measurement
from mtabench.results.facts import RunFacts
from mtabench.results.outputs import named
from mtabench.results.results_file import key_of
from mtabench.results.rows import cell_row, timed_row
from mtabench.sweeps import advice, watching
from mtabench.sweeps.advice import next_command
from mtabench.sweeps.table import check_any, print_results, reason_lines
from mtabench.sweeps.watching import LiveWatcher, Watcher, make_watcher

FACTS = RunFacts("a", "2026-01-02T03:04:05Z", ENVIRONMENT)
KEYS = [key_of(case(seq)) for seq in (64, 128, 256)]


def test_names_and_reasons_are_shown_as_they_are(monkeypatch, capsys):
    """A colon on each side makes a face of a word, elsewhere: `mine:ok:` is a name."""
    monkeypatch.setenv("COLUMNS", "120")
    console = make_console()
    row = cell_row(case(64), FACTS, "error", "no :star: [bold]here\x1b[31m") | {"impl": "mine:ok:new"}
    shown = Watcher(console, 1, [])
    shown.ended(row)
    print_results(console, [row])
    line, *table = capsys.readouterr().out.splitlines()
    assert line.endswith(r"  mine:ok:new: error: no :star: [bold]here\x1b[31m")
    assert any("mine:ok:new " in text for text in table)


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (3725, "62:05")])
def test_the_time_since_the_start_is_to_the_second(seconds, text):
    assert watching._clock(seconds) == text


@pytest.fixture
def live(monkeypatch):
    """A watcher on a terminal of 80 columns, of three cells, and what it has drawn."""
    monkeypatch.setattr(watching, "REDRAW_S", 0.0)
    paper = io.StringIO()
    console = Console(file=paper, width=80, height=20, force_terminal=True, color_system=None)
    with LiveWatcher(console, 3, [], dict.fromkeys(KEYS, 30.0)) as shown:
        yield shown, paper


def test_the_bar_has_the_time_that_is_left_and_fits(live):
    shown, paper = live
    shown.doing("seq 64, eager: verifying")
    text = paper.getvalue()
    assert "0 of 3 cells, 0 s, about 90 s left" in text or "about 2 min left" in text
    shown.ended(timed_row(case(64), FACTS, Measurement("cpu", "warm", rounds(1.0)), 1e-6, None))
    shown.refresh()
    assert re.search(r"1 of 3 cells, \d s, about \d+ s left", paper.getvalue())
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", paper.getvalue())
    assert max(len(line) for line in re.split(r"[\r\n]+", plain)) <= 80


def test_the_time_left_is_the_guess_until_something_ended_and_then_that_at_its_pace(live):
    shown, _ = live
    assert shown.time_left(20.0) == (0.0, 90.0)
    shown.ended(cell_row(case(64), FACTS, "error", "planted"))
    shown.ended(cell_row(case(512), FACTS, "unsupported", "planted"))  # nobody guessed that it would be measured
    share, left = shown.time_left(60.0)
    assert (share, left) == (pytest.approx(1 / 3), pytest.approx(60.0 * (60 + 9) / (30 + 9)))
    for seq in (128, 256):
        shown.ended(cell_row(case(seq), FACTS, "ok"))
    assert shown.time_left(200.0) == (1.0, 0.0)


def drawn(shown):
    """The text of a frame that is drawn now."""
    paper = Console(file=io.StringIO(), width=80)
    paper.print(shown._render())
    return paper.file.getvalue()


def test_a_terminal_has_a_line_for_every_worker_that_fits(live):
    shown, _ = live
    shown.working("node1 GPU 0", "timing eager")
    shown.working("node1 GPU 1", "verifying triton")
    text = drawn(shown)
    assert "node1 GPU 0: timing eager" in text
    assert "node1 GPU 1: verifying triton" in text
    shown.working("node1 GPU 1", "")
    assert "node1 GPU 1" not in drawn(shown)
    for number in range(1000):
        shown.working(f"node{number:04}", "timing")
        shown.ended(cell_row(case(64 + number), FACTS, "error", "planted"))
    text = drawn(shown)
    assert len(text.splitlines()) <= 20
    assert "and 993 more workers" in text
    assert "1000 of 3 cells" in text


def test_a_log_says_who_measured_each_cell():
    console = Console(file=io.StringIO(), width=200)
    facts = RunFacts("a", "", ENVIRONMENT | {"worker": "node1 GPU 3"})
    with make_watcher(console, 2, []) as shown:
        shown.working("node1 GPU 0", "timing")
        shown.ended(cell_row(case(64), facts, "error", "planted"))
        shown.said("a [bold] word\x1b")
    first, second = console.file.getvalue().splitlines()
    assert first.startswith("[1/2] ")
    assert first.endswith("[node1 GPU 3]")
    assert second == r"a [bold] word\x1b"


def row(status="ok", impl="eager", seq=64, **changes):
    if status == "ok":
        made = timed_row(case(seq, impl), FACTS, Measurement("cpu", "warm", rounds(1.0)), 1e-6, None)
    else:
        made = cell_row(case(seq, impl), FACTS, status, "for a reason")
    return made | changes


@pytest.mark.parametrize(
    ("rows", "charts", "expected"),
    [
        ([row("wrong", "triton"), row("wrong", "hopper"), row()], True, "mtabench verify --impl triton,hopper"),
        ([row("oom", "eager"), row(impl="triton")], True, "mtabench memory --pass fwd --impl eager"),
        ([row("oom", driver="", cuda=""), row(), row(seq=128)], False, "mtabench plot 'a b.csv'"),
        ([row(), row(seq=128)], False, "mtabench plot 'a b.csv'"),
        ([row(), row(seq=128)], True, "mtabench report 'a b.csv'"),
        ([row(fraction_of_roofline=0.5)], True, "mtabench roofline 'a b.csv'"),
        ([row()], True, "mtabench show 'a b.csv'"),
    ],
)
def test_the_next_command_fits_what_was_measured(rows, charts, expected):
    assert next_command(rows, Path("a b.csv"), charts) == expected


def test_the_next_command_names_the_file_of_a_function_of_ones_own(monkeypatch):
    monkeypatch.setattr(advice, "typed_as", lambda name: f"./my files/{name.replace(':', '.py:')}")
    command = next_command([row("wrong") | {"impl": "mine:f"}], Path("a.csv"), True)
    assert command == "mtabench verify --impl './my files/mine.py:f'"


def test_what_cannot_run_is_told_once_an_implementation():
    against = {case(64): "no room", case(128): "no room", case(256): "less room", case(64, "triton"): "no GPU"}
    lines = [
        "eager cannot run 3 of these cells: no room (the first of 2 reasons)",
        "triton cannot run 1 of these cells: no GPU",
    ]
    assert reason_lines(against) == lines
    check_any([*against, case(64, "sdpa-math")], against)
    check_any([], {})
    with pytest.raises(NothingTimedError) as caught:
        check_any(list(against), against)
    assert str(caught.value) == f"nothing was measured: {'; '.join(lines)}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.csv", "a.csv"),
        ("a.CSV", "a.CSV"),
        ("a", "a"),
        ("a.json", "a.json (a CSV file)"),
        ("a.md", "a.md (a CSV file)"),
    ],
)
def test_a_file_with_the_name_of_another_kind_says_what_it_is(name, expected):
    assert named(Path(name)) == expected


def test_printing_goes_on_when_nobody_reads(capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        output = PipeTolerantWriter(closed)
        console = make_console(output)
        for _ in range(3):
            console.print("a line")
        output.flush()
        assert output.is_broken
        output.report("the results are in a.csv")
    assert capsys.readouterr().err == "mtabench: nobody read the output to its end; the results are in a.csv\n"


def test_nothing_is_told_where_everything_was_read(capsys):
    paper = io.StringIO()
    output = PipeTolerantWriter(paper)
    make_console(output).print("a line")
    output.report("the results are in a.csv")
    assert (paper.getvalue().strip(), capsys.readouterr().err) == ("a line", "")


@pytest.mark.parametrize("both", [False, True], ids=["head", "2>&1 head"])
def test_a_sweep_goes_on_when_head_has_seen_enough(tmp_path, both):
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'kernels'}"}
    words = "fwd --device cpu --impl eager --head-dim 16 --heads 2 --conv 3x3 --rounds 2 --seq 16,32,48 --no-plot"
    command = [sys.executable, "-m", "mtabench", *words.split(), "--out", "out.csv"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT if both else subprocess.PIPE, text=True,
        env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert process.stdout.readline() == "fwd sweep\n"
    process.stdout.close()
    err = "" if both else process.stderr.read()
    assert process.wait() == 0
    assert err == ("" if both else "mtabench: nobody read the output to its end; the results are in out.csv\n")
    assert (tmp_path / "out.csv").read_text().count("\n") == 4
