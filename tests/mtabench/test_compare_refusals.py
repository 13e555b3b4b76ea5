"""Comparisons that cannot be made: runs of another kind, nothing in common, bad files and bad options."""

import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from command_line import contents, refused
from written_runs import WITH_TIME, case, rounds

from mtabench.comparing.compare import NotComparableError, compare
from mtabench.results.runs import read_run, read_samples


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"device": "another"}, "their device differs, some, device and another"),
        ({"cache": "cold"}, "their cache differs, warm and cold"),
        (
            {"device": "another", "head": dict.fromkeys(WITH_TIME) | {case(512): rounds(8.0)}},
            "have no cell in common, and their devices differ, some, device, and another",
        ),
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


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (edit("head.csv", lambda x: x[:-40]), "ends in the middle of a row"),
        (edit("head.csv", lambda x: x[: x.find(b"\n", 900) // 2]), "has no rows"),
        (edit("head.csv", lambda x: b""), "has no rows"),
        (edit("head.csv", lambda x: x + x.splitlines(keepends=True)[-1]), "has the cell fwd eager fp32 batch 1"),
        (edit("head.csv", lambda x: x.replace(b",64,16,6,", b",,16,6,", 1)), "has nothing in the column seq"),
        (edit("head.csv", lambda x: x.replace(b",10,100,", b",10,nan,", 1)), "has 'nan' in the column samples"),
        (edit("head.csv", lambda x: x.replace(b",10,100,", b",10,,", 1)), "no number in the column samples"),
        (edit("head.samples.csv", lambda x: x[:-4]), "has 99 samples in 10 rounds"),
        (edit("head.samples.csv", lambda x: x[:900]), "samples in"),
        (edit("head.samples.csv", lambda x: b""), "is not a samples file"),
        (edit("head.samples.csv", lambda x: x + b"head,cell,1,1,nan\n"), "line 302 of head.samples"),
        (edit("head.samples.csv", lambda x: x + b"head,cell,1,1,1.5\nhead,cell,0,1,1.5\n"), "line 303 of head.samples"),
        (edit("head.samples.csv", lambda x: x + b'head,cell,1,1,"1,5"\n'), "line 302 of head.samples"),
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
    refused(mtabench("compare", "base.csv", "head.csv", "--markdown", "out.md", "--junit", "out.xml"), sentence)
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
        ("base.csv head.csv --markdown base.csv", "is one of the files that are read"),
        ("base.csv head.csv --junit head.samples.csv", "is one of the files that are read"),
        ("base.csv head.csv --junit out --markdown ./out", "is the file of another option"),
        ("base.csv head.csv --junit .", "is a folder"),
        ("base.csv head.csv --junit base.csv/out", "cannot write"),
    ],
)
def test_bad_options_are_one_sentence_and_exit_code_2(mtabench, pair, tmp_path, words, sentence):
    pair()
    before = contents(tmp_path)
    refused(mtabench("compare", *words.split()), sentence)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("option", ["--markdown", "--junit"])
def test_a_file_is_replaced_only_when_asked(mtabench, pair, tmp_path, option):
    pair()
    (tmp_path / "mine").write_text("precious")
    sentence = f"mine already exists; give --overwrite to replace it, or another {option}\n"
    refused(mtabench("compare", "base.csv", "head.csv", option, "mine"), sentence)
    assert (tmp_path / "mine").read_text() == "precious"
    assert mtabench("compare", "base.csv", "head.csv", option, "mine", "--overwrite")[0] == 0
    assert "precious" not in (tmp_path / "mine").read_text()
    assert mtabench("compare", "base.csv", "head.csv", option, "/dev/null")[0] == 0


@pytest.mark.parametrize(("cell", "first"), [("c", "1"), ("c", "1.0"), ("é", "1")])
def test_samples_of_a_round_need_not_stand_together(tmp_path, cell, first):
    """Whether pandas reads the file as it is, or it is checked line by line."""
    lines = [f"NA,{cell},{first},1,2.5", f"NA,{cell},2,1,1e-3", f"7,{cell},1,1,4", f"NA,{cell},1,2,3"]
    (tmp_path / "a.samples.csv").write_text("\n".join(["run_id,cell,round,sample,ms", *lines, "NA,c,1,3,0.25"]))
    assert read_samples(tmp_path / "a.csv") == {("NA", cell): ((2.5, 3.0), (0.001,)), ("7", cell): ((4.0,),)}
