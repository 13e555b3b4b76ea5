"""Where a measurement runs, and what its device can do at most: measured, kept beside results, never misread."""

import json
from pathlib import Path

import pytest
import torch
from paired_runs import git
from written_runs import case, rounds, write_run

from mtabench import environment
from mtabench.dashboard.data import write_site
from mtabench.errors import MtabenchError, UsageError
from mtabench.git import BEGINNINGS
from mtabench.measuring import ceilings
from mtabench.measuring.ceilings import Ceilings, keep_ceilings, read_ceilings
from mtabench.pages.page import GENERATOR
from mtabench.results.outputs import FileLock
from mtabench.results.results_file import COLUMNS, SAMPLE_COLUMNS

KNOWN = {"device", "driver", "cuda", "torch", "triton", "mtabench", "git_sha", "git_dirty"}


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment.resolve_device("auto") == environment.resolve_device("cpu") == "cpu"
    with pytest.raises(UsageError, match="--device cpu"):
        environment.resolve_device("cuda")
    with pytest.raises(UsageError, match=r"tpu.*expected auto, cuda or cpu"):
        environment.resolve_device("tpu")


def test_description_of_a_cpu():
    found = environment.describe("cpu")
    assert set(found) >= KNOWN | {"python", "platform", "cpu"}
    assert found["device"] == found["cpu"] != ""
    assert found["torch"] == torch.__version__
    assert found["driver"] == found["cuda"] == ""


def test_revision_of_a_checkout(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "mtabench").mkdir()
    (tmp_path / "mtabench" / "a.py").write_text("a")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a")
    sha, dirty = environment.git_state(tmp_path)
    assert len(sha) == 12
    assert dirty is False
    (tmp_path / "results.csv").write_text("measured")
    assert environment.git_state(tmp_path) == (sha, False)
    (tmp_path / "mtabench" / "a.py").write_text("b")
    assert environment.git_state(tmp_path) == (sha, True)
    # An installed package lies within someone else's checkout, perhaps: that is not its revision.
    assert environment.git_state(tmp_path / "mtabench") == ("", None)


@pytest.fixture
def project(tmp_path):
    """A committed project of somebody's, with a file of kernels in a subfolder."""
    root = tmp_path / "project"
    (root / "kernels").mkdir(parents=True)
    (root / "kernels/mine.py").write_text("a")
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "-m", "a")
    return root


def is_dirty(project):
    return environment.git_columns([project / "kernels/mine.py"])["git_dirty"]


def test_what_mtabench_writes_makes_no_project_dirty(project, monkeypatch):
    monkeypatch.chdir(project / "kernels")
    for path in (Path("mtabench-results/fwd.csv"), Path("run.csv"), Path("../history/fwd.csv")):
        write_run(path, {case(): rounds(2.0)})
        Path(f"{path.with_suffix('')}-charts").mkdir()
        Path(f"{path.with_suffix('')}-charts/fwd-time.svg").write_text("<svg/>")
    keep_ceilings(Path("ceilings.json"), environment.describe("cpu"), {"fp32": Ceilings(10.0, 0.1, 12.0)})
    FileLock(Path("run.csv")).acquire("a sweep")
    Path("run-report.html").write_text(f"<!doctype html>\n{GENERATOR}")
    write_site(Path("../site"), {"index.html": "a page"})
    assert is_dirty(project) is False
    assert Path("mtabench-results/.gitignore").read_text().endswith("*\n")
    git(project / "history", "init")  # a checkout of a branch of results, as a workflow has one
    assert is_dirty(project) is False
    assert BEGINNINGS[:2] == (",".join(COLUMNS[:2]).encode() + b",", ",".join(SAMPLE_COLUMNS).encode())
    for foreign in ("notes.csv", "../history/tool.py", "run-charts/helper.py"):
        Path(foreign).write_text("code")
        assert is_dirty(project) is True
        Path(foreign).unlink()
    assert is_dirty(project) is False


def test_no_configuration_hides_a_change(project):
    git(project, "config", "status.showUntrackedFiles", "no")
    git(project, "config", "diff.ignoreSubmodules", "all")
    git(project, "-c", "protocol.file.allow=always", "submodule", "add", str(project), "part")
    git(project, "commit", "-m", "b")
    assert is_dirty(project) is False
    (project / "part/kernels/mine.py").write_text("b")
    assert is_dirty(project) is True
    git(project / "part", "checkout", ".")
    assert is_dirty(project) is False
    (project / "more.py").write_text("b")
    assert is_dirty(project) is True


def test_a_hook_of_another_project_gives_no_row_its_commit(project, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init")
    git(other, "commit", "--allow-empty", "-m", "other")
    expected = environment.git_columns([project / "kernels/mine.py"])
    for name, value in (("GIT_DIR", other / ".git"), ("GIT_WORK_TREE", other), ("GIT_INDEX_FILE", other / "index")):
        monkeypatch.setenv(name, str(value))
        assert environment.git_columns([project / "kernels/mine.py"]) == expected
    assert expected["git_sha"]


def test_revision_without_a_checkout(tmp_path, monkeypatch):
    assert environment.git_state(tmp_path) == ("", None)
    monkeypatch.setenv("MTABENCH_GIT_SHA", "abc")
    assert environment.git_state(tmp_path) == ("abc", None)


def test_available_memory_heeds_the_container(monkeypatch, tmp_path):
    everything = environment.available_memory_bytes("cpu")
    assert everything > 2**20
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text("5000000\n")
    used.write_text("4000000\n")
    monkeypatch.setattr(environment, "MEMORY_LIMITS", ((str(limit), str(used)),))
    assert environment.available_memory_bytes("cpu") == 1000000
    limit.write_text("max\n")
    assert environment.available_memory_bytes("cpu") > 2**20


@pytest.mark.gpu
def test_description_of_a_gpu():
    found = environment.describe("cuda")
    assert found["device"] == torch.cuda.get_device_name()
    assert found["cuda"] == torch.version.cuda
    assert environment.l2_bytes() > 2**20
    assert environment.available_memory_bytes("cuda") > 2**28


def test_of_a_cpu(monkeypatch):
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", {"cpu": 2**24})
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", {"cpu": 256})
    monkeypatch.setattr(ceilings, "run_delays_s", dict)  # beside whatever this machine does
    found = ceilings.measure_ceilings("cpu", "fp32")
    assert 0.1 < found.copy_gbytes_s <= found.read_gbytes_s < 10_000
    assert 0.0001 < found.matmul_tflops < 100


def test_beside_another_job_a_cpu_has_none(monkeypatch):
    waits = iter([{"1": 0.0}, {"1": 50.0}])
    monkeypatch.setattr(ceilings, "run_delays_s", lambda: next(waits))
    monkeypatch.setattr(ceilings, "_measured", lambda device, dtype: ceilings.Ceilings(1.0, 1.0))
    with pytest.raises(MtabenchError, match=r"fp16 is not known: threads waited for a core \d+ % .* end it, and"):
        ceilings.measure_ceilings("cpu", "fp16")


def test_the_best_call_counts(monkeypatch):
    seconds = iter([3.0, 1.0, 2.0] + [5.0] * ceilings.CALLS)
    monkeypatch.setattr(ceilings, "_seconds", lambda call, device: next(seconds))
    assert ceilings._best_seconds(lambda: None, "cpu") == 1.0


def test_the_fastest_way_to_read_counts(monkeypatch):
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", {"cpu": 2**16})
    left = iter([4.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(ceilings, "_best_seconds", lambda call, device: next(left))
    assert ceilings._read_gbytes_s("cpu") == pytest.approx(65.536e-6)


def test_every_reader_reads_the_whole_buffer_and_writes_next_to_nothing(monkeypatch):
    """A reduction of what it skips would not change: each element that is changed changes the result."""
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", {"cpu": 2**16})
    buffer = ceilings._buffer("cpu")
    for read in ceilings._readers():
        before = read(buffer)
        assert before.nbytes <= buffer.nbytes / ceilings.ROW
        for place in (0, buffer.numel() // 2, buffer.numel() - 1):
            changed = buffer.clone()
            changed[place] = 3.0
            assert not read(changed).equal(before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_of_a_gpu(dtype):
    found = ceilings.measure_ceilings("cuda", dtype)
    assert 100 < found.copy_gbytes_s <= found.read_gbytes_s < 20_000
    assert 1 < found.matmul_tflops < 5_000


HERE = {"device": "GPU A", "driver": "1.2", "torch": "2.13.0", "git_sha": "abc"}


def test_what_is_kept_is_read_for_the_same_device_and_versions_alone(tmp_path):
    path = tmp_path / "new" / "ceilings.json"
    found = {"fp32": Ceilings(3000.0, 50.0, 3300.0), "bf16": Ceilings(3001.0, 700.0)}
    assert read_ceilings(path, HERE) == {}
    keep_ceilings(path, HERE, found)
    assert read_ceilings(path, HERE | {"git_sha": "def"}) == found
    for name in ("device", "driver", "torch"):
        assert read_ceilings(path, HERE | {name: "other"}) == {}


def test_what_is_measured_anew_takes_the_place_of_the_old(tmp_path):
    path = tmp_path / "ceilings.json"
    other = HERE | {"device": "GPU B"}
    keep_ceilings(path, HERE, {"fp32": Ceilings(1.0, 1.0), "bf16": Ceilings(2.0, 2.0)})
    keep_ceilings(path, other, {"fp32": Ceilings(3.0, 3.0)})
    keep_ceilings(path, HERE, {"fp32": Ceilings(4.0, 4.0)})
    assert read_ceilings(path, HERE) == {"bf16": Ceilings(2.0, 2.0), "fp32": Ceilings(4.0, 4.0)}
    assert read_ceilings(path, other) == {"fp32": Ceilings(3.0, 3.0)}
    entries = json.loads(path.read_text())
    assert len(entries) == 3
    assert all(entry["measured_utc"].endswith("Z") for entry in entries)
    assert [file.name for file in tmp_path.iterdir()] == ["ceilings.json"]


def test_a_file_from_before_reading_was_measured_says_nothing_of_it(tmp_path):
    place = {"device": "GPU A", "driver": "1.2", "torch": "2.13.0"}
    entry = place | {"dtype": "fp32", "copy_gbytes_s": 3000.0, "matmul_tflops": 50.0}
    (tmp_path / "ceilings.json").write_text(json.dumps([entry]))
    assert read_ceilings(tmp_path / "ceilings.json", HERE) == {"fp32": Ceilings(3000.0, 50.0, None)}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        pytest.param("[" * 100_000, id="deep"),
        pytest.param(" " * (1 << 20) + "[]", id="large"),
        '{"device": 1}',
        '[{"device": "GPU A"}]',
        '[{"device": "a", "driver": "", "torch": "", "dtype": "fp32", "copy_gbytes_s": 0.0, "matmul_tflops": 1.0}]',
        '[{"device": "a", "driver": "", "torch": "", "dtype": "fp32", "copy_gbytes_s": NaN, "matmul_tflops": 1.0}]',
        '[{"device": "a", "driver": "", "torch": "", "dtype": "fp32", "copy_gbytes_s": 1.0, "matmul_tflops": 1.0, '
        '"read_gbytes_s": 0.0}]',
    ],
)
def test_a_file_of_something_else_is_told_and_left_alone(tmp_path, text):
    path = tmp_path / "ceilings.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"not a file of ceilings.*env --measure"):
        read_ceilings(path, HERE)
    with pytest.raises(UsageError):
        keep_ceilings(path, HERE, {"fp32": Ceilings(1.0, 1.0)})
    assert path.read_text() == text


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        keep_ceilings(tmp_path / "file" / "ceilings.json", HERE, {"fp32": Ceilings(1.0, 1.0)})
