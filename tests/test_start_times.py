"""scripts/start_times.py: what it times, and the table it writes, with processes that are stood in for."""

import csv
import subprocess
import sys

import start_times


def test_each_command_is_timed_after_one_that_does_not_count(monkeypatch, tmp_path, capsys):
    clock, ran, used = [0.0], [], [0.0]

    def run(words, **_):
        ran.append(" ".join(words[3:]))
        clock[0] += 9 if ran.count(ran[-1]) == 1 else 0.25
        used[0] += 0.125

    monkeypatch.setattr(start_times, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(start_times, "cpu_seconds", lambda: used[0])
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(start_times.environment, "describe", lambda: {"device": "a CPU"})
    monkeypatch.setattr(sys, "argv", ["start_times.py", "--runs", "3", "--out", str(tmp_path / "new/out.csv")])
    assert start_times.main() == 0
    assert "command list  median_s 0.250  least_s 0.250  least_cpu_s 0.125" in capsys.readouterr().out.splitlines()
    with (tmp_path / "new/out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["command"] for row in rows] == list(start_times.COMMANDS)
    assert {(row["median_s"], row["runs"], row["device"]) for row in rows} == {("0.250", "3", "a CPU")}
    assert len(ran) == 4 * len(rows)
