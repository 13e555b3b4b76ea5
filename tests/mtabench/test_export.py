"""`mtabench export`: Markdown, LaTeX, Parquet, CSV for spreadsheets and JSON Lines."""

import csv
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import contents, refused
from hostile_cells import poison
from written_runs import case, rounds, write_run

from mtabench.commands.export import FORMATS
from mtabench.results.results_file import COLUMNS, read_file, read_results
from mtabench.results.writer import Writer

CELLS = {
    case(1024): rounds(2.0),
    case(1024, "triton"): rounds(0.5),
    case(1024, "sdpa-flash", taps=None): rounds(0.25),
    case(2048): ("oom", "needs 30 GiB"),
}


@pytest.fixture
def path(tmp_path):
    return write_run(tmp_path / "a.csv", CELLS)


def test_markdown_is_printed_and_written_alike(mtabench, path, tmp_path):
    code, out, err = mtabench("export", "a.csv")
    assert (code, err) == (0, "")
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert rows[0].startswith("| seq | impl | median \\[ms\\] | ± \\[%\\] |")
    assert rows[1].startswith("| ---: | --- | ---: | ---: |")
    assert len({row.count("|") for row in rows}) == 1
    assert len(rows) == 6
    assert out.splitlines()[-1] == "\\[1\\] needs 30 GiB"
    assert mtabench("export", "a.csv", "--out", "new/a.md") == (0, "new/a.md\n", "")
    assert (tmp_path / "new" / "a.md").read_text() == out


def test_a_torn_file_is_said_to_be_one(mtabench, path):
    path.write_text(path.read_text()[:-40])
    for command in ("export", "plot"):
        code, out, err = mtabench(command, "a.csv")
        assert (code, err) == (0, "a.csv ends in the middle of a row, which is left out\n")
        assert out


def test_latex_has_units_in_its_header_and_says_what_rows_share(mtabench, path):
    _, out, _ = mtabench("export", "a.csv", "--format", "latex")
    assert "seq & impl & median & $\\pm$ &" in out
    assert " &  & (ms) & (\\%) &" in out
    assert "\\caption{forward, fp32, batch 1, 2 heads" in out
    body = out[out.index("\\midrule") : out.index("\\bottomrule")].splitlines()[1:]
    assert [line.split(" & ")[:2] for line in body] == [
        ["1k", "eager"], ["1k", "triton"], ["1k", "sdpa{-}flash"], ["2k", "eager"],
    ]  # fmt: skip
    assert all(line.endswith(" \\\\") for line in body)


def test_parquet_is_typed_and_null_where_nothing_is_known(mtabench, path, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert mtabench("export", "a.csv", "--out", "a.parquet")[0] == 0
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.column_names == list(COLUMNS)
    types = {name: str(table.schema.field(name).type) for name in table.column_names}
    assert [types[name] for name in ("seq", "conv_q", "median_ms", "causal", "throttled")] == [
        "int64", "int64", "double", "bool", "bool",
    ]  # fmt: skip
    assert types["started_utc"].startswith("timestamp[")
    assert types["impl"].endswith("string")
    assert table["conv_q"].to_pylist() == [6, 6, None, 6]
    assert table["median_ms"].to_pylist()[3] is None
    assert table["reason"].to_pylist() == [None, None, None, "needs 30 GiB"]
    assert table["median_ms"].to_pylist()[:3] == read_results(path)["median_ms"].tolist()[:3]


def test_parquet_without_pyarrow_is_one_sentence(mtabench, path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(mtabench("export", "a.csv", "--out", "a.parquet"), "pip install 'mtabench[parquet]'")
    assert not (tmp_path / "a.parquet").exists()


def test_a_spreadsheet_gets_every_column_and_no_formula(mtabench, path, tmp_path):
    poison(path)
    assert mtabench("export", "a.csv", "--out", "sheet.csv")[0] == 0
    content = (tmp_path / "sheet.csv").read_bytes()
    assert content.startswith(b"\xef\xbb\xbfschema_version,")
    header, *lines = csv.reader(content.decode("utf-8-sig").splitlines())
    assert header == list(COLUMNS)
    texts = [row for row in read_file(path).rows()]
    assert any(text.startswith("=") for row in texts for text in row.values())
    for line, row in zip(lines, texts, strict=True):
        assert not [field for field in line if field.lstrip()[:1] in tuple("=+@-\t\r")]
        assert [field.removeprefix("'") for field in line] == [row[name] for name in COLUMNS]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("a.csv --out a.csv", "is one of the files that are read"),
        ("a.csv --out link.csv --overwrite", "is one of the files that are read"),
        ("a.csv --out a.samples.csv --overwrite", "is one of the files that are read"),
        ("a.csv --out there.md", "there.md already exists; give --overwrite"),
        ("a.csv --out a.html", "expected one of .md, .tex, .parquet, .csv"),
        ("a.csv --out a", "expected one of .md"),
        ("a.csv --out b.md --format latex", "--format latex is written to a file .tex, and --out is b.md"),
        ("a.csv --format parquet", "give --out FILE.parquet"),
        ("a.csv --format html", "expected one of markdown, latex, parquet, csv, jsonl"),
        ("a.csv --out a.csv/b.md", "cannot write a.csv/b.md"),
        ("a.csv --out folder.md", "is a folder"),
        ("a.csv --where impl=none --out b.md", "no row of a.csv has impl=none"),
        ("none.csv --out b.md", "there is no file none.csv"),
    ],
)
def test_bad_words_are_one_sentence_and_write_nothing(mtabench, path, tmp_path, words, sentence):
    (tmp_path / "there.md").write_text("precious")
    (tmp_path / "folder.md").mkdir()
    (tmp_path / "link.csv").symlink_to(path)
    before = contents(tmp_path)
    refused(mtabench("export", *words.split()), sentence)
    assert contents(tmp_path) == before


def test_what_a_link_names_is_replaced_and_the_link_stays(mtabench, path, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/there.md").write_text("old")
    (tmp_path / "link.md").symlink_to("folder/there.md")
    assert mtabench("export", "a.csv", "--out", "link.md")[0] == 2
    assert mtabench("export", "a.csv", "--out", "link.md", "--overwrite")[0] == 0
    assert (tmp_path / "link.md").is_symlink()
    assert (tmp_path / "folder/there.md").read_text().startswith("forward, fp32")


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
    assert not file.torn
    assert [row["repro"] for row in file.rows()] == [row["repro"] for row in expected]
    with Writer(path, resume=True) as writer:  # a sweep goes on behind the last row
        assert len(writer.done) == len(expected)
        writer.write([row | {"seq": "7"} for row in expected[:1]])
    assert len(read_file(path).rows()) == len(expected) + 1


def test_json_lines_have_a_typed_object_a_row(mtabench, path, tmp_path):
    assert mtabench("export", "a.csv", "--out", "new/a.jsonl") == (0, "new/a.jsonl\n", "")
    lines = (tmp_path / "new/a.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert list(rows[0]) == list(COLUMNS)
    assert (rows[0]["seq"], rows[0]["causal"], rows[0]["mix"], rows[0]["timer"]) == (1024, True, None, "cpu")
    assert (rows[3]["status"], rows[3]["median_ms"]) == ("oom", None)
    assert mtabench("export", "a.csv", "--format", "jsonl")[1].splitlines() == lines


def test_the_page_has_every_format():
    page = (Path(__file__).parents[2] / "docs/results.md").read_text()
    text = page.partition("<!-- formats -->")[2].partition("<!-- /formats -->")[0]
    assert re.findall(r"^\| `(.*?)` \| `(.*?)` \|", text, re.MULTILINE) == [
        (name, one.suffix) for name, one in FORMATS.items()
    ]


def test_a_pipe_gets_what_a_file_would_and_stays_a_pipe(mtabench, path, tmp_path):
    assert mtabench("export", "a.csv", "--out", "b.csv")[0] == 0
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    assert mtabench("export", "a.csv", "--out", "pipe.csv")[0] == 0
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.read(reader, 2**16) == (tmp_path / "b.csv").read_bytes()
    os.close(reader)


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex")
@pytest.mark.parametrize("hostile", [False, True])
def test_latex_compiles(mtabench, path, tmp_path, hostile):
    if hostile:
        poison(path)
    assert mtabench("export", "a.csv", "--out", "table.tex")[0] == 0
    (tmp_path / "doc.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\\input{table}\\end{document}"
    )
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "doc.tex"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
