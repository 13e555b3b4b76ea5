"""Files that may come from a stranger: read whole and checked, or refused in one sentence; nothing in between."""

import os
import signal
from functools import partial

import pandas as pd
import pytest
from command_line import refused
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from written_runs import case, rounds, write_run

from mtabench.charts import draw
from mtabench.dashboard.data import write_site
from mtabench.errors import UsageError
from mtabench.git import SITE_MARKER
from mtabench.measuring.ceilings import PLACE, keep_ceilings
from mtabench.results import results_file as results
from mtabench.results import runs
from mtabench.results.results_file import (
    COLUMNS,
    read_file,
    read_results,
    samples_path,
)
from mtabench.results.rows import RunFacts, cell_row
from mtabench.results.runs import read_run
from mtabench.results.writer import Writer

CELLS = {case(64): rounds(1.0, count=2), case(128): rounds(2.0, count=2), case(256): ("oom", "no room")}
FACTS = RunFacts("abc", "2026-01-02T03:04:05Z", {})
PIECES = (
    b"", b"\0", b"\xff", b"\xef\xbb\xbf", b'"', b",", b"\n", b"\r", b"\r\n", b"1e999", b"nan", b"-1", b"1_000", b"0x10",
    b"9" * 5000, b"1e300", "\u0665".encode(), b"inf", b"\x1b[31m", "\u202e".encode(), b"seq", b"auto", b"," * 300,
    b"a" * 140_000, b"2026-02-30T00:00:00Z", b"\x1a", b"=1+1",
)  # fmt: skip


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """The bytes of a results file and of its samples."""
    path = write_run(tmp_path_factory.mktemp("valid") / "a.csv", CELLS)
    return path.read_bytes(), samples_path(path).read_bytes()


@pytest.fixture(autouse=True)
def no_hang():
    """A file that takes a minute to refuse is one that hangs."""

    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def reads_or_refuses(path):
    for read in (read_file, read_results, read_run):
        sentence = ""
        try:
            read(path)
        except UsageError as error:
            sentence = str(error)
        assert sentence.isprintable()
        assert len(sentence) < 1000


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.binary(max_size=100))
@example(b"\n", b"")
@example(b"\xef\xbb\xbf", b"")
@example(b'"', b'"')
def test_any_bytes_are_refused_in_a_sentence(tmp_path, content, samples):
    path = tmp_path / "any.csv"
    path.write_bytes(content)
    samples_path(path).write_bytes(samples)
    reads_or_refuses(path)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_any_piece_changed_is_read_or_refused_in_a_sentence(tmp_path, valid, data):
    """A piece of a good file, or of its samples, or a field of it, gives way to something nasty."""
    contents = list(valid)
    which = data.draw(st.integers(0, 1))
    content = contents[which]
    bounds = [i for i, byte in enumerate(content) if byte in b",\n"]
    field = data.draw(st.integers(0, len(bounds) - 2))
    start, end = (
        (bounds[field] + 1, bounds[field + 1])
        if data.draw(st.booleans())
        else sorted(data.draw(st.integers(0, len(content))) for _ in range(2))
    )
    contents[which] = content[:start] + data.draw(st.sampled_from(PIECES) | st.binary(max_size=20)) + content[end:]
    path = tmp_path / "changed.csv"
    path.write_bytes(contents[0])
    samples_path(path).write_bytes(contents[1])
    reads_or_refuses(path)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.floats(1e-99, 1e99), st.floats(allow_nan=True, allow_infinity=True).filter(lambda x: not 0 < abs(x) < 1e-99),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
)  # fmt: skip
def test_whatever_is_written_is_read_again(tmp_path, ms, error, text):
    path = tmp_path / "out.csv"
    for old in (path, samples_path(path)):
        old.unlink(missing_ok=True)
    if abs(error) > 1e99 or error < 0:
        error = float("inf")
    with Writer(path) as writer:
        writer.write([cell_row(case(), FACTS, "error", text) | {"median_ms": ms, "rel_error": error, "device": text}])
        (done,) = writer.done.values()
    (row,) = read_file(path).rows()
    assert row == done


def changed(path, column, value, row=0):
    """Write something else into one field."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    table.loc[row, column] = value
    table.to_csv(path, index=False)


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("seq", "1e300", "a whole number from 1 on"),
        ("seq", "9" * 5000, "a whole number from 1 on"),
        ("seq", "0", "a whole number from 1 on"),
        ("seq", "1_000", "a whole number from 1 on"),
        ("seq", "\u0665", "a whole number from 1 on"),
        ("conv_q", "6.5", "a whole number from 1 on"),
        ("median_ms", "-1", "a number from 1e-100 to 1e+100"),
        ("median_ms", "0", "a number from 1e-100 to 1e+100"),
        ("median_ms", "1e999", "a number from 1e-100 to 1e+100"),
        ("speedup", "inf", "a number that is 0 or from 1e-100 to 1e+100"),
        ("speedup", "nan", "a number that is 0 or from"),
        ("speedup", "0x10", "a number that is 0 or from"),
        ("speedup", " 1", "a number that is 0 or from"),
        ("pass", "::error::", "fwd, bwd, decode"),
        ("status", "fine", "ok, unsupported"),
        ("causal", "yes", "true or false"),
        ("splits", "many", "auto, or a whole number"),
        ("page_size", "100", "16, 32, 64, 128, 256"),
        ("norm", "soft", "rms, none, or depth and"),
        ("gate", "soft", "expected one"),
        ("started_utc", "2026-02-30T00:00:00Z", "a time in UTC"),
        ("git_sha", "javascript:alert(1)", "hexadecimal"),
        ("schema_version", "1\x1b[2J", "schema version 1\\x1b[2J in line 2"),
    ],
)
def test_a_field_that_does_not_belong_is_named_with_its_line(mtabench, tmp_path, column, value, expected):
    changed(write_run(tmp_path / "a.csv", CELLS), column, value)
    refused(mtabench("show", "a.csv"), "line 2", expected, *([] if column == "schema_version" else [column]))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x: x.replace(b"seq", b"impl", 1), "two columns that are called 'impl'"),
        (lambda x: b"\n" + x, "first line is empty"),
        (lambda x: x.replace(b"no room", b"no\0room"), "byte 0"),
        (lambda x: x.replace(b"no room", b"no\xffroom"), "not text in UTF-8"),
        (lambda x: x.replace(b"no room", b'"no room'), "cannot read line 4 of a.csv as CSV"),
        (lambda x: x.replace(b"some, device", b'"x', 1), "cannot read line"),
        (lambda x: x.replace(b"no room", b'"no\nroom"'), "a quote that does not end"),
        (lambda x: x.replace(b"no room", b"x" * 140_000), "field larger than field limit"),
        (lambda x: x.replace(b"no room", b"x," * 600_000), "longer than 1000000 bytes"),
        (lambda x: x.replace(b"\n", b"," * 300 + b"\n", 1), "columns; expected at most 256"),
        (lambda x: x + b"1,2\n", "has 2 fields, and its header"),
        (lambda x: x.decode().encode("utf-16"), "cannot read"),
    ],
)
def test_what_is_no_results_file_is_refused(mtabench, tmp_path, change, sentence):
    path = write_run(tmp_path / "a.csv", CELLS)
    path.write_bytes(change(path.read_bytes()))
    refused(mtabench("show", "a.csv"), sentence)


@pytest.mark.parametrize("folder", [".", "/"])
@pytest.mark.parametrize(
    "words",
    [
        ("show", "{}"), ("report", "{}"), ("plot", "{}"), ("roofline", "{}"),
        ("compare", "{}", "a.csv"), ("results", "merge", "{}", "a.csv", "--out", "b.csv"),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_folder_is_no_file(mtabench, tmp_path, words, folder):
    write_run(tmp_path / "a.csv", {case(): rounds(1.0)})
    refused(mtabench(*(word.format(folder) for word in words)), folder)


def test_sizes_are_bounded(mtabench, tmp_path, monkeypatch):
    path = write_run(tmp_path / "a.csv", CELLS)
    other = write_run(tmp_path / "b.csv", CELLS, run_id="b")
    monkeypatch.setattr(runs, "MOST_SAMPLES", 39)
    refused(mtabench("compare", path, other), "a.samples.csv has more than 39 rows")
    monkeypatch.setattr(results, "MOST_ROWS", 2)
    refused(mtabench("show", "a.csv"), "a.csv has more than 2 rows")
    monkeypatch.setattr(results, "MOST_BYTES", 1 << 10)
    refused(mtabench("show", "a.csv"), "a.csv is larger than 0 MiB")


def test_what_never_ends_is_not_read(mtabench, tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    for name in ("pipe.csv", "zero.csv"):
        refused(mtabench("show", name), "not a regular file")
    refused(mtabench("show", "."), ". is a folder; give the name of a results file in it")


def test_what_spreadsheets_and_pandas_make_of_a_file_is_understood(tmp_path):
    path = write_run(tmp_path / "a.csv", CELLS)
    before = read_file(path).rows()
    text = path.read_text().replace(",true,", ",TRUE,").replace(",6,11,", ",6.0,11.0,").replace("\n", "\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    samples = samples_path(path)
    samples.write_text(samples.read_text().replace(",1,1,", ",1.0,1,"))
    assert read_file(path).rows() == before
    assert len(read_run(path).cells) == 3


def test_what_a_terminal_would_obey_is_visible_wherever_a_file_is_read(tmp_path):
    path = write_run(tmp_path / "a.csv", CELLS)
    changed(path, "impl", "a\x1b[31m\u202eb\x9b\u2028\t")
    shown = "a\\x1b[31m\\u202eb\\x9b\\u2028\\t"
    assert read_results(path)["impl"][0] == shown
    samples = samples_path(path).read_text().replace("/eager/", "/a\x1b[31m\u202eb\x9b\u2028\t/")
    samples_path(path).write_text("\n".join(line for line in samples.split("\n") if "/128/" not in line))
    changed(path, "status", "oom", row=1)
    assert next(iter(read_run(path).cells.values())).rounds  # row and samples still find each other


COMMANDS = (
    ("show", "a.csv"),
    ("show", "a.csv", "--markdown"),
    ("results", "select", "a.csv", "--where", "status=ok", "--out", "new.csv"),
    ("results", "merge", "a.csv", "b.csv", "--latest", "--out", "new.csv"),
    ("compare", "a.csv", "b.csv"),
    ("compare", "a.csv", "b.csv", "--format", "markdown"),
)


HOSTILE = {
    "impl": "::stop-commands::x\x1b]8;;http://evil.example\x07",
    "device": "[red]x[/nothing] ##[add-path]/evil",
    "reason": "\x1b[2J ::error::fake\u202e",
}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("actions", [False, True])
def test_hostile_values_stay_text_in_every_command(mtabench, tmp_path, monkeypatch, words, actions):
    if actions:
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
    for name, ms in (("a.csv", 1.0), ("b.csv", 1.5)):
        started = f"2026-01-0{ms * 2:.0f}T03:04:05Z"
        path = write_run(tmp_path / name, {case(64): rounds(ms), case(128): ("oom", "")}, run_id=name, started=started)
        for column, value in HOSTILE.items():
            for row in (0, 1):
                changed(path, column, value, row)
        samples = samples_path(path).read_text()
        samples_path(path).write_text(samples.replace("/eager/", f"/{HOSTILE['impl']}/"))
    code, out, err = mtabench(*words)
    assert (code, err) == (1 if words[0] == "compare" else 0, "")
    assert "\x1b" not in out
    assert all(line.isprintable() for line in out.split("\n"))
    if actions:
        commands = [line for line in out.splitlines() if line.lstrip().startswith("::") or "##[" in line]
        assert len(commands) == (words[0] == "compare")
        assert all(line.startswith("::error title=mtabench%3A slower::fwd ") for line in commands)


def test_a_sentence_about_a_hostile_file_is_one_printable_line(mtabench, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    (tmp_path / "##[error]\x1b[2J.csv").write_text(",".join(COLUMNS) + "\n" + "\x1b##[x]" * 20 + "\n")
    code, out, err = mtabench("show", "##[error]\x1b[2J.csv")
    assert (code, out) == (2, "")
    assert err.rstrip("\n").isprintable()
    assert "##[" not in err


def test_what_a_link_leads_to_is_not_written(tmp_path):
    """A checkout of a stranger may have links where pages, charts and ceilings go."""
    theirs, folder = tmp_path / "theirs", tmp_path / "site"
    run = write_run(tmp_path / "a.csv", CELLS)
    chart = partial(draw, [run], tmp_path / "charts", ["time"], formats=["svg"])
    names = {path.name for path in chart()}
    assert names
    kept = {folder / SITE_MARKER, folder / "a.json", tmp_path / "kept"}
    places = {tmp_path / "charts" / name for name in names} | kept
    folder.mkdir()
    theirs.write_text("[]")
    for place in places:
        place.unlink(missing_ok=True)
        place.symlink_to(theirs)
    chart()
    write_site(folder, {"a.json": "ours"})
    keep_ceilings(tmp_path / "kept", dict.fromkeys(PLACE, "x"), {})
    assert theirs.read_text() == "[]"
    assert not any(place.is_symlink() for place in places)
