"""What a worker is: where it runs, on which GPU, with which versions; and whether that is what runs here."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# What must be the same on both sides, as a person calls it.
SAME = {"mtabench": "mtabench", "git_sha": "git revision", "sources": "sources", "torch": "torch", "triton": "triton"}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    index: int
    uuid: str
    name: str


@dataclass(frozen=True, slots=True)
class Facts:
    """A worker's place ("node07 GPU 2" or "node07 CPU 0-3"), its GPU's UUID (empty on a CPU), its environment.

    `environment` is what environment.describe says there, `sources` the digest of the code.
    """

    place: str
    gpu: str
    environment: Mapping[str, Any]
    sources: str

    @property
    def device(self) -> str:
        """The device's name, as in the results."""
        return self.environment["device"]

    def versions(self) -> dict[str, str]:
        """What must be the same everywhere; of torch without the part that says what it was built for."""
        found = {name: str(self.environment[name]) for name in SAME if name != "sources"} | {"sources": self.sources}
        return found | {"torch": found["torch"].partition("+")[0]}


def facts_here(device: str) -> Facts:
    """Of this process, on "cuda" or "cpu"; raises UsageError if there is no such device."""
    from mtabench import environment

    device = environment.resolve_device(device)
    uuid = ""
    if device == "cuda":
        import torch

        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    return Facts(
        f"{platform.node()} {gpu_place(uuid) if uuid else _cores()}", uuid, environment.describe(device), sources()
    )


def differences(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """What of SAME differs, as a part of a sentence; empty if nothing does."""
    found = [name for name in SAME if here[name] != there[name]]
    if found == ["sources"]:
        return "other sources of mtabench of the same revision"
    return ", ".join(
        f"{SAME[name]} {there[name] or 'unknown'} instead of {here[name] or 'unknown'}"
        for name in found
        if name != "sources"
    )


def sources() -> str:
    """A digest of the files of mtabench and its kernels: the same revision may have been edited."""
    digest = hashlib.sha256()
    for package in ("mtabench", "mta_kernels", "mta_ladder"):
        spec = find_spec(package)
        for root in map(Path, spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(root.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    digest.update(f"{package}/{path.relative_to(root)}\0".encode())
                    digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def gpus_of_machine() -> list[Gpu]:
    """The GPUs that nvidia-smi lists, none without it; those that CUDA_VISIBLE_DEVICES hides are left out."""
    gpus, visible = _listed(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    wanted = [text.strip() for text in visible.split(",") if text.strip()]  # indices, or how UUIDs start
    numbers, starts = {int(text) for text in wanted if text.isdecimal()}, tuple(t for t in wanted if not t.isdecimal())
    return [gpu for gpu in gpus if gpu.index in numbers or gpu.uuid.startswith(starts)]


def gpu_place(uuid: str) -> str:
    """What a person calls a GPU: its number, or its UUID where others are hidden and all would have the number 0."""
    gpus = _listed()
    numbers = [gpu.index for gpu in gpus if gpu.uuid == uuid]
    return f"GPU {numbers[0]}" if numbers and len(gpus) > 1 else uuid[: len("GPU-") + 8]


def _listed() -> list[Gpu]:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    fields = [[part.strip() for part in line.split(",", 2)] for line in listed.splitlines() if line.count(",") >= 2]
    return [Gpu(int(index), uuid, name) for index, uuid, name in fields]


def _cores() -> str:
    """The cores that this process may use: CPU 0-3,8."""
    runs: list[list[int]] = []
    for core in sorted(os.sched_getaffinity(0)):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return "CPU " + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
