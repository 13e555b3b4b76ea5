"""`mtabench show`: what is in the table, how it fits, and which rows are in it."""

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ENVIRONMENT, printed, refused
from rich.cells import cell_len
from written_runs import case, rounds, write_run

from mtabench.results.results_file import read_file
from mtabench.results.writer import Writer

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "results" / "nvidia-h200").glob("[bdf]*.csv"))
KEPT = [path for path in FILES if path.read_text().startswith("schema_version,")]  # others are no sweep's
CELLS = {
    case(1024): rounds(2.0, count=4),
    case(1024, "triton"): rounds(0.5, count=4),
    case(2048): ("oom", "needs 30 GiB of memory, and 20 GiB are free"),
    case(2048, "triton"): rounds(1.0, count=4),
}


@pytest.fixture
def path(tmp_path):
    return write_run(tmp_path / "a.csv", CELLS)


def table(out):
    """The lines of the table by their first words, and its header."""
    lines = out.split("\n")
    start = next(i for i, line in enumerate(lines) if "median" in line or "status" in line)
    return lines[start], [line.split() for line in lines[start + 1 :] if line.strip()[:1].isdigit()]


def test_what_all_rows_share_is_said_once(mtabench, path):
    out = printed(mtabench("show", "a.csv"))
    assert "a.csv: 4 cells: 3 ok, 1 oom" in out
    assert "forward · fp32 · batch 1 · 2 heads · head dim 16 · conv 6x11 · causal · warm cache · timer cpu" in out
    facts = ("some, device", "driver 1.2", "CUDA 13.0", "torch 2.13.0", "triton 3.6.0", "2026-01-02T03:04:05Z")
    places = [out.index(fact) for fact in facts]
    assert places == sorted(places)
    header, rows = table(out)
    assert header.split()[:3] == ["seq", "impl", "median"]
    assert [row[:2] for row in rows] == [["1k", "eager"], ["1k", "triton"], ["2k", "eager"], ["2k", "triton"]]


def test_medians_intervals_status_and_reasons(mtabench, path):
    _, out, _ = mtabench("show", "a.csv")
    _, rows = table(out)
    assert [row[-1] for row in rows] == ["ok", "ok", "[1]", "ok"]
    assert rows[2] == ["2k", "eager", "oom", "[1]"]
    assert float(rows[0][2]) == pytest.approx(2.0, rel=0.01)
    assert 0 < float(rows[0][3]) < 5  # percent
    assert "[1] needs 30 GiB of memory, and 20 GiB are free" in out


def test_columns_appear_where_rows_differ(mtabench, tmp_path):
    other = {"driver": "9.9", "device": "other"}
    write_run(tmp_path / "b.csv", {case(1024, head_dim=32, kv_heads=1): rounds(1.0)}, run_id="b", **other)
    write_run(tmp_path / "a.csv", CELLS)
    assert mtabench("results", "merge", "a.csv", "b.csv", "--out", "c.csv")[0] == 0
    _, out, _ = mtabench("show", "c.csv")
    assert table(out)[0].split()[:8] == ["device", "KV", "heads", "head", "dim", "driver", "seq", "impl"]
    assert "some, device" not in out.split("\n\n")[0]


@pytest.mark.parametrize(
    ("kept", "width"), [*((path, 60) for path in KEPT), *((path, 200) for path in KEPT[::6])],
    ids=lambda one: getattr(one, "name", one),
)  # fmt: skip
def test_results_of_the_repository_fit_and_lose_no_row(mtabench, monkeypatch, kept, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = printed(mtabench("show", kept))
    lines = out.split("\n")
    assert max(cell_len(line) for line in lines[1:]) <= width  # the first has the path
    assert len(table(out)[1]) == len(kept.read_text().splitlines()) - 1
    assert ("left out for" in out) == (width < (200 if kept.name == "decode-pages.csv" else 180))  # it has six axes


def test_a_torn_row_is_left_out_and_said(mtabench, path):
    path.write_bytes(path.read_bytes()[:-20])
    out = printed(mtabench("show", "a.csv"))
    assert "the file ends in the middle of a row, which is left out" in out
    assert len(table(out)[1]) == 3


def test_where_and_sort_choose_and_order_rows(mtabench, path):
    _, out, _ = mtabench("show", "a.csv", "--where", "impl=triton,seq=1k..2k", "--sort", "-median_ms")
    assert [row[:2] for row in table(out)[1]] == [["2k", "triton"], ["1k", "triton"]]
    assert "2 cells, all ok; 4 in the file" in out
    _, out, _ = mtabench("show", "a.csv", "--sort", "median_ms")
    assert [row[1] for row in table(out)[1]] == ["triton", "triton", "eager", "eager"]  # no time comes last
    _, out, _ = mtabench("show", "a.csv", "--where", "status!=ok")
    assert len(table(out)[1]) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("none.csv", "there is no file none.csv"),
        ("a.csv --where seq", "cannot read 'seq'; expected conditions such as"),
        ("a.csv --where sequence=1k", "no column 'sequence'; did you mean seq?"),
        ("a.csv --sort -med", "--sort has no column 'med'; did you mean median_ms?"),
        ("a.csv --where speedup=2", "speedup is measured"),
        ("a.csv --where seq=64k", "no row of a.csv has seq=64k; in the column seq they have 1k, 2k"),
        ("a.csv --where seq=1k --where impl=tirton", "among those that the conditions before it keep"),
        ("a.csv --where conv=6x", "cannot read '6x'"),
    ],
)
def test_bad_words_are_one_sentence(mtabench, path, words, sentence):
    refused(mtabench("show", *words.split()), sentence)


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_pipe_has_no_colours_and_what_its_encoding_has(tmp_path, path, encoding):
    path.write_text(path.read_text().replace("some, device", "Gerät 中"), encoding="utf-8")
    environment = ENVIRONMENT | {"PYTHONIOENCODING": encoding, "COLUMNS": "60"}
    words = [sys.executable, "-m", "mtabench", "show", str(path)]
    done = subprocess.run(words, capture_output=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode(encoding)
    assert "\x1b" not in out
    assert ("Gerät 中" if encoding == "utf-8" else "Ger\\xe4t \\u4e2d") in out
    assert max(map(len, out.split("\n")[1:])) <= 60


def calls(run):
    """How many functions of Python and C are called meanwhile."""
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "words",
    [("show",), ("show", "--json"), ("compare",), ("compare", "--format", "json"), ("compare", "--format", "markdown")],
    ids=" ".join,
)
def test_work_grows_as_the_rows_do(mtabench, tmp_path, words):
    """Twice as many rows more take twice as much more, by calls and not by time; four times if it is quadratic."""
    command, *options = words
    found = []
    for count in (12, 12, 24, 48):  # the first one imports what it needs
        files = [tmp_path / f"{name}-{count}.csv" for name in ("base", "head")[: 1 + (command == "compare")]]
        for seed, file in enumerate(files):
            if not file.exists():  # of noisy times, which are unclear
                cells = {case(64 * i): rounds(1.0, 0.3, count=2, seed=seed + 2 * i) for i in range(1, count + 1)}
                write_run(file, cells, run_id=file.stem)
        found.append(calls(lambda files=files: mtabench(command, *files, *options)))
    _, one, two, four = found
    assert two - one > 0
    assert four - two < 2.5 * (two - one)


def test_markdown_has_the_same_table_and_says_that_a_file_is_torn(mtabench, path):
    out = printed(mtabench("show", "a.csv", "--markdown"))
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert rows[0].startswith("| seq | impl | median \\[ms\\] | ± \\[%\\] |")
    assert rows[1].startswith("| ---: | --- | ---: | ---: |")
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) == 6
    assert out.splitlines()[-1] == "\\[1\\] needs 30 GiB of memory, and 20 GiB are free"
    path.write_text(path.read_text()[:-40])
    for words in (("show", "a.csv", "--markdown"), ("plot", "a.csv")):
        code, out, err = mtabench(*words)
        assert (code, err) == (0, "a.csv ends in the middle of a row, which is left out\n")
        assert out


@pytest.mark.parametrize("as_saved", [
    lambda text: b"\xef\xbb\xbf" + text,
    lambda text: text.replace(b"\n", b"\r\n"),
    lambda text: text.rstrip(b"\n"),
    lambda text: text + b"\r\n\n",
], ids=["mark", "crlf", "no end", "empty lines"])  # fmt: skip
def test_files_are_read_as_other_editors_save_them(path, as_saved):
    expected = read_file(path).rows()
    path.write_bytes(as_saved(path.read_bytes()))
    file = read_file(path)
    assert len(set(map(id, file.columns["device"]))) == 1, "equal texts far apart in memory slow all that reads them"
    assert not file.torn
    assert [row["repro"] for row in file.rows()] == [row["repro"] for row in expected]
    with Writer(path, resume=True) as writer:  # a sweep goes on behind the last row
        assert len(writer.done) == len(expected)
        writer.write([row | {"seq": "7"} for row in expected[:1]])
    assert len(read_file(path).rows()) == len(expected) + 1
