"""Where a measurement runs."""

import subprocess
from pathlib import Path

import pytest
import torch
from written_runs import case, rounds, write_run

from mtabench import environment
from mtabench.dashboard.site import write_site
from mtabench.errors import UsageError
from mtabench.git import BEGINNINGS
from mtabench.measuring.ceilings import Ceilings
from mtabench.measuring.kept_ceilings import keep_ceilings
from mtabench.pages.page import GENERATOR
from mtabench.results.lock import FileLock
from mtabench.results.results_file import COLUMNS, SAMPLE_COLUMNS

KNOWN = {"device", "driver", "cuda", "torch", "triton", "mtabench", "git_sha", "git_dirty"}


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert environment.resolve_device("auto") == environment.resolve_device("cpu") == "cpu"
    with pytest.raises(UsageError, match="--device cpu"):
        environment.resolve_device("cuda")
    with pytest.raises(UsageError, match=r"tpu.*expected auto, cuda or cpu"):
        environment.resolve_device("tpu")


def test_a_gpu_is_taken_if_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert environment.resolve_device("auto") == environment.resolve_device("cuda") == "cuda"
    assert environment.resolve_device("cpu") == "cpu"


def test_description_of_a_cpu():
    found = environment.describe("cpu")
    assert set(found) >= KNOWN | {"python", "platform", "cpu"}
    assert found["device"] == found["cpu"] != ""
    assert found["torch"] == torch.__version__
    assert found["driver"] == found["cuda"] == ""


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


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


def test_without_nvml_nothing_is_known(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert environment.GpuSensor().read() == (None, None)


class FakeNvml:
    NVML_CLOCK_SM = 1
    reasons = 0

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return uuid

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802
        return self.reasons


@pytest.mark.parametrize(("reasons", "throttled"), [(0x00, False), (0x04, False), (0x08, True), (0x40, True)])
def test_a_power_cap_is_no_throttling_but_heat_is(monkeypatch, reasons, throttled):
    nvml = FakeNvml()
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("P", (), {"uuid": "1"}))
    sensor = environment.GpuSensor()
    nvml.reasons = reasons
    assert sensor.read() == (1980.0, throttled)


@pytest.mark.gpu
def test_description_of_a_gpu():
    found = environment.describe("cuda")
    assert found["device"] == torch.cuda.get_device_name()
    assert found["cuda"] == torch.version.cuda
    assert environment.l2_bytes() > 2**20
    assert environment.available_memory_bytes("cuda") > 2**28
