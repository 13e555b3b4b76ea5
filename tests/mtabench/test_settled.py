"""A time that did not settle is marked wherever it is shown, and a sweep beside another job says so."""

import itertools
import re

import numpy as np
import pytest
from chart_cells import conv_cell, figure, lines, plain_cell, said, texts, words, write
from planted_sweeps import run, without_warm_up
from written_runs import case, rounds, write_run

from mtabench.charts.style import LIGHT
from mtabench.measuring import timing
from mtabench.measuring.settled import (
    half_interval,
    half_interval_of,
    longest_wait_s,
    run_delays_s,
    settled,
    unsettled,
    was_crowded,
)
from mtabench.measuring.statistics import median_interval
from mtabench.measuring.timing import Settings, Timed, measure
from mtabench.report.data import read_report
from mtabench.results.results_file import read_file
from mtabench.sweeps.plan import Options, make_plan
from mtabench.sweeps.settings import make_settings, measuring_words
from mtabench.sweeps.table import line, settled_lines

STEADY, LOOSE = rounds(2.0), rounds(8.0, noise=0.2)
CELLS = {case(1024): STEADY, case(1024, "triton"): LOOSE, case(2048): ("oom", "needs 30 GiB")}
INTERVAL = {"ci95_low_ms": 0.99, "ci95_high_ms": 1.01, "status": "ok"}  # half of it is 1 % of 1 ms
TIGHT = {"ci95_low_ms": 0.999, "ci95_high_ms": 1.001}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (INTERVAL, False),
        (INTERVAL | {"ci_target": 0.01}, True),
        (INTERVAL | {"ci_target": "0.02"}, True),
        (INTERVAL | {"ci_target": 0.009}, False),
        (INTERVAL | {"ci_target": 0.001, "ci_typical": "0.006"}, True),  # not much wider than most of its run
        (INTERVAL | {"ci_target": 0.001, "ci_typical": 0.004}, False),
        (INTERVAL | {"ci_target": "", "run_delay": ""}, False),  # a file from before they were kept
        (INTERVAL | {"ci95_low_ms": ""}, None),
        (INTERVAL | {"ci95_low_ms": float("nan")}, None),
        ({"status": "oom"}, None),
        (INTERVAL | TIGHT, True),
        (INTERVAL | TIGHT | {"samples": "2"}, True),
        (INTERVAL | TIGHT | {"samples": 1}, False),
        (INTERVAL | TIGHT | {"run_delay": 0.04}, True),
        (INTERVAL | TIGHT | {"run_delay": "0.06"}, False),
        (INTERVAL | {"ci95_low_ms": "0.995", "ci95_high_ms": "1.005"}, True),  # six digits may be 0.00501 %
    ],
)
def test_a_row_settled_if_half_its_interval_is_within_its_target_and_nobody_took_the_cores(row, expected):
    assert settled(row) is expected


def test_show_and_report_have_the_same_interval_and_the_same_marks(mtabench, tmp_path):
    path = write_run(tmp_path / "a.csv", CELLS)
    ours = [half_interval_of(row) for row in read_file(path).rows()]
    _, out, _ = mtabench("show", "a.csv")
    shown = [row.split() for row in out.splitlines() if re.match(r" *[12]k ", row)]
    assert [row[3] for row in shown[:2]] == [f"{100 * half:.2f}" for half in ours[:2]]
    assert [row[2][0] == "~" for row in shown] == [False, True, False]
    assert "median: ~ did not settle: the 95 % interval is wider than ±0.5 %" in out
    assert "±: half the 95 % interval of the median" in out
    report = read_report(path)
    assert [column.texts[1][0] == "~" for column in report.view.columns if column.name == "median"] == [True]
    assert report.figures[-1].words == "cells with a valid time; 1 did not settle"
    _, exported, _ = mtabench("show", "a.csv", "--markdown")
    assert "median: \\~ did not settle" in exported
    assert r"| \~8." in exported


def test_a_sweep_says_how_many_did_not_settle_and_what_to_type(tmp_path):
    rows = read_file(write_run(tmp_path / "a.csv", CELLS)).rows()
    assert settled_lines(rows, 20, 10.0) == [
        "1 of 2 cells did not settle (marked ~): is another job running? If not, give --rounds 80 --time-limit 40"
    ]
    assert re.search(r"triton: ~8\.\d+ ms", line(rows[1]))
    rows[0]["run_delay"], rows[1]["run_delay"] = "0.714", "0.83"
    assert len(unsettled(rows)) == 2
    assert settled_lines(rows, 20, 10.0) == [
        "2 of 2 cells did not settle (marked ~): threads waited for a core up to 83 % of the time, "
        "so another job runs; end it, and measure again"
    ]


def test_where_most_times_miss_the_target_one_line_says_what_is_typical(tmp_path):
    """One of nine cells is far noisier: it is marked, as are the first two, since the third makes a width typical."""
    noises = [0.06, 0.05, 0.07, 0.06, 0.9, 0.05, 0.06, 0.07, 0.05]
    cells = {case(1024 + i): rounds(2.0, noise=noise) for i, noise in enumerate(noises)}
    path = write_run(tmp_path / "a.csv", cells)
    rows = read_file(path).rows()
    assert [settled(row) for row in rows] == [False, False, True, True, False, True, True, True, True]
    typical, marked = settled_lines(rows, 20, 10.0)
    assert re.fullmatch(
        r"most times are known to ±[12]\.?\d* % here, the median of 9 cells, and not to the target of 0\.5 %; "
        r"~ marks more than 2 times that",
        typical,
    )
    assert marked.startswith("3 of 9 cells did not settle")


@pytest.mark.parametrize(("device", "target"), [("cpu", 0.03), ("cuda", 0.005)])
def test_the_target_is_of_the_device_unless_one_is_typed(device, target):
    plan = make_plan(Options("fwd", device=device, impl="eager"), device)
    assert make_settings(plan).target_on(device) == target
    typed = make_plan(Options("fwd", device=device, impl="eager", target="1.5%"), device)
    assert make_settings(typed).target_on(device) == pytest.approx(0.015)
    assert measuring_words(typed.options)[:2] == ["--target", "1.5%"]


def test_an_idle_cpu_settles(monkeypatch):
    """Noise as of two idle cores, 8 % a round and 20 % a sample: cells end by time and not after 20 rounds."""
    generator = np.random.default_rng(1)
    now = {"s": 0.0}
    monkeypatch.setattr(timing, "_warm_up", lambda *args: (3e-4, 3e-4, None))
    monkeypatch.setattr(timing, "perf_counter", lambda: now["s"])
    monkeypatch.setattr(timing, "run_delays_s", dict)

    def sampler(*args):
        def sample(count):
            times = 0.3 * np.exp(generator.normal(0, 0.08) + generator.normal(0, 0.2, count))
            now["s"] += times.sum() / 1e3
            return times.tolist()

        return sample

    monkeypatch.setattr(timing, "cpu_sampler", sampler)
    found = measure({one: Timed(run=lambda _: None) for one in range(9)}, "cpu", Settings())
    halves = [half_interval(*median_interval(one.rounds)) for one in found.values()]
    assert sum(half > one.ci_target for half, one in zip(halves, found.values(), strict=True)) <= 2
    assert all(sum(map(sum, one.rounds)) > 190 for one in found.values())  # ms
    assert any(len(one.rounds) > 20 for one in found.values())


def test_run_delays_are_read_by_thread_and_the_longest_wait_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("mtabench.measuring.settled.THREADS", tmp_path)
    assert run_delays_s() == {}
    assert longest_wait_s({}, {}) is None
    for thread, text in (("1", "1000 2000000000 5\n"), ("2", "7 500000000 1\n"), ("3", "")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    assert run_delays_s() == {"1": 2.0, "2": 0.5}
    assert longest_wait_s({"1": 1.9, "9": 7.0}, run_delays_s()) == 0.5  # thread 2 is new, 9 has ended
    for thread in ("1", "2"):
        (tmp_path / thread / "schedstat").write_text("0 0 1\n")
    assert run_delays_s() == {}  # a kernel that does not count


def test_a_sweep_whose_threads_wait_for_a_core_marks_its_cells(tmp_path, monkeypatch):
    without_warm_up(monkeypatch)
    waits = itertools.count(step=10.0)
    monkeypatch.setattr(timing, "run_delays_s", lambda: {"1": next(waits)})
    settings = Settings(max_rounds=2, ci_target=0.5)  # however wide the interval
    _, watcher = run(tmp_path / "a.csv", "eager", settings=settings, seq="64")
    (row,) = read_file(tmp_path / "a.csv").rows()
    assert row["status"] == "ok"
    assert row["ci_target"] == "0.5"
    assert was_crowded(row)
    assert settled(row) is False
    (text,) = settled_lines(watcher.rows, 20, 10.0)
    assert text.startswith("1 of 1 cells did not settle (marked ~): threads waited for a core up to ")


def loose(cell):
    return cell | {"ci95_low_ms": 0.9 * cell["median_ms"], "ci95_high_ms": 1.1 * cell["median_ms"]}


def hollow(axes):
    """The places of the marks that are drawn hollow."""
    return [
        (x, y)
        for one in axes.get_lines()
        if one.get_markerfacecolor() == LIGHT.paper
        for x, y in zip(one.get_xdata(), one.get_ydata(), strict=True)
    ]


def test_times_that_did_not_settle_are_hollow_and_the_chart_says_so(tmp_path):
    cells = [conv_cell("triton", 1024, 2.0), loose(conv_cell("triton", 2048, 4.0))]
    shown = figure(write(tmp_path / "a.csv", cells), "time")
    assert hollow(shown.axes[0]) == [(2048, 4.0)]
    assert lines(shown.axes[0])["triton"] == [(1024, 2.0), (2048, 4.0)]
    assert "hollow: 1 of 2 times did not settle: the 95 % interval is wider than ±0.5 %" in words(shown)
    shown = figure(write(tmp_path / "b.csv", cells[:1]), "time")
    assert not hollow(shown.axes[0])
    assert "settle" not in words(shown)


def test_a_speedup_is_hollow_if_either_time_did_not_settle(tmp_path):
    cells = [
        loose(conv_cell("eager", 1024, 8.0, speedup=1)),
        conv_cell("triton", 1024, 2.0, speedup=4),
        plain_cell("sdpa-flash", 1024, 1.0),
        conv_cell("eager", 2048, 8.0, speedup=1),
        conv_cell("triton", 2048, 2.0, speedup=4),
        loose(plain_cell("sdpa-flash", 2048, 1.0)),
    ]
    path = write(tmp_path / "a.csv", cells)
    assert sorted(hollow(figure(path, "speedup").axes[0])) == [(1024, 1), (1024, 4), (1024, 8), (2048, 8)]
    more = [loose(conv_cell("eager", 1024, 8.0, speedup=1, head_dim=128)),
            conv_cell("triton", 1024, 4.0, speedup=2, head_dim=128)]  # fmt: skip
    shown = figure(write(tmp_path / "b.csv", [*cells[3:5], *more]), "heatmap-head-dim")
    assert {"4.0x", "~2.0x"} <= set(said(texts(shown)))
    assert "~: 1 of 4 times did not settle" in words(shown)
