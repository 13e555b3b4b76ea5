"""Comparing two runs: verdicts, exit codes, reports, and bad input in one sentence."""

import inspect
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import make_runner
from written_runs import case, rounds, write_run

from mtabench import cli
from mtabench.comparing.compare import FAIL_ON, NotComparableError, compare, parse_fail_on, parse_threshold
from mtabench.errors import UsageError
from mtabench.results.runs import read_run

WITH_TIME = {case(64): 1.0, case(128): 2.0, case(256): 4.0}


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    """Runs the command line in an empty folder; gives the exit code, standard output and standard error."""
    return make_runner(monkeypatch, capsys, tmp_path)


@pytest.fixture
def pair(tmp_path):
    """Writes base.csv and head.csv: three cells each, and what is given instead or besides."""

    def write(base=None, head=None, **facts):
        cells = {one: rounds(ms, seed=i) for i, (one, ms) in enumerate(WITH_TIME.items())}
        again = {one: rounds(ms, seed=9 + i) for i, (one, ms) in enumerate(WITH_TIME.items())}
        write_run(tmp_path / "base.csv", cells | (base or {}))
        given = {"run_id": "head", "started": "2026-01-03T03:04:05Z"} | facts
        left = {one: result for one, result in (again | (head or {})).items() if result is not None}
        write_run(tmp_path / "head.csv", left, **given)

    return write


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_code_passes(mtabench, pair):
    pair()
    code, out, err = mtabench("compare", "base.csv", "head.csv", "--fail-on", "slower,gone,unclear")
    assert (code, err) == (0, "")
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
        ({case(512): rounds(8.0)}, STRICT, 0, "new"),
        ({case(512): rounds(8.0)}, "new", 1, "new"),
        ({case(512): ("wrong", "")}, None, 4, "broken: wrong"),
        ({case(512): ("unsupported", "too long")}, STRICT, 0, "3 same; "),
    ],
)
def test_verdicts_and_exit_codes(mtabench, pair, head, fail_on, code, verdict):
    pair(head=head)
    asked = ["--fail-on", fail_on] if fail_on else []
    got, out, err = mtabench("compare", "base.csv", "head.csv", *asked)
    assert (got, err) == (code, "")
    assert verdict in out
    if "same" not in verdict:
        assert verdict in out.splitlines()[1]  # the most urgent comes first
    start = f"fails with exit code {code}: " if code else "passes: "
    assert out.splitlines()[-1].startswith(start)


def test_a_lost_benchmark_fails_also_where_the_first_run_has_no_valid_time(mtabench, pair):
    pair(base={case(512): ("invalid", "throttled")})
    code, out, _ = mtabench("compare", "base.csv", "head.csv")
    assert code == 1
    assert "gone: not in the second run, and the first run's is invalid: throttled" in out


def test_what_passes_although_it_is_in_doubt_is_said(mtabench, pair):
    pair(head={case(64): ("oom", "no room"), case(128): None, case(256): rounds(4.0, noise=0.3)})
    code, out, _ = mtabench("compare", "base.csv", "head.csv", "--fail-on", "slower")
    assert code == 0
    assert out.splitlines()[-1] == (
        "passes: none is slower (--fail-on slower), although there are 1 broken, 1 gone, 1 unclear"
    )


def test_the_default_of_fail_on_is_that_of_compare():
    defaults = {inspect.signature(one).parameters["fail_on"].default for one in (cli.compare, cli.ab)}
    assert list(map(parse_fail_on, defaults)) == [FAIL_ON]
    assert parse_fail_on(" unclear, slower") == ("slower", "unclear")


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
    assert "unclear: the medians changed the other way, 1.0" in out.splitlines()[1]
    assert "to 1.05 ms" in out.splitlines()[1]


@pytest.mark.parametrize("ms", [0.5, 1.05, 100.0])
def test_a_change_beside_another_job_is_unclear(mtabench, pair, tmp_path, ms):
    """Of one process; the pairs of `ab` show themselves what another job did."""
    pair(head={case(64): rounds(ms, seed=20)}, run_delay=0.4)
    code, out, _ = mtabench("compare", "base.csv", "head.csv", "--fail-on", "slower,unclear")
    assert code == 3
    assert "unclear: threads waited for a core, so another job ran" in out.splitlines()[1]
    assert "2 same" in out
    runs = [read_run(tmp_path / name) for name in ("base.csv", "head.csv")]
    twice = [replace(run, cells={key: replace(cell, processes=cell.processes * 2) for key, cell in run.cells.items()})
             for run in runs]  # fmt: skip
    assert compare(*twice, 0.02).counts["unclear"] == 0


def test_every_output_says_what_could_have_been_found(mtabench, pair):
    pair(head={case(64): rounds(1.0, noise=0.05, seed=20), case(512): rounds(8.0)})
    _, out, _ = mtabench("compare", "base.csv", "head.csv", "--junit", "out.xml", "--markdown", "out.md")
    (sentence,) = [line for line in out.splitlines() if line.startswith("detectable")]
    least, most = re.findall(r"[\d.]+ %", sentence)[1:]
    assert sentence.startswith("detectable in 95 % of comparisons: a slowdown of ")
    assert float(least[:-2]) < 2.5 < float(most[:-2])
    for text in (out, Path("out.md").read_text(), Path("out.xml").read_text()):
        assert sentence in text
        assert text.count(most) == 2  # of its cell, and in the sentence
        assert text.count(least) >= 2


def test_times_that_did_not_settle_are_marked_in_every_output(mtabench, pair):
    pair(head={case(64): rounds(1.0, noise=0.05, seed=20)})
    _, out, _ = mtabench("compare", "base.csv", "head.csv", "--junit", "out.xml", "--markdown", "out.md")
    sentence = "~ 1 of 6 times did not settle: the 95 % interval is wider than ±0.5 %"
    assert sentence in out.splitlines()
    assert len(re.findall(r" ~\d", out)) == 1
    assert sentence in Path("out.xml").read_text()
    assert sentence.replace("~", r"\~") in Path("out.md").read_text()
    assert " to ~" in Path("out.xml").read_text()
    assert r"| \~" in Path("out.md").read_text()


def test_one_round_finds_nothing(mtabench, pair):
    pair(head={one: rounds(ms, count=1) for one, ms in WITH_TIME.items()})
    assert "detectable" not in "".join(mtabench("compare", "base.csv", "head.csv")[1].splitlines()[1:])


@pytest.mark.parametrize("columns", [20, 40, 60, 72, 80])
def test_a_narrow_terminal_has_every_name_number_and_verdict(mtabench, pair, monkeypatch, columns):
    pair(head={case(64): rounds(1234.0, seed=20), case(128): rounds(0.012345)})
    wide = mtabench("compare", "base.csv", "head.csv")[1]
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = mtabench("compare", "base.csv", "head.csv")
    assert code == 1
    cells = [line for line in wide.splitlines()[1:] if line.startswith("fwd ")]
    assert len(cells) == 3
    assert [line.partition(":")[0] for line in out.splitlines()[:4:2]] == ["slower", "faster"] or columns < 72
    numbers = {word for line in cells for word in re.findall(r"[-+]?\d+\.\d+|1234", line)}
    assert "1234" in numbers
    assert numbers <= set(re.findall(r"[-+]?\d+\.\d+|1234", out))
    for word in ("eager", "slower", "faster", "same", "128"):
        assert word in out


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
    assert parse_threshold("0.5%") == pytest.approx(0.005)


def test_the_same_files_give_the_same_verdict(pair, tmp_path):
    pair(head={case(64): rounds(1.02, noise=0.02, seed=20)})
    base, head = (read_run(tmp_path / name) for name in ("base.csv", "head.csv"))
    assert compare(base, head, 0.02) == compare(base, head, 0.02)


def test_swapping_the_runs_swaps_slower_and_faster(pair, tmp_path):
    pair(head={case(64): rounds(1.05, seed=20)})
    base, head = (read_run(tmp_path / name) for name in ("base.csv", "head.csv"))
    (slower, *_), (faster, *_) = compare(base, head, 0.02).cells, compare(head, base, 0.02).cells
    assert (slower.verdict, faster.verdict) == ("slower", "faster")
    assert 1 + slower.change == pytest.approx(1 / (1 + faster.change))
    assert "measured after" in compare(head, base, 0.02).notes[0]


def test_other_versions_are_noted(mtabench, pair):
    pair(torch="2.14.0")
    code, out, _ = mtabench("compare", "base.csv", "head.csv")
    assert code == 0
    assert "torch differs, 2.13.0 and 2.14.0: it may be what changed the times" in out


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"device": "another"}, "their device differs, some, device and another"),
        ({"cache": "cold"}, "their cache differs, warm and cold"),
    ],
)
def test_runs_of_another_kind_exit_with_5_and_the_reports_say_so(mtabench, pair, tmp_path, facts, sentence):
    pair(**facts)
    code, out, err = mtabench("compare", "base.csv", "head.csv", "--junit", "out.xml", "--markdown", "out.md")
    assert (code, out, len(err.splitlines())) == (5, "", 1)
    assert sentence in err
    assert sentence in Path("out.md").read_text()
    suite = ElementTree.parse("out.xml").getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("errors")) == ("1", "1")
    assert sentence in suite.find("testcase/error").get("message")
    with pytest.raises(NotComparableError):
        compare(read_run(tmp_path / "base.csv"), read_run(tmp_path / "head.csv"), 0.02)


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"head": dict.fromkeys(WITH_TIME) | {case(512): rounds(8.0)}}, "gone: not in the second run"),
        ({"head": dict.fromkeys(WITH_TIME, ("invalid", "throttled"))}, "unclear: invalid: throttled"),
        ({"base": dict.fromkeys(WITH_TIME, ("oom", "")), "head": dict.fromkeys(WITH_TIME, ("oom", ""))}, ""),
        ({"base": dict.fromkeys(WITH_TIME, ("oom", ""))}, "new: the first run's is oom"),
    ],
)
def test_a_gate_that_compared_nothing_does_not_pass(mtabench, pair, monkeypatch, facts, verdict):
    pair(**facts)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    code, out, err = mtabench("compare", "base.csv", "head.csv", "--junit", "out.xml", "--markdown", "out.md")
    assert (code, err) == (5, "")
    sentence = "fails with exit code 5: nothing was compared, since no cell has a time in both runs"
    assert verdict in out
    assert sentence in out.splitlines()
    assert f"::error title=mtabench%3A nothing compared::{sentence}" in out.splitlines()
    assert sentence in Path("out.md").read_text()
    (error,) = ElementTree.parse("out.xml").getroot().iter("error")
    assert error.get("message") == sentence


def edit(name, change):
    def apply(folder):
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def without_column(content):
    return b"\n".join(b",".join(line.split(b",")[1:]) for line in content.splitlines()) + b"\n"


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (edit("head.csv", lambda x: x[:-40]), "ends in the middle of a row"),
        (edit("head.csv", lambda x: x[: x.find(b"\n", 900) // 2]), "has no rows"),
        (edit("head.csv", lambda x: b""), "has no rows"),
        (edit("head.csv", lambda x: b"\x00\xff\n"), "cannot read"),
        (edit("head.csv", lambda x: x + x.splitlines(keepends=True)[-1]), "has the cell fwd/eager/"),
        (edit("head.csv", without_column), "has no column schema_version"),
        (edit("head.csv", lambda x: x.replace(b",ok,", b",fine,", 1)), "has 'fine' in the column status"),
        (edit("head.csv", lambda x: x.replace(b",64,16,6,", b",nan,16,6,", 1)), "has 'nan' in the column seq"),
        (edit("head.csv", lambda x: x.replace(b",64,16,6,", b",,16,6,", 1)), "has nothing in the column seq"),
        (edit("head.csv", lambda x: x.replace(b",100,", b",100,nan,", 1)), "fields"),
        (edit("head.csv", lambda x: x.replace(b",10,100,", b",10,nan,", 1)), "has 'nan' in the column samples"),
        (edit("head.csv", lambda x: x.replace(b",10,100,", b",10,,", 1)), "no number in the column samples"),
        (edit("head.samples.csv", lambda x: x[:-4]), "has 99 samples in 10 rounds"),
        (edit("head.samples.csv", lambda x: x[:900]), "samples in"),
        (edit("head.samples.csv", lambda x: b""), "is not a samples file"),
        (edit("head.samples.csv", lambda x: x + b"head,cell,1,1,nan\n"), "is not a sample"),
        (edit("head.samples.csv", lambda x: x + b"head,cell,1\n"), "has 3 fields, and its header 5"),
        (edit("head.samples.csv", lambda x: x.replace(b",1.0", b",3.0").replace(b",0.9", b",2.9")), "has the median"),
        (
            lambda folder: (folder / "head.samples.csv").unlink(),
            "no file head.samples.csv, the raw samples of head.csv",
        ),
        (lambda folder: (folder / "head.csv").unlink(), "no file head.csv"),
        (lambda folder: shutil.copy(folder / "base.csv", folder / "head.csv"), "has 0 samples in 0 rounds"),
        (
            lambda folder: [shutil.copy(folder / f"base.{x}", folder / f"head.{x}") for x in ("csv", "samples.csv")],
            "hold the same run",
        ),
    ],
)
def test_bad_files_are_one_sentence_and_exit_code_2(mtabench, pair, tmp_path, spoil, sentence):
    pair()
    spoil(tmp_path)
    before = contents(tmp_path)
    code, out, err = mtabench("compare", "base.csv", "head.csv", "--markdown", "out.md", "--bencher", "out.json")
    assert (code, out) == (2, "")
    assert err.startswith("mtabench: ")
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("base.csv", "HEAD.csv"),
        ("base.csv base.csv", "hold the same run"),
        ("base.csv head.csv --threshold 2", "expected a percentage"),
        ("base.csv head.csv --threshold -2%", "expected a percentage"),
        ("base.csv head.csv --threshold nan%", "expected a percentage"),
        (
            "base.csv head.csv --fail-on same",
            "'same' is not a verdict; expected some of broken,slower,gone,unclear,new",
        ),
        ("base.csv head.csv --fail-on slower,lost", "'lost' is not a verdict"),
        ("base.csv head.csv --fail-on ,", "'' is not a verdict"),
        ("base.csv head.csv --format html", "expected one of table, markdown"),
        ("base.csv head.csv --markdown base.csv", "would overwrite what is compared"),
        ("base.csv head.csv --junit head.samples.csv", "would overwrite what is compared"),
        ("base.csv head.csv --junit out --markdown ./out", "another report"),
        ("base.csv head.csv --bencher .", "is a folder"),
        ("base.csv head.csv --github-action-benchmark base.csv/out", "cannot write"),
    ],
)
def test_bad_options_are_one_sentence_and_exit_code_2(mtabench, pair, tmp_path, words, sentence):
    pair()
    before = contents(tmp_path)
    code, out, err = mtabench("compare", *words.split())
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert sentence in err
    assert contents(tmp_path) == before


def test_decode_files_from_before_splits_could_be_swept(tmp_path):
    """Their rows and their samples leave the splits of `triton` empty; a row read now has auto."""
    old = case(64, "triton", pass_="decode", splits=None)
    write_run(tmp_path / "old.csv", {old: rounds(1.0)})
    write_run(tmp_path / "new.csv", {case(64, "triton", pass_="decode", splits="auto"): rounds(1.1)}, run_id="new")
    (found,) = compare(read_run(tmp_path / "old.csv"), read_run(tmp_path / "new.csv"), 0.02).cells
    assert found.verdict == "slower"


@pytest.fixture
def reports(mtabench, pair, tmp_path, monkeypatch):
    """All reports of a comparison with a bit of everything, under GitHub's environment; and what was printed."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    (tmp_path / "step.md").write_text("before\n")
    odd = "50 % | <b>\x1b[1m & so"
    pair(head={case(64): rounds(1.1, seed=20), case(128): ("error", odd), case(512): rounds(8.0), case(256): None})
    words = [f"--{kind}={kind}" for kind in ("markdown", "junit", "github-action-benchmark", "bencher")]
    code, out, _ = mtabench("compare", "base.csv", "head.csv", *words)
    assert code == 1
    return out, {word[2:].split("=")[0]: (tmp_path / word.split("=")[1]).read_text() for word in words}


def test_markdown_and_step_summary(reports, tmp_path):
    text = reports[1]["markdown"]
    assert text.splitlines()[2].startswith("fails with exit code 1: 1 broken, 1 slower, 1 gone (--fail-on broken,slow")
    assert "- 1 broken, 1 slower, 1 gone, 1 new; changes below 2 % do not count" in text
    rows = [line for line in text.splitlines() if line.startswith("| fwd")]
    assert [line.count(" | ") for line in rows] == [6] * 4
    assert "50 % \\| &lt;b&gt;\\\\x1b\\[1m &amp; so" in text
    assert (tmp_path / "step.md").read_text() == "before\n" + text


def test_junit_xml(reports):
    root = ElementTree.fromstring(reports[1]["junit"])
    suite = root.find("testsuite")
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4", "failures": "3", "errors": "0", "skipped": "1"
    }  # fmt: skip
    failures = {found.get("type"): found.get("message") for found in root.iter("failure")}
    assert set(failures) == {"broken", "slower", "gone"}
    assert "1.1" in failures["slower"]
    assert all(test.get("name").startswith("fwd eager fp32") for test in root.iter("testcase"))


def test_every_output_ends_with_the_same_conclusions(reports):
    """The terminal, Markdown and JUnit, and what each cell is called there."""
    out, files = reports
    printed = [line for line in out.splitlines() if not line.startswith(("::", "cell ", "fwd "))]
    assert [line.partition(" ")[0] for line in printed] == ["detectable", "1", "fails"]
    root = ElementTree.fromstring(files["junit"])
    assert root.find("testsuite/system-out").text.splitlines() == printed
    *others, outcome = printed
    assert [line for line in files["markdown"].splitlines() if not line.startswith(("#", "|")) and line] == [
        f"{outcome}.", *(f"- {one}" for one in others)
    ]  # fmt: skip
    cells = [line for line in out.splitlines() if line.startswith("fwd ")]
    numbers = re.compile(r"(\S+ %|not in the second run|: no room)")
    for line, case_ in zip(cells, root.iter("testcase"), strict=True):
        assert line.startswith(case_.get("name"))
        said = " ".join(one.get("message") or one.text for one in case_)
        assert set(numbers.findall(line)) - {"50 %"} <= set(numbers.findall(said.replace("(", "")))


def test_annotations(reports):
    lines = [line for line in reports[0].splitlines() if line.startswith("::")]
    assert len(lines) == 3
    assert lines[0].startswith("::error title=mtabench%3A broken::fwd eager fp32 batch 1 heads 2 seq 128")
    assert "50 %25 |" in lines[0]


def test_exports_for_other_tools(reports):
    entries = json.loads(reports[1]["github-action-benchmark"])
    assert [(entry["unit"], set(entry)) for entry in entries] == [
        ("ms", {"name", "unit", "value", "range", "extra"})
    ] * 2
    metrics = json.loads(reports[1]["bencher"])
    assert list(metrics) == [entry["name"] for entry in entries]
    latency = metrics[entries[0]["name"]]["latency"]
    assert latency["lower_value"] <= latency["value"] <= latency["upper_value"]
    assert latency["value"] == pytest.approx(entries[0]["value"] * 1e6)


def test_github_shows_ten_annotations_at_most(mtabench, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    cells = [case(16 * i) for i in range(1, 13)]
    write_run(tmp_path / "base.csv", {one: rounds(1.0, seed=i) for i, one in enumerate(cells)})
    write_run(tmp_path / "head.csv", {one: rounds(1.2, seed=i) for i, one in enumerate(cells)}, run_id="head")
    code, out, _ = mtabench("compare", "base.csv", "head.csv", "--format", "markdown")
    lines = [line for line in out.splitlines() if line.startswith("::error")]
    assert (code, len(lines)) == (1, 10)
    assert "3 more are in the step summary" in lines[-1]
    assert out.startswith("## mtabench compare")


def test_one_run_given_as_two_is_refused(pair, tmp_path):
    pair()
    run = read_run(tmp_path / "base.csv")
    with pytest.raises(UsageError, match="same run"):
        compare(run, run, 0.02)
