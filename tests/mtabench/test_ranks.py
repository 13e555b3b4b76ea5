"""Cells shared by ranks, measured on this machine's CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import contents, refused
from simulated_ranks import SimulatedRanks, run_ranks

from mta_kernels.conv_attention.context_parallel import ring
from mta_kernels.conv_attention.context_parallel.eager import EagerTiles
from mta_kernels.conv_attention.context_parallel.tiles import Problem
from mta_kernels.operation import Operation
from mtabench.ranks import part
from mtabench.results.results_file import read_results

CPU = ("--device", "cpu", "--heads", "2", "--head-dim", "16", "--conv", "3x4", "--rounds", "2", "--time-limit", "1")


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_ranks_are_measured_beside_one_of_them(mtabench, tmp_path, pass_) -> None:
    code, out, err = mtabench(pass_, *CPU, "--ranks", "2", "--seq", "128", "--out", "ranks.csv")
    assert (code, err) == (0, ""), out
    (row,) = read_results(tmp_path / "ranks.csv").to_dict("records")
    assert (row["status"], row["impl"], row["ranks"], row["baseline"]) == ("ok", "eager", 2, "1 rank")
    assert row["efficiency"] == pytest.approx(row["speedup"] / 2, rel=1e-4)
    assert row["device"].startswith("2 x ")
    assert row["repro"].endswith("--ranks 2")
    assert row["rel_error"] < 1e-5
    assert row["link_gbytes_s"] > 0
    assert row["communication_ms"] > 0
    assert " efficiency" in out


def test_a_cell_that_a_rank_cannot_load_is_a_row(mtabench, tmp_path, monkeypatch) -> None:
    """This process is rank 0; the other loads the cell, and drops it."""
    make_inputs = part.make_inputs

    def planted(case, seed):
        if case.seq == 128:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return make_inputs(case, seed)

    monkeypatch.setattr(part, "make_inputs", planted)
    code, _, err = mtabench("fwd", *CPU, "--ranks", "2", "--seq", "128,64", "--out", "ranks.csv")
    assert (code, err) == (0, "")
    rows = {row["seq"]: row for row in read_results(tmp_path / "ranks.csv").to_dict("records")}
    assert rows[128]["status"] == "oom"
    assert rows[128]["reason"] == "rank 0: out of memory: tried to allocate 9 GiB"
    assert rows[64]["status"] == "ok"


@pytest.mark.parametrize("calls", [1, 2, 6], ids=["while verified", "while probed", "while timed"])
def test_a_call_that_fails_on_a_rank_is_a_row_and_ends_the_sweep(mtabench, tmp_path, monkeypatch, calls) -> None:
    """The other rank waits for this one, in the midst of a call."""
    forward, done = part.Part.forward, []

    def planted(self):
        done.append(self)
        if len(done) == calls:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return forward(self)

    monkeypatch.setattr(part.Part, "forward", planted)
    code, _, err = mtabench("fwd", *CPU, "--ranks", "2", "--seq", "128,64", "--out", "ranks.csv")
    assert code == 1
    assert "rank 0 failed within a call, where the other ranks wait for it; what was measured is kept" in err
    (row,) = read_results(tmp_path / "ranks.csv").to_dict("records")
    assert (row["status"], row["reason"]) == ("oom", "out of memory: tried to allocate 9 GiB")
    torch.distributed.destroy_process_group()  # which else ends with the process


def test_a_dry_run_starts_nobody(mtabench, tmp_path) -> None:
    code, out, err = mtabench("fwd", *CPU, "--ranks", "2", "--seq", "128,256", "--dry-run")
    assert (code, err) == (0, "")
    assert "over 2 ranks" in out
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--ranks", "1"), "it must be 2 or more"),
        (("--ranks", "3", "--seq", "128"), "give a multiple of 6, such as 132"),
        (("--ranks", "2", "--seq", "16"), "give 24 or more"),
        (("--ranks", "2", "--impl", "compile"), "give --impl eager or triton"),
        (("--ranks", "2", "--isolate"), "--isolate cannot be had with --ranks"),
        (("--ranks", "2", "--workers", "2"), "--ranks and --workers exclude each other"),
        (("--ranks", "2", "--baseline", "eager"), "--baseline cannot be had with --ranks"),
    ],
)
def test_what_cannot_be_shared_is_told_before_anything_starts(mtabench, tmp_path, words, told) -> None:
    refused(mtabench("fwd", *CPU, *words), told)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_bytes_passed_are_those_that_are_sent(backward: bool, causal: bool) -> None:
    rows = 8
    problem = Problem(rows, Operation.of((3, 4), 1, causal=causal))
    q, k, v = torch.randn(3, 1, 2, 2 * rows, 4).unbind()
    weight = torch.randn(2, 3, 4)

    def sent(ranks: SimulatedRanks) -> int:
        total = 0
        shift = ranks.shift

        def counted(tensors):
            nonlocal total
            total += sum(x.nbytes for x in tensors)
            return shift(tensors)

        ranks.shift = counted
        out, logsumexp = ring.forward(ranks, EagerTiles(0), problem, q, k, v, weight)
        if backward:
            total = 0
            ring.backward(ranks, EagerTiles(0), problem, q, k, v, weight, out, logsumexp, out)
        return total

    sizes = {"batch": 1, "kv_heads": 2, "head_dim": 4, "dtype": torch.float32}
    want = ring.passed_bytes(problem.operation, 3 * 2 * rows, 3, **sizes, backward=backward)
    assert run_ranks(3, sent) == [want] * 3


def test_a_rank_that_dies_is_named_and_ends_the_sweep(tmp_path) -> None:
    words = ("fwd", *CPU, "--ranks", "2", "--seq", "128", "--out", "ranks.csv")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from planted_ranks import run_with_a_rank_that_dies; run_with_a_rank_that_dies()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 1
    assert "mtabench: rank 1: its process was ended by SIGKILL" in done.stderr
    assert "what was measured is kept in ranks.csv, and --resume goes on" in done.stderr
    (row,) = read_results(tmp_path / "ranks.csv").to_dict("records")
    assert row["status"] == "error"
    assert row["reason"].startswith("rank 1: its process was ended by SIGKILL")


LISTENING = """
import os, sys
from pathlib import Path
from mtabench.ranks.follower import follow_as
from mtabench.ranks.meeting import meet

def inodes(pid):
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield os.readlink(link)
        except OSError:
            pass

with meet(2, "cpu", follow_as, "kept", print) as meeting:
    own = {*inodes(os.getpid()), *inodes(meeting.helpers[0].process.pid)}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                print(words[1].partition(":")[0])
"""


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux says there who listens")
def test_ranks_listen_on_this_machine_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTENING],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
    assert done.stdout  # gloo does listen
