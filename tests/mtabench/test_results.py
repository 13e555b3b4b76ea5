"""Results files: whole rows, one writer, one schema."""

import errno
import fcntl
import itertools
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from changed_cases import with_changes

from mta_kernels.operation import Operation
from mta_kernels.plan import H200
from mtabench.errors import MtabenchError, UsageError
from mtabench.prediction import plans
from mtabench.problem.case import Case
from mtabench.results.columns import TABLE
from mtabench.results.outputs import FileLock
from mtabench.results.results_file import (
    COLUMNS,
    SAMPLE_COLUMNS,
    key_of,
    read_results,
    samples_path,
)
from mtabench.results.rows import RunFacts, cell_row
from mtabench.results.writer import Writer, check_destination

ROOT = Path(__file__).parents[2]
FACTS = RunFacts("abc123", "2026-01-02T03:04:05Z", {"device": "some, device", "torch": "2.13.0", "git_dirty": "false"})
# suite.md's list of columns up to version 1.4 of the schema, word for word
DOCUMENTED_COLUMNS = (
    "schema_version, run_id, started_utc, pass, impl, op, dtype, batch, heads, kv_heads, seq, head_dim, conv_q, "
    "conv_k, causal, splits, splits_used, status, reason, rounds, samples, median_ms, p10_ms, p90_ms, ci95_low_ms, "
    "ci95_high_ms, baseline, speedup, useful_tflops, executed_tflops, gbytes_s, fraction_of_roofline, "
    "peak_memory_mb, rel_error, timer, cache, sm_clock_mhz, throttled, energy_j, tokens_per_joule, ci_target, "
    "run_delay, read_gbytes_s, device, worker, driver, cuda, "
    "torch, triton, mtabench, git_sha, git_dirty, repro"
)


def case(seq=64, impl="eager", **changes):
    base = Case("fwd", impl, Operation.of((6, 11), 16), "fp32", 1, 2, 2, seq, 16, None, "cpu")
    return with_changes(base, **changes)


def row(seq=64, status="ok", reason="", **values):
    return cell_row(case(seq), FACTS, status, reason) | values


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_columns_are_the_documented_ones_in_order():
    assert ", ".join(column.name for column in TABLE if column.since <= 4) == DOCUMENTED_COLUMNS
    assert tuple(column.name for column in TABLE) == COLUMNS


def test_rows_come_back_as_written(tmp_path):
    path = tmp_path / "new" / "folder" / "out.csv"
    with Writer(path) as writer:
        writer.write([row(median_ms=1.25, speedup=2.0, throttled=None)])
        writer.write([row(128, "error", 'bad,\n"quoted" thing', median_ms=float("nan"), p10_ms=float("inf"))])
    table = read_results(path)
    assert list(table.columns) == list(COLUMNS)
    assert table["seq"].tolist() == [64, 128]
    assert table["median_ms"][0] == 1.25
    assert pd.isna(table["median_ms"][1])
    assert table["causal"].tolist() == [True, True]
    assert table["reason"].tolist() == ["", 'bad, "quoted" thing']
    assert table["device"].tolist() == ["some, device"] * 2
    assert table["repro"][0] == case().repro()
    text = path.read_text()
    assert "nan" not in text.lower()
    assert "inf" not in text.lower()
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize(
    ("impl", "page_size", "used"),
    [("triton", None, 13), ("triton", 16, 13), ("cuda", None, 4), ("cuda-conv", None, 13)],
)
def test_splits_are_those_of_the_plan_where_a_kernel_ran(monkeypatch, impl, page_size, used):
    monkeypatch.setattr(plans, "gpu_like", lambda device: H200)
    base = case(pass_="decode", impl=impl, seq=4096, dtype="bf16", batch=20, page_size=page_size, device="cuda")
    auto, three = replace(base, splits="auto"), replace(base, splits=3)
    assert (cell_row(three, FACTS, "ok")["splits_used"], plans.splits_of(three)) == (3, 3)
    assert cell_row(auto, FACTS, "wrong")["splits_used"] == used
    assert cell_row(auto, FACTS, "unsupported")["splits_used"] is None
    assert cell_row(replace(auto, device="cpu"), FACTS, "ok")["splits_used"] is None
    assert cell_row(case(pass_="decode"), FACTS, "ok")["splits_used"] is None


def test_without_locks_a_process_that_runs_is_one(tmp_path, monkeypatch):
    """As on Lustre, and on some NFS."""

    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    path, side = tmp_path / "out.csv", tmp_path / ".out.csv.lock"
    for number in (64, 128):
        with Writer(path, resume=number > 64) as writer:
            writer.write([row(number)])
    assert len(read_results(path)) == 2
    with subprocess.Popen(["sleep", "60"]) as other:
        holder = {"pid": other.pid, "host": platform.node(), "command": "mtabench fwd", "since": "today"}
        side.write_text(json.dumps(holder))
        with pytest.raises(UsageError, match=rf"process {other.pid} .*no locks: if it has ended, remove .*lock\)"):
            check_destination(path, resume=True)
        other.kill()
    check_destination(path, resume=True)
    side.write_text(json.dumps(holder | {"host": "elsewhere"}))
    with pytest.raises(UsageError, match="is being written by"):
        Writer(path, resume=True)


@pytest.mark.parametrize("keep", [1, 10, 200, 3])
def test_a_torn_last_line_is_dropped_on_resume(tmp_path, keep):
    path = tmp_path / "out.csv"
    with Writer(path) as writer:
        writer.write([row(64), row(128)], [("abc123", "cell", 1, 1, 0.5)])
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    path.write_bytes(whole[: last + keep])
    samples_path(path).write_bytes(samples_path(path).read_bytes() + b"abc123,cell,1,2")
    assert read_results(path)["seq"].tolist() == [64]
    with Writer(path, resume=True) as writer:
        assert set(writer.done) == {key_of(case(64))}
        writer.write([row(128)])
    assert path.read_bytes().count(b"\n") == 3
    assert read_results(path)["seq"].tolist() == [64, 128]
    assert samples_path(path).read_text().endswith("0.5\n")


@pytest.mark.parametrize("kept", [0, 5, 40])
def test_a_torn_header_is_written_anew(tmp_path, kept):
    path = tmp_path / "out.csv"
    headers = {path: ",".join(COLUMNS), samples_path(path): ",".join(SAMPLE_COLUMNS)}
    for one, header in headers.items():
        one.write_text(header[:kept])
    with Writer(path, resume=True) as writer:
        writer.write([row()])
    assert len(read_results(path)) == 1
    assert [one.read_text().splitlines()[0] for one in headers] == [*headers.values()]


def write_table(path, rows, columns=COLUMNS):
    pd.DataFrame(rows, columns=[*columns]).to_csv(path, index=False)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: write_table(path, [row(schema_version=2)]), "schema version 2"),
        (lambda path: write_table(path, [row()], [c for c in COLUMNS if c != "speedup"]), "no column speedup"),
        (lambda path: path.write_text("a,b\n1,2\n"), "no column schema_version"),
        (lambda path: path.write_text(",".join(COLUMNS) + "\n1,2\n"), "line 2"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00binary\n"), "cannot read"),
    ],
)
def test_a_file_of_another_schema_is_refused_and_left_alone(tmp_path, damage, words):
    path = tmp_path / "other.csv"
    damage(path)
    before = path.read_bytes()
    for attempt in (read_results, lambda p: Writer(p, resume=True), lambda p: check_destination(p, True)):
        with pytest.raises(UsageError, match=words) as caught:
            attempt(path)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert files_in(tmp_path) == ["other.csv"]


def test_resume_refuses_columns_that_it_would_not_write(tmp_path):
    path = tmp_path / "more.csv"
    write_table(path, [row()], [*COLUMNS, "note"])
    assert len(read_results(path)) == 1
    with pytest.raises(UsageError, match="other columns"):
        Writer(path, resume=True)


def test_a_full_disk_is_a_sentence_and_keeps_whole_rows(tmp_path, monkeypatch):
    path = tmp_path / "out.csv"
    with Writer(path) as writer:
        writer.write([row()])
        before = path.read_bytes()

        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(MtabenchError, match="No space left"):
            writer.write([row(128)])
        assert path.read_bytes() == before


HOLD = """
import sys, time
from pathlib import Path
from mtabench.results.writer import Writer
with Writer(Path(sys.argv[1]), command="mtabench fwd --seq 1k"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path/out.csv."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out.csv")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | {"PYTHONPATH": ".:kernels"})
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_lock_ends_with_its_holder(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert (tmp_path / ".out.csv.lock").exists()
    with Writer(tmp_path / "out.csv", resume=True) as writer:
        writer.write([row()])
        assert json.loads((tmp_path / ".out.csv.lock").read_text())["pid"] == os.getpid()
    assert files_in(tmp_path) == ["out.csv", "out.samples.csv"]


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_not_believed(tmp_path, monkeypatch):
    first, second = FileLock(tmp_path / "out.csv"), FileLock(tmp_path / "out.csv")
    first.acquire("first")
    opened = os.open

    def open_then_release(*args, **kwargs):
        descriptor = opened(*args, **kwargs)
        first.release()  # between the opening and the locking: the descriptor is of a removed file
        return descriptor

    monkeypatch.setattr(os, "open", open_then_release)
    second.acquire("second")
    monkeypatch.undo()
    with pytest.raises(UsageError, match="second"):
        FileLock(tmp_path / "out.csv").acquire("third")
    second.release()


SAMPLE = ("run", "cell", 1, 1, 0.5)


def hard_link(path, other):
    other.hardlink_to(path)


def soft_link(path, other):
    other.symlink_to(path)


@pytest.mark.parametrize("link", [hard_link, soft_link])
@pytest.mark.parametrize("resume", [True, False])
def test_a_file_that_is_written_is_refused_under_each_of_its_names(tmp_path, holder, link, resume):
    link(tmp_path / "out.csv", tmp_path / "other.csv")
    who = rf"process {holder.pid} \(mtabench fwd --seq 1k\) since 20\d\d-"
    for attempt, (name, by) in itertools.product(
        (Writer, check_destination), {"out.csv": who, "other.csv": ""}.items()
    ):
        with pytest.raises(UsageError, match=f"{name} is being written by {by}"):
            attempt(tmp_path / name, resume=resume)


def test_runs_do_not_share_samples(tmp_path):
    for first, second in (("run", "run.csv"), ("run2.csv", "run2")):
        Writer(tmp_path / first).close()
        with pytest.raises(
            UsageError, match=f"{second} would share .*samples.csv with the run .*{first}; give another"
        ):
            Writer(tmp_path / second)
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    Writer(tmp_path / "tool.csv").close()


@pytest.mark.parametrize("name", [".out.csv.lock", "out.csv", "out.samples.csv"])
def test_a_link_in_the_place_of_what_a_sweep_writes_changes_no_other_file(tmp_path, name):
    """As a checkout of a stranger may bring them; one that leads nowhere would make a file there."""
    other = tmp_path / "somebody/else"
    other.parent.mkdir()
    (tmp_path / name).symlink_to(other)
    for content in (None, "theirs\n"):
        if content:
            other.write_text(content)
        with pytest.raises(UsageError, match=r"link|is not a|already exists|not a samples"):
            Writer(tmp_path / "out.csv")
        assert (other.read_text() if content else other.exists()) == (content or False)


def replaced(path):
    path.with_name("edited").write_bytes(path.read_bytes())
    path.with_name("edited").replace(path)


HARMS = {
    "removed": Path.unlink,
    "replaced": replaced,
    "shortened": lambda path: path.write_bytes(path.read_bytes()[:-3]),
}


@pytest.mark.parametrize("of", ["out.csv", "out.samples.csv"])
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_file_that_is_taken_away_while_it_is_written_is_said(tmp_path, harm, of, at_the_end):
    """Once a sweep ended well, and its rows were nowhere."""
    path = tmp_path / "out.csv"
    says = rf"{of} was {harm} while it was being written: what it lacks now is lost, and .* --out \S+/out.csv --resume"

    def sweep():
        with Writer(path) as writer:
            writer.write([row()], [SAMPLE])
            HARMS[harm](tmp_path / of)
            if not at_the_end:
                writer.write([row(128)], [SAMPLE])

    with pytest.raises(MtabenchError, match=says):
        sweep()
    with Writer(path, resume=True) as writer:
        writer.write([row(256)], [SAMPLE])
    assert 256 in read_results(path)["seq"].tolist()


def test_rows_go_where_the_file_was_when_the_sweep_started(tmp_path, monkeypatch):
    """A kernel may go to another folder meanwhile."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with Writer(Path("out.csv")) as writer:
        monkeypatch.chdir(tmp_path / "elsewhere")
        writer.write([row()], [SAMPLE])
    assert len(read_results(tmp_path / "out.csv")) == 1
    assert files_in(tmp_path) == ["elsewhere", "out.csv", "out.samples.csv"]
