"""Machine code that came with the wheel, so that a first call compiles nothing: see mta_kernels/common_kernels.py.

One file a source and its options, in a folder for each CUDA release that compiled it, `shipped/cuda-13`. A GPU's driver
runs the machine code of its own CUDA release, of any minor version, and of earlier ones ("CUDA Compatibility").
"""

from __future__ import annotations

from pathlib import Path

from mta_kernels.nvrtc import driver

FOLDER = Path(__file__).parent / "shipped"


def folder_of(release: int) -> Path:
    """The folder of the machine code that CUDA `release`, such as 13, compiled."""
    return FOLDER / f"cuda-{release}"


def shipped_code(name: str) -> bytes | None:
    """The shipped machine code of that name, the newest that runs on this driver, or None."""
    paths = {int(path.parent.name.removeprefix("cuda-")): path for path in FOLDER.glob(f"cuda-*/{name}")}
    if not paths:
        return None
    runnable = [release for release in paths if release <= driver.cuda_release()]
    return paths[max(runnable)].read_bytes() if runnable else None
