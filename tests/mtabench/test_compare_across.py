"""`mtabench compare --across-devices`: ratios of times on two devices, without a verdict."""

import re
from pathlib import Path

import pytest
from command_line import contents, make_runner, refused
from written_runs import case, rounds, write_pair, write_run

from mtabench.results.results_file import samples_path

H200 = Path(__file__).parents[2] / "results" / "nvidia-h200" / "fwd.csv"


@pytest.fixture
def mtabench(monkeypatch, capsys, tmp_path):
    return make_runner(monkeypatch, capsys, tmp_path, columns=80)


ACROSS = ("compare", "--across-devices", "base.csv", "head.csv")


def ratios(out):
    """The ratio and the interval of each cell, by its length."""
    found = re.findall(r"^\w[\w-]* +(\d+k?) +[\d.]+ +[\d.]+ +([\d.]+)(?: +([\d.]+) to ([\d.]+))?$", out, re.MULTILINE)
    return {seq: tuple(float(text) for text in texts if text) for seq, *texts in found}


def test_ratios_have_intervals_and_no_verdict(mtabench, tmp_path):
    write_pair(tmp_path, head={case(128): rounds(1.0, seed=20)}, device="other")
    refusal = mtabench(*[word for word in ACROSS if word != "--across-devices"])
    assert refusal[0] == 5
    code, out, err = mtabench(*ACROSS)
    assert (code, err) == (0, "")
    found = ratios(out)
    assert found.keys() == {"64", "128", "256"}
    assert found["128"][0] == pytest.approx(0.5, rel=0.01)
    assert all(low <= ratio <= high and low < high for ratio, low, high in found.values())
    assert not re.search("slower|same|passes|fails|unclear", out)
    assert "base: some, device, torch 2.13.0, triton 3.6.0 (base.csv)" in out
    assert "eager: 0.79" in out
    assert "the geometric mean of 3 cells" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("lacking", [["base"], ["head"], ["base", "head"]])
def test_without_samples_it_says_what_is_missing(mtabench, tmp_path, lacking):
    write_pair(tmp_path, device="other")
    for name in lacking:
        samples_path(tmp_path / f"{name}.csv").unlink()
    code, out, _ = mtabench(*ACROSS)
    assert code == 0
    assert [len(texts) for texts in ratios(out).values()] == [1, 1, 1]
    said = " ".join(out.split())
    files = " and ".join(f"{name}.samples.csv" for name in lacking)
    assert f"no intervals, and ratios of medians: raw samples are missing, there is no file {files}" in said


def test_samples_that_are_spoiled_are_still_refused(mtabench, tmp_path):
    write_pair(tmp_path, device="other")
    path = samples_path(tmp_path / "head.csv")
    path.write_text(path.read_text()[:900])
    refused(mtabench(*ACROSS), "head.samples.csv has", "samples in")


def test_what_differs_besides_the_device_and_what_has_no_ratio_is_said(mtabench, tmp_path):
    write_run(tmp_path / "base.csv", {case(64): rounds(1.0), case(128): rounds(1.0), case(256): rounds(1.0)})
    cells = {case(64): rounds(2.0, count=1), case(128): ("oom", "no room")}
    write_run(tmp_path / "head.csv", cells, run_id="b", device="other", cache="cold")
    code, out, _ = mtabench(*ACROSS)
    said = " ".join(out.split())
    assert code == 0
    assert ratios(out)["64"] == (2.0,) or ratios(out)["64"][0] == pytest.approx(2, rel=0.01)
    assert "no interval: one round says nothing of the noise" in said
    assert "cache differs, warm and cold: ratios depend on it" in said
    assert "2 cells of base without a time in head.csv; 1 of them failed there, such as oom: no room" in said
    write_run(tmp_path / "same.csv", {case(64): rounds(2.0)}, run_id="c")
    assert "both are of the same device" in mtabench("compare", "base.csv", "same.csv", "--across-devices")[1]


def test_times_that_did_not_settle_are_marked(mtabench, tmp_path):
    write_pair(tmp_path, head={case(64): rounds(1.0, noise=0.05, seed=20)}, device="other")
    _, out, _ = mtabench(*ACROSS, "--markdown", "out.md")
    sentence = "~ 1 of 6 times did not settle: the 95 % interval is wider than ±0.5 %"
    assert sentence in out.splitlines()
    assert len(re.findall(r" ~\d", out)) == 1
    text = (tmp_path / "out.md").read_text()
    assert sentence.replace("~", r"\~") in text
    assert r"| \~" in text


def test_nothing_in_common_ends_with_code_5(mtabench, tmp_path):
    write_run(tmp_path / "base.csv", {case(64): rounds(1.0)})
    write_run(tmp_path / "head.csv", {case(64, dtype="fp16"): rounds(1.0)}, run_id="b", device="other")
    code, out, err = mtabench(*ACROSS)
    assert (code, out) == (5, "")
    assert "base.csv and head.csv have no cell with a time in common; measure the same shapes" in err


def test_the_committed_results_are_one_side(mtabench, tmp_path):
    text = H200.read_text().replace("NVIDIA H200", "NVIDIA A100")
    (tmp_path / "mine.csv").write_text(text)
    code, out, _ = mtabench("compare", "--across-devices", "mine.csv", H200)
    assert code == 0
    assert out.count(" 1.000\n") == 60
    assert "base: NVIDIA A100, torch 2.11.0+cu130, triton 3.6.0 (mine.csv)" in out
    assert "hopper: 1.000, the geometric mean of 10 cells" in out


def test_markdown_is_printed_and_written_and_options_of_verdicts_are_refused(mtabench, tmp_path):
    write_pair(tmp_path, device="other")
    out = mtabench(*ACROSS, "--markdown", "out.md", "--format", "markdown")[1]
    assert (tmp_path / "out.md").read_text() == out
    assert out.count("| fwd eager fp32 batch 1 heads 2 seq") == 3
    before = contents(tmp_path)
    refused(mtabench(*ACROSS, "--junit", "x"), "--junit is for verdicts")
    refused(mtabench(*ACROSS, "--rerun-unclear"), "--rerun-unclear is for verdicts")
    refused(mtabench(*ACROSS, "--fail-on", "broken,slower,gone"), "--fail-on is for verdicts")
    refused(mtabench(*ACROSS, "--threshold", "3%"), "--threshold is for verdicts")
    refused(mtabench(*ACROSS, "--markdown", "out.md"), "out.md already exists")
    assert contents(tmp_path) == before
