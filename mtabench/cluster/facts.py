"""What a worker is: where it runs, on which GPU, with which versions; and whether that is what runs here."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

Facts = Mapping[str, Any]  # as facts_here gives them

# What must be the same everywhere.
SAME = ("device", "mtabench", "git_sha", "torch", "triton", "sources")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as nvidia-smi lists it."""

    index: int
    uuid: str
    name: str


def facts_here(device: str) -> dict[str, Any]:
    """What environment.describe says of this process on "cuda" or "cpu", with three facts more.

    `worker` is its place ("node07 GPU 2" or "node07 CPU 0-3"), `gpu` its GPU's UUID (empty on a CPU), `sources` the
    digest of the code. Raises UsageError if there is no such device.
    """
    from mtabench import environment

    device = environment.resolve_device(device)
    uuid = ""
    if device == "cuda":
        import torch

        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    place = f"{platform.node()} {gpu_place(uuid) if uuid else _cores()}"
    return environment.describe(device) | {"worker": place, "gpu": uuid, "sources": sources()}


def differences(here: Facts, there: Facts) -> str:
    """What of SAME differs, as a part of a sentence; empty if nothing does."""
    return ", ".join(
        f"{name.replace('git_sha', 'git revision')} {_version(there[name])} instead of {_version(here[name])}"
        for name in SAME
        if _version(here[name]) != _version(there[name])
    )


def _version(value: object) -> str:
    """Without the part that says what torch was built for."""
    return str(value).partition("+")[0] or "unknown"


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
    cores = enumerate(sorted(os.sched_getaffinity(0)))
    runs = [[core for _, core in run] for _, run in groupby(cores, lambda pair: pair[1] - pair[0])]
    return "CPU " + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
