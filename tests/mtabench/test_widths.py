"""Tables on narrow terminals: nothing is cut, no line is too long, and every number of the wide table is there."""

import re
from pathlib import Path

import pytest
from command_line import make_runner, printed
from rich.cells import cell_len
from rich.text import Text
from written_runs import case, rounds, write_run

from mtabench.prose import wrapped
from mtabench.tables import Column, fitted, lines

RESULTS = Path(__file__).parents[2] / "results" / "nvidia-h200"
LADDER = ("--impl", "ladder", "--op", "attention", "--dtype", "bf16")
WHOLE = {  # what is printed in full at every width
    "explain": ("explain", "bwd", "--seq", "16k", "--device-name", "h200"),
    "explain-decode": ("explain", "decode", "--seq", "64k", "--device-name", "a100"),
    "memory": ("memory", "--device-name", "h200"),
    "memory-ladder": ("memory", *LADDER, "--device-name", "h200"),
    "list": ("list", "--device", "cpu"),
    "compare": ("compare", RESULTS / "gpus/fifth-1.csv", RESULTS / "gpus/fifth-2.csv"),
}


@pytest.fixture
def at(monkeypatch, capsys, tmp_path):
    """Runs a command on a terminal of so many columns; its output."""

    def run(columns, words):
        return printed(make_runner(monkeypatch, capsys, tmp_path, columns)(*words))

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
