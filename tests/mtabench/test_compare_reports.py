"""What a comparison writes: the terminal, Markdown, JUnit and GitHub."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from written_runs import case, rounds, write_pair, write_run


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


def test_changes_beyond_all_measure_are_factors(mtabench, pair):
    wild = [[0.001, 1.0, 1000.0]] * 2 + [[1e6] * 3]
    pair(base={case(512): rounds(1.0), case(1024): rounds(1.0)}, head={case(512): rounds(50.0), case(1024): wild})
    _, out, _ = mtabench("compare", "base.csv", "head.csv", "--markdown", "out.md")
    slower, noisy = (next(line for line in out.splitlines() if f" {seq} " in line) for seq in ("512", "1k"))
    assert re.search(r" (49|50)(\.\d+)?x as long +(49|50)(\.\d+)?x to (49|50)(\.\d+)?x ", slower)
    assert re.search(r" under 0\.001x to over 1000x ", noisy)
    assert "x as long | " in Path("out.md").read_text()
    assert not re.search(r"\d{4,}\.\d\d %|\d,\d", out)


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


@pytest.fixture
def reports(mtabench, pair, tmp_path, monkeypatch):
    """All reports of a comparison with a bit of everything, under GitHub's environment; and what was printed."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    (tmp_path / "step.md").write_text("before\n")
    odd = "50 % | <b>\x1b[1m & so"
    pair(head={case(64): rounds(1.1, seed=20), case(128): ("error", odd), case(512): rounds(8.0), case(256): None})
    words = [f"--{kind}={kind}" for kind in ("markdown", "junit")]
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
    printed = [line for line in out.splitlines() if not line.startswith(("::", "all cells", "impl ", "eager ", "["))]
    assert [line.partition(" ")[0] for line in printed] == ["detectable", "1", "fails"]
    root = ElementTree.fromstring(files["junit"])
    assert root.find("testsuite/system-out").text.splitlines() == printed
    *others, outcome = printed
    assert [line for line in files["markdown"].splitlines() if not line.startswith(("#", "|")) and line] == [
        f"{outcome}.", *(f"- {one}" for one in others)
    ]  # fmt: skip
    cells = [line for line in out.splitlines() if line.startswith("eager ")]
    numbers = re.compile(r"(\S+ %|not in the second run|: no room)")
    for line, case_ in zip(cells, root.iter("testcase"), strict=True):
        assert f" {line.split()[0]} " in case_.get("name")
        text = " ".join(one.get("message") or one.text for one in case_)
        assert set(numbers.findall(line)) - {"50 %"} <= set(numbers.findall(text.replace("(", "")))


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


def test_what_a_run_lacks_of_an_implementation_is_one_sentence(mtabench, tmp_path):
    more = {case(seq, "triton"): rounds(1.0, seed=seq) for seq in range(512, 520)}
    write_pair(tmp_path, base=more)
    code, out, _ = mtabench("compare", "base.csv", "head.csv")
    assert code == 1
    assert out.splitlines().count("gone: 8 cells of triton: not in the second run") == 1
    assert out.count("triton") == 1
    mtabench("compare", "base.csv", "head.csv", "--markdown", "a.md")
    text = Path("a.md").read_text()
    assert text.count("triton") == 1
    assert "8 gone" in text
