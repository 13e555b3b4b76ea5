"""`mtabench compare --across-devices`: changes of times from one device to another, without a verdict."""

import re
from pathlib import Path

import pytest
from command_line import contents, printed, refused
from written_runs import case, rounds, write_pair, write_run

from mtabench.results.results_file import samples_path

H200 = Path(__file__).parents[2] / "results" / "nvidia-h200" / "fwd.csv"
ACROSS = ("compare", "--across-devices", "base.csv", "head.csv")


def changes(out):
    """The change of each cell by its length, and its interval in percent where it has one."""
    found = re.findall(r"^eager +(\d+) +~?\S+ +~?\S+ +(\S+) %(?: +(\S+) to (\S+) %)?$", out, re.MULTILINE)
    return {seq: tuple(float(text) for text in texts if text) for seq, *texts in found}


def test_changes_have_intervals_and_no_verdict_and_what_differs_is_said(mtabench, tmp_path):
    cells = {case(512): ("oom", "no room"), case(128): rounds(1.0, noise=0.05, seed=20)}
    write_pair(tmp_path, base={case(512): rounds(1.0)}, head=cells, device="other", cache="cold")
    assert mtabench("compare", "base.csv", "head.csv")[0] == 5
    out = printed(mtabench(*ACROSS, "--markdown", "out.md"))
    found = changes(out)
    assert found.keys() == {"64", "128", "256"}
    assert found["128"][0] == pytest.approx(-50, abs=1)
    assert all(low < change < high for change, low, high in found.values())
    assert not re.search("slower|same|passes|fails|unclear", out)
    sentences = (
        "eager: 0.79", "x as long on the head's device, the geometric mean of 3 cells",
        "device differs, some, device and other", "cache differs, warm and cold",
        "1 cell of base without a time in the other file", "1 of 6 times did not settle",
    )  # fmt: skip
    text = Path("out.md").read_text()
    assert all(sentence in out and sentence in text for sentence in sentences), out
    assert text.count("| fwd eager fp32") == 3


@pytest.mark.parametrize("lacking", [["base"], ["base", "head"]])
def test_without_samples_it_says_what_is_missing(mtabench, tmp_path, lacking):
    write_pair(tmp_path, device="other")
    for name in lacking:
        samples_path(tmp_path / f"{name}.csv").unlink()
    out = printed(mtabench(*ACROSS))
    assert [len(texts) for texts in changes(out).values()] == [1, 1, 1]
    files = " and ".join(f"{name}.samples.csv" for name in lacking)
    assert f"no intervals, and changes of medians: raw samples are missing, there is no file {files}" in out


def test_what_cannot_be_compared_is_refused(mtabench, tmp_path):
    write_pair(tmp_path, device="other")
    for option in (("--junit", "x"), ("--fail-on", "broken,slower,gone"), ("--threshold", "3%")):
        refused(mtabench(*ACROSS, *option), f"{option[0]} is for verdicts")
    path = samples_path(tmp_path / "head.csv")
    path.write_text(path.read_text()[:900])
    before = contents(tmp_path)
    refused(mtabench(*ACROSS, "--markdown", "x"), "head.samples.csv has", "samples in")
    write_run(tmp_path / "other.csv", {case(64, dtype="fp16"): rounds(1.0)}, run_id="b")
    code, out, err = mtabench(*ACROSS[:3], "other.csv")
    assert (code, out) == (5, "")
    assert "base.csv and other.csv have no cell with a time in common; measure the same shapes" in err
    assert before.items() <= contents(tmp_path).items()


def test_the_committed_results_are_one_side(mtabench, tmp_path):
    (tmp_path / "mine.csv").write_text(H200.read_text().replace("NVIDIA H200", "NVIDIA A100"))
    out = printed(mtabench("compare", "--across-devices", "mine.csv", H200))
    assert len(re.findall(r"\+0\.00 %$", out, re.MULTILINE)) == 60
    assert "hopper: 1x as long on the head's device, the geometric mean of 10 cells" in out
