"""Where a measurement runs: device, versions, revision, free memory, and the clock of the GPU."""

import functools
import os
import platform
import runpy
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import mtabench
from mtabench.errors import MtabenchError, UsageError
from mtabench.git import git, has_changes

MEMORY_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
OWN_CODE = ("mtabench", "kernels", "pyproject.toml")  # of a checkout of this project
GIT_SECONDS = 20.0  # at most, for what git says
# NVML's reasons that say a GPU is in trouble: hardware, thermal (by software and by hardware), power brake. A power
# cap is not among them: it is how a GPU runs under full load.
THROTTLE_REASONS = 0x08 | 0x20 | 0x40 | 0x80


class TorchBuild(NamedTuple):
    """PyTorch's version, and the version of the CUDA it is built with, empty without."""

    version: str
    cuda: str


@functools.cache
def torch_build() -> TorchBuild:
    """What PyTorch's own file of versions says: importing all of PyTorch takes seconds."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    module = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return TorchBuild(module["__version__"], module.get("cuda") or "")


def resolve_device(name: str) -> str:
    """ "cuda" or "cpu" for "auto", "cuda" or "cpu"; raises UsageError for a device that is not there."""
    if name not in ("auto", "cuda", "cpu"):
        raise UsageError(f"there is no device {name!r}; expected auto, cuda or cpu")
    if name == "cpu" or _has_gpu():
        return "cuda" if name == "auto" else name
    if name == "auto":
        return "cpu"
    built = torch_build()
    why = "PyTorch finds no CUDA GPU" if built.cuda else f"PyTorch {built.version} is built without CUDA"
    raise UsageError(f"--device cuda cannot be had, since {why} on this machine; try --device cpu")


def let_triton_interpret(device: str) -> None:
    """On a CPU, let Triton's interpreter run its kernels, a file's as well; Triton checks as they are imported."""
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _has_gpu() -> bool:
    if "torch" not in sys.modules and not torch_build().cuda:
        return False  # which PyTorch would take seconds to say
    import torch

    return torch.cuda.is_available()


def describe(device: str | None = None) -> dict[str, Any]:
    """Columns of the results that are the same for a whole run on "cuda" or "cpu", and a few facts more.

    Unknown texts are empty; `git_dirty` is None outside a checkout.
    """
    device = device or resolve_device("auto")
    on_gpu = device == "cuda"
    sha, dirty = git_state(Path(mtabench.__file__).parents[1])
    return {
        **(_describe_gpu() if on_gpu else {"device": cpu_name(), "driver": ""}),
        "cuda": torch_build().cuda if on_gpu else "",
        "torch": torch_build().version,
        "triton": " for ".join(filter(None, (_version_of("triton"), os.environ.get("TRITON_OVERRIDE_ARCH")))),
        "mtabench": mtabench.__version__,
        "git_sha": sha,
        "git_dirty": dirty,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
    }


def _describe_gpu() -> dict[str, str]:
    """Name and driver of the current GPU, as columns of the results."""
    import torch

    driver = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {"device": torch.cuda.get_device_name(), "driver": driver.partition("\n")[0]}


def cpu_name() -> str:
    """The processor's model as the system calls it."""
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def git_state(root: Path) -> tuple[str, bool | None]:
    """Commit of the checkout at `root`, and whether its code differs from it.

    Where there is none, in an image for instance, MTABENCH_GIT_SHA may name the commit; else it is empty.
    """
    sha, dirty = "", None
    if root.samefile(_root_of(root) or "/"):
        sha, dirty = _commit(root, OWN_CODE)
    return (sha, dirty) if sha else (os.environ.get("MTABENCH_GIT_SHA", ""), None)


def git_columns(files: Sequence[Path]) -> dict[str, Any]:
    """The columns `git_sha` and `git_dirty` where these files are what is measured; empty if there are none.

    They are of the files' checkout, and unknown if a file is in none or they are of several.
    """
    if not files:
        return {}
    roots = {_root_of(file.parent) for file in files}
    root = roots.pop()
    if roots or not root or any("site-packages" in file.parts for file in files):
        return {"git_sha": "", "git_dirty": None}
    sha, dirty = _commit(Path(root))
    return {"git_sha": sha, "git_dirty": dirty}


def _root_of(folder: Path) -> str:
    """The root of the checkout that a folder is in, empty without one; warns where git does not say it."""
    try:
        return git(folder, "rev-parse", "--show-toplevel", timeout_s=GIT_SECONDS)
    except MtabenchError as error:
        if "owner" in str(error):
            warnings.warn(f"rows name no commit of {folder}: {error}", stacklevel=3)
        return ""


def _commit(root: Path, paths: Sequence[str] = (".",)) -> tuple[str, bool | None]:
    """The commit of a checkout, empty without one, and whether these paths of it differ from it, None if unknown."""
    try:
        sha = git(root, "rev-parse", "--verify", "--short=12", "HEAD", timeout_s=GIT_SECONDS)
    except MtabenchError:
        return "", None
    try:
        return sha, has_changes(root, paths, GIT_SECONDS)
    except MtabenchError:
        return sha, None


def available_memory_bytes(device: str) -> int | None:
    """Bytes that could be allocated now on "cuda" or "cpu", container limits included; None if unknown."""
    if device == "cuda":
        import torch

        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached
    found = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    for limit, used in MEMORY_LIMITS:
        numbers = [lines[0] for lines in (_lines(limit), _lines(used)) if lines and lines[0].isdigit()]
        if len(numbers) == 2:
            found.append(max(0, int(numbers[0]) - int(numbers[1])))
    return min(found, default=None)


def device_works(device: str) -> bool:
    """Whether "cuda" or "cpu" still takes work: a failed kernel may have broken a GPU's context."""
    try:
        if device == "cuda":
            import torch

            torch.cuda.synchronize()
    except Exception:
        return False
    return True


def l2_bytes() -> int:
    """Size of the current GPU's L2 cache."""
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


class GpuSensor:
    """SM clock, throttling and energy of the current GPU by NVML, where nvidia-ml-py is installed."""

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            import pynvml
            import torch

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._nvml = pynvml
            self.read()
        except Exception:  # no package, no driver or no permission: then nothing is known
            self._nvml = None

    def read(self) -> tuple[float | None, bool | None]:
        """SM clock in MHz and whether the GPU is throttled, now; None where unknown."""
        if self._nvml is None:
            return None, None
        clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
        reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return float(clock), bool(reasons & THROTTLE_REASONS)

    def energy_j(self) -> float | None:
        """Joules that the GPU has taken since its driver was loaded; None where it does not count them."""
        if self._nvml is None:
            return None
        try:
            return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        except Exception:  # GPUs before Volta, and some virtual ones
            return None


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _run(*command: str) -> str:
    """Standard output of a command, or an empty text if it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, env=os.environ | {"LC_ALL": "C"}
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
