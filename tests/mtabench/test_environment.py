"""Where a measurement runs."""

import subprocess

import pytest
import torch

from mtabench import environment
from mtabench.errors import UsageError

COLUMNS = {"device", "driver", "cuda", "torch", "triton", "mtabench", "git_sha", "git_dirty"}


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
    assert set(found) >= COLUMNS | {"python", "platform", "cpu"}
    assert found["device"] == found["cpu"] != ""
    assert found["torch"] == torch.__version__
    assert found["driver"] == found["cuda"] == ""


def test_triton_compiled_for_another_gpu_is_said(monkeypatch):
    version = environment.describe("cpu")["triton"]
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
    assert environment.describe("cpu")["triton"] == f"{version} for sm80"


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
