"""What is shown while a sweep runs and when it ends."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import written_runs
from command_line import ENVIRONMENT
from planted_sweeps import made_up_ceilings
from rich.console import Console
from written_runs import case, rounds

from mtabench.commands.show import print_rows
from mtabench.console import PipeTolerantWriter, make_console
from mtabench.measuring.timing import Measurement
from mtabench.results.outputs import named
from mtabench.results.results_file import key_of
from mtabench.results.rows import RunFacts, cell_row, timed_row
from mtabench.sweeps import table
from mtabench.sweeps.table import Watcher

FACTS = RunFacts("a", "2026-01-02T03:04:05Z", written_runs.ENVIRONMENT)
KEYS = [key_of(case(seq)) for seq in (64, 128, 256)]


def timed(seq):
    return timed_row(case(seq), FACTS, Measurement("cpu", "warm", rounds(1.0)), 1e-6, None)


def test_names_and_reasons_are_shown_as_they_are(monkeypatch, capsys):
    """A colon on each side makes a face of a word, elsewhere: `mine:ok:` is a name."""
    monkeypatch.setenv("COLUMNS", "120")
    console = make_console()
    row = cell_row(case(64), FACTS, "error", "no :star: [bold]here\x1b[31m") | {"impl": "mine:ok:new"}
    shown = Watcher(console, 1, [])
    shown.ended(row)
    print_rows(console, "fwd", [row, timed(128)])
    line, *table = capsys.readouterr().out.splitlines()
    assert line.endswith(r"  mine:ok:new: error: no :star: [bold]here\x1b[31m")
    assert any("mine:ok:new " in text for text in table)
    assert r"[1] no :star: [bold]here\x1b[31m" in table


def test_a_terminal_has_a_line_a_cell_and_a_bar_with_the_time_left_that_fits(monkeypatch):
    monkeypatch.setattr(table, "REDRAW_S", 0.0)
    paper = io.StringIO()
    console = Console(file=paper, width=80, height=20, force_terminal=True, color_system=None)
    with Watcher(console, 3, [], dict.fromkeys(KEYS, 30.0)) as shown:
        shown.doing("seq 64, eager: [bold]verifying")
        assert "0:00:00 -:--:-- seq 64, eager: [bold]verifying" in paper.getvalue()
        for seq in (64, 128):
            shown.ended(timed(seq))
        shown.working("node1 GPU 0", "timing eager")
        shown.refresh()
        assert re.search(r"0:00:0\d 0:00:0\d node1 GPU 0: timing eager", paper.getvalue())
        shown.ended(cell_row(case(512), FACTS, "unsupported", "planted"))  # nobody guessed that it would be measured
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", paper.getvalue())
    assert "[2/3] " in plain
    assert max(len(line) for line in re.split(r"[\r\n]+", plain) if "[" not in line[:1]) <= 80


def test_a_log_says_who_measured_each_cell_and_nothing_else():
    console = Console(file=io.StringIO(), width=200)
    facts = RunFacts("a", "", written_runs.ENVIRONMENT | {"worker": "node1 GPU 3"})
    with Watcher(console, 2, []) as shown:
        shown.doing("verifying")
        shown.working("node1 GPU 0", "timing")
        shown.ended(cell_row(case(64), facts, "error", "planted"))
        shown.said("a [bold] word\x1b")
    first, second = console.file.getvalue().splitlines()
    assert first.startswith("[1/2] ")
    assert first.endswith("[node1 GPU 3]")
    assert second == r"a [bold] word\x1b"


@pytest.mark.parametrize(("name", "expected"), [("a.CSV", "a.CSV"), ("a", "a"), ("a.json", "a.json (a CSV file)")])
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


def test_a_sweep_goes_on_when_head_has_seen_enough(tmp_path):
    """Of standard output and standard error."""
    made_up_ceilings(tmp_path)
    words = "fwd --device cpu --impl eager --head-dim 16 --heads 2 --conv 3x3 --rounds 2 --seq 16,32,48 --out out.csv"
    process = subprocess.Popen(
        [sys.executable, "-m", "mtabench", *words.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=ENVIRONMENT, cwd=tmp_path,
    )  # fmt: skip
    assert process.stdout.readline() == "fwd sweep\n"
    process.stdout.close()
    assert process.wait() == 0
    assert (tmp_path / "out.csv").read_text().count("\n") == 4
