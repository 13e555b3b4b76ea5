"""Comparing two runs: verdicts, what they rest on, and exit codes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import printed
from written_runs import WITH_TIME, case, rounds

from mtabench.comparing.compare import compare, judge
from mtabench.comparing.inference import LogRatios
from mtabench.problem.axes import parse_percent
from mtabench.results.runs import read_run


def test_the_same_code_passes(mtabench, pair):
    pair()
    out = printed(mtabench("compare", "base.csv", "head.csv", "--fail-on", "slower,gone,unclear"))
    assert out.splitlines()[-2:] == [
        "3 same; changes below 2 % do not count",
        "passes: none is slower, gone or unclear (--fail-on slower,gone,unclear)",
    ]


STRICT = "broken,slower,gone,unclear"


@pytest.mark.parametrize(
    ("head", "fail_on", "code", "verdict"),
    [
        ({case(64): rounds(1.05, seed=20)}, None, 1, "slower"),
        ({case(64): rounds(1.05, seed=20)}, "gone", 0, "slower"),
        ({case(64): rounds(0.95, seed=20)}, STRICT, 0, "faster"),
        ({case(64): rounds(0.95, seed=20)}, "faster", 1, "faster"),
        ({case(64): rounds(1.01, seed=20)}, STRICT, 0, "same"),
        ({case(64): rounds(1.05, noise=0.3, seed=20)}, None, 0, "unclear: the noise is too large"),
        ({case(64): rounds(1.05, noise=0.3, seed=20)}, STRICT, 3, "unclear: the noise is too large"),
        ({case(64): rounds(1.05, count=1)}, STRICT, 3, "unclear: one round"),
        ({case(64): ("wrong", "error 0.5")}, None, 4, "broken: wrong: error 0.5"),
        ({case(64): ("wrong", "error 0.5")}, "slower", 4, "broken: wrong: error 0.5"),
        ({case(64): ("wrong", ""), case(128): rounds(3.0)}, STRICT, 4, "broken: wrong"),
        ({case(64): ("oom", "no room")}, None, 1, "broken: oom: no room"),
        ({case(64): ("oom", "no room")}, "slower", 0, "broken: oom: no room"),
        ({case(64): ("invalid", "throttled")}, STRICT, 3, "unclear: invalid: throttled"),
        ({case(64): None}, None, 1, "gone: not in the second run"),
        ({case(64): None}, "broken,slower", 0, "gone: not in the second run"),
        ({case(64): None, case(128): rounds(2.05, noise=0.3)}, STRICT, 1, "gone"),
        ({one: rounds(ms, noise=0.3, seed=20) for one, ms in WITH_TIME.items()}, None, 3, "unclear: the noise"),
        (dict.fromkeys(WITH_TIME, rounds(3.0, count=1)) | {case(128): None}, "slower", 3, "gone"),
        ({case(512): rounds(8.0)}, STRICT, 0, "new"),
        ({case(512): rounds(8.0)}, "new", 1, "new"),
        ({case(512): ("wrong", "")}, None, 4, "broken: wrong"),
        ({case(512): ("unsupported", "too long")}, STRICT, 0, "3 same; "),
    ],
)
def test_verdicts_and_exit_codes(mtabench, pair, head, fail_on, code, verdict):
    pair(head=head)
    options = ["--fail-on", fail_on] if fail_on else []
    got, out, err = mtabench("compare", "base.csv", "head.csv", *options)
    assert (got, err) == (code, "")
    assert verdict in out
    if "same" not in verdict:
        assert verdict in out.splitlines()[2]  # the most urgent comes first
    start = f"fails with exit code {code}: " if code else "passes: "
    assert out.splitlines()[-1].startswith(start)


def bimodal(fast, slow, slow_share, seed):
    """Rounds of ten, of which so many are slow: the medians hide what the middle half of all samples sees."""
    times = rounds(fast, seed=seed)
    return [[ms * (slow / fast if i < slow_share else 1) for i, ms in enumerate(one)] for one in times]


def test_the_times_shown_are_those_compared(mtabench, pair, tmp_path):
    """Four of ten samples are slow before: their median lies apart from the mean of their middle half."""
    pair(base={case(64): bimodal(1.0, 2.0, 4, seed=1)}, head={case(64): rounds(1.9, seed=20)})
    found = compare(*(read_run(tmp_path / name) for name in ("base.csv", "head.csv")), 0.02)
    (cell,) = [cell for cell in found.cells if cell.key.split("/")[7] == "64"]
    assert cell.head_ms / cell.base_ms - 1 == pytest.approx(cell.change)
    assert abs(cell.base.row["median_ms"] / cell.base_ms - 1) > 0.05
    _, out, _ = mtabench("compare", "base.csv", "head.csv", "--junit", "out.xml", "--markdown", "out.md")
    for text in (out, Path("out.md").read_text(), Path("out.xml").read_text()):
        assert f"{cell.base_ms:.4g}" in text
        assert f"{cell.base.row['median_ms']:.4g}" not in text


def test_a_change_whose_medians_have_the_other_sign_is_unclear(mtabench, pair):
    """The middle half of four slow samples in ten lies above what is 5 % slower throughout; the median below."""
    pair(base={case(64): bimodal(1.0, 2.0, 4, seed=1)}, head={case(64): rounds(1.05, seed=20)})
    code, out, _ = mtabench("compare", "base.csv", "head.csv", "--fail-on", "slower,unclear")
    assert code == 3
    assert "unclear: the medians changed the other way, 1.0" in out.splitlines()[2]
    assert "to 1.05 ms" in out.splitlines()[2]


@pytest.mark.parametrize("ms", [0.5, 1.05])
def test_a_change_beside_another_job_is_unclear(mtabench, pair, tmp_path, ms):
    """Of one process; the pairs of `ab` show themselves what another job did."""
    pair(head={case(64): rounds(ms, seed=20)}, run_delay=0.4)
    code, out, _ = mtabench("compare", "base.csv", "head.csv", "--fail-on", "slower,unclear")
    assert code == 3
    assert "unclear: threads waited for a core, so another job ran" in out.splitlines()[2]
    assert "2 same" in out
    runs = [read_run(tmp_path / name) for name in ("base.csv", "head.csv")]
    twice = [replace(run, cells={key: replace(cell, processes=cell.processes * 2) for key, cell in run.cells.items()})
             for run in runs]  # fmt: skip
    assert compare(*twice, 0.02).counts["unclear"] == 0


@pytest.mark.parametrize(("ms", "code", "verdict"), [(1.5, 0, "unclear: threads waited"), (22.0, 1, "slower")])
def test_a_change_far_beyond_what_another_job_explains_is_slower(mtabench, pair, ms, code, verdict):
    """Threads that wait for half of the time take twice as long, and not 22 times."""
    pair(head={case(64): rounds(ms, noise=0.1, seed=20)}, run_delay=0.5)
    got, out, _ = mtabench("compare", "base.csv", "head.csv")
    assert got == code
    assert verdict in out.splitlines()[2]


def test_none_but_unclear_cells_fail_a_build_in_every_report(mtabench, pair):
    pair(head=dict.fromkeys(WITH_TIME, rounds(3.0, count=1)))
    code, out, _ = mtabench("compare", "base.csv", "head.csv", "--junit", "out.xml")
    assert code == 3
    assert out.splitlines()[-1] == "fails with exit code 3: 3 unclear, and no cell has another verdict"
    assert Path("out.xml").read_text().count("<failure") == 3


def test_an_interval_inside_the_bound_is_the_same():
    """-1.99 % is within 2 %, though its logarithm is not within 1.02's."""
    ratios = LogRatios(*(np.array([np.log1p(change)]) for change in (-0.018, -0.0199, -0.0161)), *np.ones((3, 1)))
    assert judge(ratios, 0.02) == ["same"]
    sure = replace(ratios, p_values=np.zeros(1))
    assert judge(replace(sure, values=np.log1p([-0.0199])), 0.02) == ["same"]
    assert judge(replace(sure, values=np.log1p([-0.0201])), 0.02) == ["faster"]


def test_a_cell_without_a_time_in_the_first_run(mtabench, pair):
    pair(base={case(64): ("oom", "no room"), case(128): ("invalid", "throttled")}, head={case(256): None})
    code, out, _ = mtabench("compare", "base.csv", "head.csv")
    assert code == 5
    assert "new: the first run's is oom: no room" in out
    assert "unclear: the first run's is invalid: throttled" in out
    assert "1 gone, 1 unclear, 1 new" in out


def test_the_threshold_is_the_change_that_counts(mtabench, pair):
    pair(head={case(64): rounds(1.03, seed=20)})
    assert [mtabench("compare", "base.csv", "head.csv", "--threshold", t)[0] for t in ("1%", "2 %", "5%")] == [1, 1, 0]
    assert parse_percent("0.5%", "--threshold") == pytest.approx(0.005)


def test_what_passes_although_it_is_in_doubt_is_said(mtabench, pair):
    pair(head={case(64): ("oom", "no room"), case(128): None, case(256): rounds(4.0, noise=0.3)})
    out = printed(mtabench("compare", "base.csv", "head.csv", "--fail-on", "slower"))
    assert out.splitlines()[-1] == (
        "passes: none is slower (--fail-on slower), although there is 1 broken, 1 gone, 1 unclear"
    )
