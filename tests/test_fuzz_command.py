"""`mtabench verify --fuzz`: what is typed, printed and written, and its worker processes."""

from __future__ import annotations

import csv
import functools
import re
import shlex

import fuzz_workers
import pytest
from command_line import make_runner, refused
from fuzz import trial, workers
from fuzz.draws import Target, draw
from fuzz.totals import COLUMNS, Totals, check_totals_file
from fuzz.workers import run_workers
from fuzz_faults import FAULTS

ON_CPU = ("--op", "conv-attention", "--impl", "eager", "--device", "cpu")
EAGER = Target("conv-attention", "eager")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    return make_runner(monkeypatch, capsys, tmp_path)


@pytest.fixture
def planted(monkeypatch) -> None:
    """The operator drops a key, here and in workers."""
    wrong = functools.partial(trial.try_case, operation=FAULTS[fuzz_workers.FAULT].operation())
    monkeypatch.setattr(trial, "try_case", wrong)
    monkeypatch.setattr(workers, "run_share", fuzz_workers.with_a_fault)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--fuzz", "-1"), "--fuzz is -1; expected seconds"),
        (("--fuzz", "inf"), "--fuzz is inf; expected seconds"),
        (("--fuzz", "nan"), "--fuzz is nan; expected seconds"),
        (("--fuzz", "0"), "give its number with --case"),
        (("--fuzz", "0", "--case", "3"), "give --seed and --case"),
        (("--fuzz", "0", "--case", "-3", "--seed", "1"), "cases from 0 on"),
        (("--fuzz", "1", "--seed", "-1"), "--seed is -1"),
        (("--fuzz", "1", "--jobs", "0"), "--jobs is 0; expected 1 to 256"),
        (("--fuzz", "1", "--impl", "sdpa-flash"), "no cases for 'sdpa-flash'; expected one or more of triton"),
        (("--fuzz", "1", "--out", "."), "is a folder"),
        (("--fuzz", "1", "--out", "other.csv"), "holds no totals of a fuzz"),
        (("--fuzz", "1", "--out", "other.csv/new.csv"), "is a file, not a folder"),
        (("--fuzz", "0", "--case", "3", "--seed", "1", "--out", "new.csv"), "leave out one of them"),
        (("--case", "3"), "give --fuzz SECONDS"),
        (("--jobs", "2"), "give --fuzz SECONDS"),
        (("--fuzz", "1", "--op", "attention"), "no cases for --op 'attention'; expected one or more of conv-attention"),
        (("--fuzz", "1", "--op", "mta", "--impl", "hopper"), "no cases for 'hopper'; expected one or more of triton"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_wrong_options_are_refused_in_a_sentence(run, tmp_path, words, said) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    refused(run("verify", "--device", "cpu", *words), said)


def test_a_case_alone_is_shown(run) -> None:
    code, out, err = run("verify", "--fuzz", 0, "--seed", 1, "--case", 7, *ON_CPU)
    case = draw(1, 7, (EAGER,), "cpu")
    assert (code, err) == (0, "")
    assert out == f"{case.described()}\npassed\n"
    assert f"seq_len       {case.seq_len}\n" in out


@pytest.mark.usefixtures("planted")
def test_a_failure_has_code_4_and_what_is_typed_to_repeat_it(run, tmp_path) -> None:
    code, out, _ = run("verify", "--fuzz", 0.5, "--seed", 1, "--out", "new/totals.csv", *ON_CPU)
    assert code == 4
    failed, command = re.search(
        r"^FAILED conv-attention eager (?:fwd|bwd): (.*) \| mtabench (.*)$", out, re.MULTILINE
    ).groups()
    with (tmp_path / "new/totals.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["op"], row["backend"], row["seed"]) for row in rows} == {(*EAGER, "1")}
    cases, failures = (sum(int(row[name]) for row in rows) for name in ("cases", "failures"))
    assert f"{failures} of {cases} cases failed" in out
    assert out.count("FAILED ") == failures > 0

    code, out, _ = run(*shlex.split(command))
    assert code == 4
    assert failed.partition(" (and ")[0] in out.splitlines()


def test_another_worker_goes_on_where_one_died(monkeypatch) -> None:
    monkeypatch.setattr(workers, "run_share", fuzz_workers.that_dies)
    ended = {}
    for message in run_workers(1, (EAGER,), "cpu", jobs=2, seconds=1.5):
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
    totals.add("mta", "triton", "fwd", refused=False, failed=False, seconds=0.25)
    totals.add("mta", "triton", "fwd", refused=True, failed=True, seconds=0.5)
    for seed in (1, 2):
        check_totals_file(path)
        totals.append_to(path, {"seed": seed, "device": "a, b"})
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["seed"] for row in rows] == ["1", "2"]
    assert rows[1]["device"] == "a, b"
    assert [rows[1][name] for name in ("cases", "refused", "failures", "seconds")] == ["2", "1", "1", "0.8"]
