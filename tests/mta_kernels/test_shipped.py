"""Machine code that comes with a wheel: what is in it, when it is taken, and when not."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from emulated_forward import ForwardEmulator, emulated_forward  # noqa: F401
from emulated_hopper import HopperEmulator, emulator  # noqa: F401

from mta_kernels import code_cache, common_kernels
from mta_kernels.nvrtc import compiler, driver, shipped
from mta_kernels.nvrtc.compiler import Source

ROOT = Path(__file__).parents[2]
WITHOUT_COMPILER = """
import sys
sys.modules["cuda.bindings.nvrtc"] = None
import torch
from mta_kernels.conv_attention.hopper.prepare import PrepareConstants
from mta_kernels.conv_attention.hopper.source import FOLDER
from mta_kernels.operation import Convolution
from mta_kernels.nvrtc import compiler, driver

def found(release):
    driver.cuda_release = lambda: release
    codes = []
    for head_dim in (64, 128):
        try:
            constants = PrepareConstants(torch.bfloat16, head_dim, Convolution(6, 11, 5))
            codes.append(compiler.machine_code(constants.source()))
        except ImportError:  # it would compile
            pass
    assert all(code.startswith(b"\\x7fELF") for code in codes)
    return len(codes)

print(found({release}), found({release} + 1), found({release} - 1), end="")
for name in ("prepare.cu", "device.cuh"):
    text = (FOLDER / name).read_text()
    (FOLDER / name).write_text(text + "// changed")
    print("", found({release}), end="")
    (FOLDER / name).write_text(text)
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A folder with the contents of a wheel that was built with two kernels, from a copy of the sources."""
    reason = compiler.missing_package()
    if reason:
        pytest.skip(reason)
    copy = tmp_path / "sources"
    for name in ("mtabench", "kernels"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    two = (
        "import torch; from mta_kernels import common_kernels as common; "
        "from mta_kernels.conv_attention.hopper.prepare import PrepareConstants; "
        "from mta_kernels.operation import Convolution; "
        "shapes = [(torch.bfloat16, head_dim, Convolution(6, 11, 5)) for head_dim in (64, 128)]; "
        "common.compile_into_package([PrepareConstants(*shape).source() for shape in shapes])"
    )
    environment = {**os.environ, "PYTHONPATH": str(copy / "kernels")}
    subprocess.run([sys.executable, "-c", two], cwd=copy, env=environment, check=True)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path], cwd=copy, check=True)
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path / "installed")
    return tmp_path / "installed"


def test_a_wheel_brings_its_kernels_and_none_that_changed(wheel: Path) -> None:
    cubins = list((wheel / "mta_kernels/nvrtc/shipped").rglob("*.cubin"))
    assert len(cubins) == 2
    assert all((wheel / package / "py.typed").exists() for package in ("mtabench", "mta_kernels", "mta_ladder"))
    assert all(re.fullmatch(r"prepare-[0-9a-f]{32}\.cubin", path.name) for path in cubins)
    code = WITHOUT_COMPILER.format(release=int(compiler.version().split(".")[0]))
    environment = {**os.environ, "PYTHONPATH": str(wheel), "MTA_KERNELS_CACHE": os.devnull}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=wheel, env=environment, capture_output=True, text=True, timeout=120)
    # On a driver of the same release, a later one, an earlier one; with a changed source, with a changed header.
    assert (result.stdout, result.stderr) == ("2 2 0 0 0", "")


def test_code_has_another_name_for_all_that_changes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text("one")
    source = Source(tmp_path / "a.cu", "sm_90a", {"A": 1, "B": 2}, {"x.cuh": "text"})
    same = Source(tmp_path / "a.cu", "sm_90a", {"B": 2, "A": 1}, {"x.cuh": "text"})
    assert same.file_name == source.file_name
    others = [
        dataclasses.replace(source, architecture="sm_90"),
        dataclasses.replace(source, constants={"A": 1, "B": 3}),
        dataclasses.replace(source, headers={"x.cuh": "other"}),
        dataclasses.replace(source, headers={"y.cuh": "text"}),
    ]
    names = {source.file_name, *(other.file_name for other in others)}
    (tmp_path / "a.cu").write_text("two")
    names.add(source.file_name)
    options = [*source.options, "--use_fast_math"]
    monkeypatch.setattr(Source, "options", options)
    names.add(source.file_name)
    assert len(names) == len(others) + 3


def test_the_newest_code_that_the_driver_runs_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    for release in (9, 12, 13):
        code_cache.write_whole(shipped.folder_of(release) / "a.cubin", str(release).encode())
    for release, wanted in ((14, b"13"), (13, b"13"), (12, b"12"), (11, b"9"), (8, None)):
        monkeypatch.setattr(driver, "cuda_release", lambda release=release: release)
        assert shipped.shipped_code("a.cubin") == wanted
    assert shipped.shipped_code("b.cubin") is None


def test_common_calls_launch_these() -> None:
    found = {(source.path.parent.name, source.path.stem) for source in common_kernels.common_sources()}
    assert found == {
        *(("hopper", name) for name in ("prepare", "forward", "backward")),
        *(("cuda_sm80", name) for name in ("prepare", "forward", "backward")), ("banded", "backward_exact"),
        *(("cuda_decode", name) for name in ("few_heads", "many_heads", "hopper_heads", "merge")),
    }  # fmt: skip
