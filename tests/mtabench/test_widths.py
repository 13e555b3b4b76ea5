"""Tables on narrow terminals: nothing is cut, no line is too long, and every number of the wide table is there."""

import csv
import re
from pathlib import Path

import pytest
from command_line import make_runner
from rich.cells import cell_len
from rich.text import Text
from written_runs import case, rounds, write_run

from mtabench import tables
from mtabench.console import make_console, significant
from mtabench.prose import wrapped
from mtabench.tables import Column, as_columns, blocks, fitted, lines, print_prose

RESULTS = Path(__file__).parents[2] / "results" / "nvidia-h200"
LADDER = ("--impl", "ladder", "--op", "attention", "--dtype", "bf16")
WHOLE = {  # what is said in full at every width
    "explain": ("explain", "bwd", "--seq", "16k", "--device-name", "h200"),
    "explain-decode": ("explain", "decode", "--seq", "64k", "--device-name", "a100"),
    "memory": ("memory", "--device-name", "h200"),
    "memory-ladder": ("memory", *LADDER, "--device-name", "h200"),
    "list": ("list", "--device", "cpu"),
    "compare": ("compare", RESULTS / "gpus/fifth-1.csv", RESULTS / "gpus/fifth-2.csv"),
}
BY_RANK = {  # what leaves out columns and names them
    "show": ("show", RESULTS / "fwd.csv"),
    "roofline": ("roofline", RESULTS / "fwd.csv"),
    "roofline-decode": ("roofline", RESULTS / "decode.csv"),
}


@pytest.fixture
def at(monkeypatch, capsys, tmp_path):
    """Runs a command on a terminal of so many columns; its output."""

    def run(columns, words):
        code, out, err = make_runner(monkeypatch, capsys, tmp_path, columns)(*words)
        assert (code, err) == (0, ""), err
        return out

    return run


def words_of(out):
    """The words and numbers of an output, without the marks of its table's lines."""
    return set(out.split())


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("words", WHOLE.values(), ids=WHOLE)
def test_every_word_and_number_is_there_whole(at, words, columns):
    narrow, wide = at(columns, words), at(400, words)
    long = [line for line in narrow.splitlines() if cell_len(line) > columns]
    assert not any(" " in line.strip() for line in long)  # a path is one word, and stays whole
    assert "\u2026" not in narrow
    if words[0] == "compare":  # whose narrow form has words where a table has headings
        numbers = re.compile(r"[-+~]?\d[\d.]*")
        assert set(numbers.findall(wide)) <= {*numbers.findall(narrow), "4", "8", "16", "2"}  # 4k is 4096 there
    else:
        assert words_of(wide) == words_of(narrow)


@pytest.mark.parametrize("columns", [80, 40])
@pytest.mark.parametrize("words", BY_RANK.values(), ids=BY_RANK)
def test_what_is_left_out_is_named(at, words, columns):
    narrow = at(columns, words)
    assert max(map(cell_len, narrow.splitlines()[1:])) <= columns  # the first may be a path
    assert "\u2026" not in narrow
    assert f"left out for {columns} columns:" in " ".join(narrow.split())
    with open(words[1]) as file:
        times = [float(row["median_ms"]) for row in csv.DictReader(file) if row["status"] == "ok"]
    for ms in times:
        shown = {mark + significant(ms, zeros=zeros) for zeros in (False, True) for mark in ("", "~")}
        assert shown & words_of(narrow), ms


def test_a_comparison_says_once_what_all_cells_share(at, tmp_path):
    for name in ("base", "head"):
        cells = {case(seq, impl): rounds(1.0, seed=seq) for seq in (1024, 4096) for impl in ("eager", "triton")}
        write_run(tmp_path / f"{name}.csv", cells, run_id=name)
    out = at(80, ("compare", "base.csv", "head.csv"))
    assert out.splitlines()[0] == "all cells: fwd, fp32, batch 1, heads 2, head dim 16, conv 6x11"
    assert out.count("fp32") == out.count("6x11") == 1
    table = [line for line in out.splitlines() if re.match(r"(eager|triton) +[14]k ", line)]
    assert len(table) == 4
    assert all(line.endswith("same") for line in table)


def test_the_width_of_a_column_is_found_once_and_not_for_each_row(monkeypatch):
    """100,000 rows took hours: each of them measured all the others."""
    measured = []
    monkeypatch.setattr(tables, "_length", lambda text: measured.append(text) or len(text))
    assert len(list(lines(as_columns(("a", "b"), [("x", "1")] * 100)))) == 101
    assert len(measured) < 500


def test_columns_that_do_not_fit_go_into_blocks_below():
    columns = as_columns(["", *"abc"], [["row", "1234567", "2", "3"], ["other", "4", "5"]])
    assert [[one.heading for one in block] for block in blocks(columns, 16)] == [["", "a"], ["", "b", "c"]]
    assert [len(block) for block in blocks(columns, 1)] == [2, 2, 2]  # a block has a column, whatever the width
    assert [str(line) for line in lines(blocks(columns, 16)[1])] == ["       b  c", "row    2  3", "other  5"]


def test_rows_stand_below_what_they_share_and_styles_stay():
    columns = [
        Column("dim", ["64", "64", "128"], apart=True), Column("impl", ["eager", Text("a", "red"), "b"], 0, "left"),
        Column("ms", ["1.25", "2", "3"]), Column("less", ["x", "y", "z"], 1),
    ]  # fmt: skip
    above, kept, dropped = fitted(columns, 12)
    assert [[one.heading for one in some] for some in (above, kept, dropped)] == [["dim"], ["impl", "ms"], ["less"]]
    found = list(lines(kept, above))
    assert [str(line) for line in found] == [
        "impl     ms", "dim 64", "eager  1.25", "a         2", "", "dim 128", "b         3"
    ]  # fmt: skip
    assert [str(span.style) for span in found[3].spans] == ["red"]


def test_prose_breaks_between_words_only():
    assert wrapped("one twenty-two-characters /a/path/that/is/longer/than/the/line", 24, "[1] ") == [
        "[1] one", "    twenty-two-characters", "    /a/path/that/is/longer/than/the/line",
    ]  # fmt: skip
    assert wrapped("type `mtabench list` for all", 20) == ["type `mtabench list`", "for all"]
    assert wrapped("now type `mtabench list`", 20) == ["now type", "`mtabench list`"]
    assert wrapped("it is slower than it by 95 % of it", 26) == ["it is slower than it by", "95 % of it"]


def test_sentences_stay_whole_in_a_log(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    print_prose(make_console(), "word " * 100, "- ")
    assert len(capsys.readouterr().out.splitlines()) == 1
    monkeypatch.setenv("COLUMNS", "80")
    print_prose(make_console(), "word " * 100, "- ")
    assert len(capsys.readouterr().out.splitlines()) == 7
