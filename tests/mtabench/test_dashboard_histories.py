"""A folder of results files becomes histories: ordered by time, each row once, what is broken reported and left out."""

import os

import numpy as np
import pytest
from simulated_histories import columns, row, sha, steady, stepped, write, write_histories

from mtabench.dashboard import histories
from mtabench.dashboard.findings import find
from mtabench.dashboard.histories import Collector, read_archive
from mtabench.errors import UsageError


def collected(*tables):
    collector = Collector()
    for number, rows in enumerate(tables):
        collector.add(columns(rows), f"file {number}")
    return *collector.histories(), collector


def test_points_are_in_the_order_in_which_their_runs_started():
    runs, (history,), _ = collected([row(2, 1.2)], [row(0, 1.0)], [row(1, 1.1)])
    assert [run.git_sha for run in runs] == [sha(0), sha(1), sha(2)]
    assert history.median_ms.tolist() == [1.0, 1.1, 1.2]
    assert [runs[place].run_id for place in history.runs] == ["run-0", "run-1", "run-2"]


def test_cells_differ_by_device_shape_timer_and_cache():
    changes = ({}, {"device": "other"}, {"seq": "2048"}, {"timer": "graph"}, {"cache": "warm"}, {"pass": "bwd"})
    _, found, _ = collected([row(0, 1.0, **change) for change in changes])
    assert len(found) == len(changes)
    assert all(len(history.runs) == 1 for history in found)


def test_a_run_in_two_files_counts_once():
    rows = [row(0, 1.0), row(0, 2.0, seq="2048")]
    runs, found, collector = collected(rows, rows, [row(0, 4.0, seq="4096")])
    assert (len(runs), len(found), collector.rows, collector.repeated) == (1, 3, 3, 2)


def test_a_failure_is_a_point_without_a_time():
    _, (history,), _ = collected([row(0, 1.0)], [row(1, "oom")], [row(2, 1.0, status="invalid", reason="throttled")])
    assert history.outcomes == [("ok", ""), ("oom", "oom because"), ("invalid", "throttled")]
    assert np.isnan(history.median_ms[1:]).all()
    assert history.timed.tolist() == [0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"run_id": ""}, "without a run_id"), ({"median_ms": ""}, "is ok and has no median_ms")],
)
def test_a_row_without_what_a_history_needs_refuses_its_file(changes, expected):
    collector = Collector()
    with pytest.raises(UsageError, match=expected):
        collector.add(columns([row(0, 1.0), row(0, 1.0, seq="2048") | changes]), "that.csv")
    assert collector.rows == 0


def test_kernels_compiled_for_another_gpu_are_no_slower_code(tmp_path):
    write(tmp_path / "a.csv", [row(0, 1.0, impl="triton")])
    other = {"triton": "3.6.0 for sm80"}
    write(tmp_path / "b.csv", [row(1, 3.0, impl="triton", **other), row(1, 1.0, impl="cuda", **other)])
    archive = read_archive(tmp_path)
    assert (archive.rows, len(archive.histories)) == (2, 2)
    assert archive.skipped == {histories.FOR_OTHERS: 1}


def test_a_folder_is_read_with_what_lies_below_it(tmp_path):
    write_histories(tmp_path / "a" / "b", [({}, steady(3))])
    write(tmp_path / "c.CSV", [row(7, 1.0)])
    (tmp_path / "c.samples.csv").write_text("run_id,cell,round,sample,ms\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / ".hidden" / "d.csv", [row(8, 1.0)])
    os.symlink(tmp_path / "c.CSV", tmp_path / "link.csv")
    archive = read_archive(tmp_path)
    assert (archive.files, archive.rows, len(archive.runs), len(archive.histories)) == (4, 4, 4, 1)
    assert archive.skipped == {histories.SAMPLES: 1, histories.OTHER: 1, histories.LINKS: 1}


def test_a_broken_file_is_told_and_the_others_count(tmp_path):
    write(tmp_path / "good.csv", [row(0, 1.0)])
    write(tmp_path / "bad" / "time.csv", [row(1, 1.0, started_utc="yesterday")])
    (tmp_path / "cut.csv").write_text("schema_version,run_id,median_ms\n1,2\n")
    archive = read_archive(tmp_path)
    assert archive.files == 1
    broken = dict(archive.broken)
    assert sorted(broken) == ["bad/time.csv", "cut.csv"]
    assert "started_utc" in broken["bad/time.csv"]
    assert str(tmp_path) not in broken["bad/time.csv"]


def test_a_folder_without_anything_to_read_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        read_archive(tmp_path / "missing")
    with pytest.raises(UsageError, match="holds no results file"):
        read_archive(tmp_path)
    (tmp_path / "cut.csv").write_text("schema_version,run_id,median_ms\n1,2\n")
    with pytest.raises(UsageError, match=r"holds no results file .* can be read: .*cut\.csv"):
        read_archive(tmp_path)


@pytest.mark.parametrize(
    ("module", "name"), [(histories, "MOST_POINTS"), (histories, "MOST_CELLS"), (histories, "MOST_FILES")]
)
def test_too_much_is_refused_with_a_sentence(tmp_path, monkeypatch, module, name):
    write(tmp_path / "a.csv", [row(0, 1.0), row(0, 1.0, seq="2048")])
    write(tmp_path / "b.csv", [row(1, 1.0), row(1, 1.0, seq="2048")])
    monkeypatch.setattr(module, name, 1)
    with pytest.raises(UsageError, match=r"more than .* give a folder with fewer"):
        read_archive(tmp_path)


def found_in(rows_by_run, **settings):
    runs, found, _ = collected(*rows_by_run)
    return runs, find(runs, found, **({"threshold": 0.02, "days": 30} | settings))


def times(*medians, **cell):
    return [[row(run, ms, **cell)] for run, ms in enumerate(medians)]


def together(*cells):
    return [[one for rows in run for one in rows] for run in zip(*cells, strict=True)]


def test_changes_of_the_same_commits_are_one_event_and_slowdowns_come_first():
    slow = [times(1.0, 1.1, seq=seq) for seq in ("1024", "2048")]
    runs, findings = found_in(together(*slow, times(1.0, 0.5, seq="4096")))
    first, second = findings.events
    assert (first.slower, len(first.found), second.slower, len(second.found)) == (True, 2, False, 1)
    assert first.change == pytest.approx(0.1)
    assert (runs[first.good].git_sha, runs[first.bad].git_sha) == (sha(0), sha(1))
    assert findings.counts == {
        "slower": 0, "maybe_slower": 2, "faster": 0, "maybe_faster": 1, "unexplained": 0, "broken": 0, "compared": 3,
    }  # fmt: skip
    assert findings.states == ["maybe slower", "maybe slower", "maybe faster"]


def test_a_change_that_was_undone_does_not_last_and_is_no_news():
    _, findings = found_in(times(1.0, 1.1, 1.0))
    slower, faster = findings.events
    assert (slower.lasting, faster.lasting) == (False, True)
    assert not any(findings.news)
    assert findings.states == ["steady"]


def test_an_old_change_is_no_news():
    medians = [1.0] + [1.1] * 3
    _, findings = found_in(times(*medians), days=1)
    assert [event.recent for event in findings.events] == [False]
    assert findings.counts["maybe_slower"] == 0
    assert findings.states == ["steady"]


@pytest.mark.parametrize("later", [{"device": "another"}, {"seq": "64", "started_utc": "2127-01-01T00:00:00Z"}])
def test_recent_is_of_the_device_and_of_no_date_that_is_to_come(later):
    tables = [*times(1.0, 1.1), [row(150, 1.0, **later)], [row(2, 1.0, seq="64", started_utc="0001-01-01T00:00:00Z")]]
    _, findings = found_in(tables)
    assert (findings.counts["maybe_slower"], findings.counts["compared"]) == (1, 1 + ("seq" in later))


PLAIN = {"op": "attention", "impl": "sdpa-flash", "conv_q": "", "conv_k": ""}


def unexplained(*cells):
    """For each cell, in the order of the cells, whether no commit explains its changes."""
    _, findings = found_in(together(*cells))
    return [{one.unexplained for one in found} for found in findings.changes]


def test_a_change_between_two_runs_of_a_commit_is_explained_by_none():
    tables = [[row(0, 1.0)], [row(1, 1.1, git_sha=sha(0))], [row(2, 1.2)]]
    _, findings = found_in(tables)
    assert [(event.good, event.unexplained) for event in findings.events] == [(1, False), (0, True)]
    assert "same commit before and after" in findings.events[1].notes
    assert findings.counts["maybe_slower"] == 1


@pytest.mark.parametrize(
    ("ours", "plain", "expected"),
    [
        (1.1, 1.1, True),
        (1.054, 1.04, True),  # a change of plain attention that does not count as one
        (1.1, 1.06, True),
        (1.1, 1.03, False),
        (1.1, 1.0, False),
        (1.1, 0.9, False),
        (0.9, 0.9, True),
        (0.9, 1.1, False),
    ],
)
def test_a_change_that_plain_attention_shares_is_the_machines(ours, plain, expected):
    found = unexplained(times(1.0, ours), times(1.0, plain, **PLAIN))
    assert found[0] == {expected}
    assert found[1] <= {True}


def test_plain_attention_of_the_same_shape_decides_before_that_of_others():
    """Long sequences throttle, short ones do not: each shape is held against its own yardstick."""
    cells = [times(1.0, 1.1, seq=seq) for seq in ("1024", "16384")]
    yardsticks = [times(1.0, ms, seq=seq, **PLAIN) for seq, ms in (("1024", 1.0), ("16384", 1.1))]
    assert unexplained(*cells, *yardsticks)[:2] == [{False}, {True}]
    _, findings = found_in(together(*cells, *yardsticks))
    assert [(event.unexplained, len(event.found)) for event in findings.events] == [(False, 1), (True, 2)]
    assert unexplained(cells[1], yardsticks[0])[0] == {False}
    assert unexplained(cells[0], yardsticks[1])[0] == {True}


def test_plain_attention_counts_only_in_the_same_runs_and_of_the_same_pass():
    assert unexplained(times(1.0, 1.1), [*times(1.0, **PLAIN), []])[0] == {False}
    assert unexplained(times(1.0, 1.1), times(1.0, "oom", **PLAIN))[0] == {False}
    assert unexplained(times(1.0, 1.1), times(1.0, 1.1, **PLAIN | {"pass": "bwd"}))[0] == {False}


def test_steps_and_drifts_are_held_against_levels_of_plain_attention():
    """One run of plain attention stands out just where ours stepped; the levels around it did not."""
    plain = steady(20, seed=3)
    plain[10] *= 1.1
    assert unexplained(times(*stepped(20, 10, 0.1)), times(*plain, **PLAIN))[0] == {False}
    assert unexplained(times(*stepped(20, 10, 0.1)), times(*stepped(20, 10, 0.1, seed=4), **PLAIN))[0] == {True}
    drifts = [[ms * (1 + 0.005 * run) for run, ms in enumerate(steady(30, seed=seed))] for seed in (5, 6)]
    assert unexplained(times(*drifts[0]), times(*drifts[1], **PLAIN))[0] == {True}
    assert unexplained(times(*drifts[0]), times(*steady(30, seed=7), **PLAIN))[0] == {False}


def test_a_slowdown_by_a_commit_is_news_although_the_machine_undid_it():
    _, findings = found_in(together(times(1.0, 1.1, 1.0), times(1.0, 1.0, 0.9, **PLAIN)))
    assert findings.counts["maybe_slower"] == 1
    assert [event.unexplained for event in findings.events] == [False, True]


def test_failures_are_news_if_it_worked_before_or_is_wrong():
    cells = [
        times(1.0, "error", "error", seq="1024"),
        times("oom", "oom", "oom", seq="2048"),
        times("oom", "oom", "wrong", seq="4096"),
        times(1.0, "oom", 1.0, seq="8192"),
        times("unsupported", "unsupported", "unsupported", seq="16384"),
        times(1.0, 1.0, "unsupported", seq="32768"),
    ]
    runs, findings = found_in(together(*cells))
    found = {failure.cell: failure for failure in findings.failures}
    assert {cell: failure.broken for cell, failure in found.items()} == {0: True, 1: False, 2: True, 5: True}
    assert (runs[found[0].good].run_id, runs[found[0].since].run_id, found[0].reason) == (
        "run-0",
        "run-1",
        "error because",
    )
    assert findings.counts["broken"] == 3
    assert findings.states == ["failing", "failing", "failing", "steady", "never timed", "failing"]


def test_an_event_says_what_else_differs():
    tables = [[row(0, 1.0)], [row(1, 1.1, torch="2.12.0", git_sha=sha(0), git_dirty="true")]]
    _, findings = found_in(tables)
    assert list(findings.events[0].notes) == [
        "torch 2.11.0 → 2.12.0",
        "same commit before and after",
        "uncommitted changes after",
    ]
