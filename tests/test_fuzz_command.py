"""`scripts/fuzz_kernels.py`: what is typed, printed and written, its worker processes, and `scripts/fuzz_status.py`."""

from __future__ import annotations

import csv
import functools
import re
import shlex
import time
from pathlib import Path

import fuzz_kernels
import fuzz_status
import fuzz_workers
import pytest
from fuzz import trial, workers
from fuzz.cases import Target, draw
from fuzz.families import KERNELS, source_hashes
from fuzz.totals import COLUMNS, Totals, check_totals_file
from fuzz.workers import Ended, run_workers
from fuzz_faults import FAULTS
from training_scripts import command_line

ROOT = Path(__file__).parents[1]
ON_CPU = ("--op", "conv-attention", "--impl", "eager", "--pass", "bwd", "--device", "cpu")
EAGER = Target("conv-attention", "eager")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs `scripts/fuzz_kernels.py` with some words: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    return command_line(fuzz_kernels, monkeypatch, capsys, "fuzz_kernels.py")


@pytest.fixture
def planted(monkeypatch) -> None:
    """The operator drops a key, here and in workers."""
    wrong = functools.partial(trial.try_case, operation=FAULTS[fuzz_workers.FAULT].operation())
    monkeypatch.setattr(trial, "try_case", wrong)
    monkeypatch.setattr(workers, "run_share", fuzz_workers.with_a_fault)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--seconds", "-1"), "--seconds is -1; expected seconds"),
        (("--seconds", "inf"), "--seconds is inf; expected seconds"),
        (("--seconds", "nan"), "--seconds is nan; expected seconds"),
        (("--cases", "0"), "--cases is 0; expected a number of cases"),
        (("--case", "3"), "give --seed and --case"),
        (("--case", "-3", "--seed", "1"), "cases from 0 on"),
        (("--seed", "-1"), "--seed is -1"),
        (("--jobs", "0"), "--jobs is 0; expected 1 to 256"),
        (("--impl", "sdpa-flash"), "--impl sdpa-flash has no cases; expected one or more of triton"),
        (("--out", "."), "is a folder"),
        (("--out", "other.csv"), "holds no totals of a fuzz"),
        (("--out", "other.csv/new.csv"), "is a file, not a folder"),
        (("--case", "3", "--seed", "1", "--out", "new.csv"), "leave out one of them"),
        (("--op", "attention"), "invalid choice: 'attention'"),
        (("--pass", "fwd"), "invalid choice: 'fwd'"),
        (("--op", "mta", "--impl", "hopper"), "--impl hopper has no cases; expected one or more of triton"),
        (("--op", "conv-attention", "--impl", "hopper"), "nothing can be checked: no backend that was asked for"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_wrong_options_are_refused_in_a_sentence(run, tmp_path, words, message) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    code, _, err = run("--device", "cpu", *words)
    assert code == 2
    assert message in err.splitlines()[-1]


def test_a_case_alone_is_shown(run) -> None:
    code, out, err = run("--seed", 1, "--case", 7, *ON_CPU)
    case = draw(1, 7, (EAGER,), "cpu")
    assert (code, err) == (0, "")
    assert out == f"{case.described()}\npassed\n"
    assert f"seq_len       {case.seq_len}\n" in out


@pytest.mark.usefixtures("planted")
def test_a_failure_has_code_4_and_what_is_typed_to_repeat_it(run, tmp_path) -> None:
    begun = time.monotonic()
    code, out, _ = run("--seconds", 300, "--cases", 4, "--seed", 1, "--out", "new/totals.csv", *ON_CPU)
    assert code == 4
    assert time.monotonic() - begun < 300  # it ends with the last case
    failed, command = re.search(
        r"^FAILED conv-attention eager (?:fwd|bwd): (.*) \| scripts/fuzz_kernels.py (.*)$", out, re.MULTILINE
    ).groups()
    with (tmp_path / "new/totals.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["op"], row["backend"], row["seed"]) for row in rows} == {(*EAGER[:2], "1")}
    assert {row["sources"] for row in rows} == {source_hashes()["conv-attention"]}
    cases, failures = (sum(int(row[name]) for row in rows) for name in ("cases", "failures"))
    assert f"{failures} of {cases} cases failed" in out
    assert cases == 4
    assert out.count("FAILED ") == failures > 0

    code, out, _ = run(*shlex.split(command))
    assert code == 4
    assert failed.partition(" (and ")[0] in out.splitlines()


def test_another_worker_goes_on_where_one_died(monkeypatch) -> None:
    monkeypatch.setattr(workers, "run_share", fuzz_workers.that_dies)
    ended = {}
    for message in run_workers(1, (EAGER,), "cpu", jobs=2, seconds=1.0):
        assert message.number not in ended
        ended[message.number] = message.wrong
    assert {number: wrong for number, wrong in ended.items() if wrong} == {
        fuzz_workers.DIES_ON: ("crash: its process was ended by SIGKILL, for lack of memory perhaps",)
    }
    shares = [sorted(number for number in ended if number % 2 == job) for job in range(2)]
    assert shares == [list(range(job, 2 * len(share), 2)) for job, share in enumerate(shares)]  # none is left out
    assert shares[0]
    assert len(shares[1]) > 1  # the one that died, and others after it


def test_workers_that_cannot_start_are_one_failure_each(monkeypatch) -> None:
    monkeypatch.setattr(workers, "run_share", fuzz_workers.that_cannot_start)
    (ended,) = run_workers(1, (EAGER,), "cpu", jobs=1, seconds=100.0)
    assert ended.number == 0
    assert "no start" in ended.wrong[0]


def test_totals_are_added_to_a_file(tmp_path) -> None:
    path = tmp_path / "totals.csv"
    totals = Totals()
    totals.add(Ended(0, "mta", "triton", "fwd", (), False, 0.25, True, ("a", "b")))
    totals.add(Ended(1, "mta", "triton", "fwd", ("wrong",), True, 0.5, False, ("b", "c")))
    for seed in (1, 2):
        check_totals_file(path)
        totals.append_to(path, {"seed": seed, "device": "a, b"})
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["seed"] for row in rows] == ["1", "2"]
    assert rows[1]["device"] == "a, b"
    numbers = [rows[1][name] for name in ("cases", "refused", "failures", "seconds", "kernels", "sources")]
    assert numbers == ["2", "1", "1", "0.8", "3", source_hashes()["mta"]]
    check_totals_file(ROOT / "results/nvidia-h200/fuzz.csv")


CHANGES = {
    "conv_attention/hopper/device.cuh": {"conv-attention", "conv-attention decode", "mta", "mta decode"},
    "conv_attention/cuda_sm80/backward.py": {"conv-attention", "mta"},
    "conv_attention/cuda_decode/fold.cuh": {"conv-attention decode", "mta decode"},
    "multi_token_attention/rows_cuda/forward.cu": {"mta", "mta decode"},
    "multi_token_attention/decode/keys.py": {"mta decode"},
    "nvrtc/common.cuh": {"conv-attention", "conv-attention decode", "mta", "mta decode"},
    "gpu_limits.py": {"conv-attention", "conv-attention decode", "mta", "mta decode"},
}


def test_a_change_of_code_is_one_of_its_families(tmp_path) -> None:
    for name in CHANGES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("BLOCK = 2\n" if path.suffix == ".py" else "int x = 2;\n")
    before = source_hashes(tmp_path)
    for name, families in CHANGES.items():
        path = tmp_path / name
        assert (KERNELS / name).exists()
        text = path.read_text()
        comment, code = ("# why\n", "BLOCK = 1\n") if path.suffix == ".py" else ("// why\n", "int block = 1;\n")
        for more, changed in ((comment, set()), (code, families)):
            path.write_text(text + more)
            source_hashes.cache_clear()
            after = source_hashes(tmp_path)
            assert {family for family, found in after.items() if found != before[family]} == changed, name
        path.write_text(text)
    source_hashes.cache_clear()


def test_a_release_needs_kernels_that_were_fuzzed_as_they_are(tmp_path, capsys) -> None:
    path, totals = tmp_path / "fuzz.csv", Totals()
    for number in range(3):
        totals.add(Ended(number, "mta", "triton", "bwd", (), False, 0.25))
    totals.append_to(path, {"date": "2026-01-02T03:04:05Z", "git_sha": "abc"})
    assert fuzz_status.main(path) == 1
    out, err = capsys.readouterr()
    assert re.search(r"^mta +2026-01-02 +abc +as now +3 +0$", out, re.MULTILINE)
    assert [line.partition(" was never fuzzed: run ")[0] for line in err.splitlines()] == [
        "conv-attention", "conv-attention decode", "mta decode",
    ]  # fmt: skip
    for op, pass_ in (("conv-attention", "bwd"), ("conv-attention", "decode"), ("mta", "decode")):
        totals.add(Ended(0, op, "triton", pass_, (), False, 0.25))
    totals.append_to(path, {"date": "2026-01-03T03:04:05Z", "git_sha": "abd"})
    assert fuzz_status.main(path) == 0
    assert capsys.readouterr().err == ""
    for date, wrong, code in (("2026-01-04T03:04:05Z", ("norm: off",), 1), ("2026-01-05T03:04:05Z", (), 0)):
        again = Totals()
        again.add(Ended(0, "mta", "triton", "decode", wrong, False, 0.25))
        again.append_to(path, {"date": date, "git_sha": "abe"})
        assert fuzz_status.main(path) == code
        assert ("mta decode failed in 1 cases of its fuzz of 2026-01-04" in capsys.readouterr().err) == bool(wrong)
    path.write_text(path.read_text().replace(source_hashes()["mta"], "other", 2))
    assert fuzz_status.main(path) == 1
    assert (
        "mta has changed since its fuzz of 2026-01-03: run scripts/fuzz_kernels.py --op mta" in capsys.readouterr().err
    )
    assert "fuzz_status.py" in (ROOT / "scripts/build_wheel").read_text()
