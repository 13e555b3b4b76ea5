"""Occupancy: what NVIDIA says of its GPUs, and what NVIDIA's own calculator says of thousands of kernels."""

import random
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from mtabench.errors import UsageError
from mtabench.static.limits import LIMITS, TARGETS, limits_of, occupancy

FACTORS = {1: "warps", 2: "registers", 4: "shared memory", 8: "blocks"}  # of cuda_occupancy.h
KIB = 1024


def test_limits_are_those_of_the_programming_guide():
    """CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": columns 8.0 to 12.0."""
    found = {
        x.target: (x.warps_per_sm, x.blocks_per_sm, x.shared_per_sm // KIB, x.shared_per_block // KIB) for x in LIMITS
    }
    assert found == {
        "sm_80": (64, 32, 164, 163),
        "sm_86": (48, 16, 100, 99),
        "sm_89": (48, 24, 100, 99),
        "sm_90": (64, 32, 228, 227),
        "sm_100": (64, 32, 228, 227),
        "sm_120": (48, 24, 100, 99),
    }  # fmt: skip


def test_tensor_memory_is_shared_by_the_blocks_of_an_sm():
    sizes = {"warps": 4, "registers": 64, "shared_bytes": 0}
    half = occupancy(limits_of("sm_100"), **sizes, tensor_memory=256)
    assert (half.blocks, half.limited_by) == (2, ("tensor memory",))
    assert occupancy(limits_of("sm_100"), **sizes, tensor_memory=576).blocks == 0


def random_kernels(count):
    numbers = random.Random(0)
    for _ in range(count):
        limits = numbers.choice(LIMITS)
        static, dynamic = numbers.randint(0, 48 * KIB), numbers.randint(0, limits.shared_per_block)
        shared = numbers.choice([(0, 0), (static, 0), (0, dynamic), (static, dynamic)])
        yield limits, numbers.randint(1, 32), numbers.randint(1, 255), shared


def test_blocks_and_limits_are_those_of_nvidias_calculator(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    triton = find_spec("triton")
    if compiler is None or triton is None or triton.origin is None:
        pytest.skip("needs a C compiler, and cuda_occupancy.h from Triton's wheel")
    headers = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    source = Path(__file__).parents[1] / "nvidia_occupancy.c"
    program = tmp_path / "occupancy"
    subprocess.run([compiler, "-w", f"-I{headers}", str(source), "-o", str(program)], check=True)
    kernels = list(random_kernels(3000))
    lines = [
        f"{x.capability[0]} {x.capability[1]} {x.warps_per_sm} {x.shared_per_sm} {x.shared_per_block} "
        f"{warps} {registers} {shared[0]} {shared[1]}"
        for x, warps, registers, shared in kernels
    ]
    printed = subprocess.run([str(program)], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    answers = printed.splitlines()
    assert len(answers) == len(kernels)
    for (limits, warps, registers, shared), answer in zip(kernels, answers, strict=True):
        error, blocks, factors = map(int, answer.split())
        held = occupancy(limits, warps=warps, registers=registers, shared_bytes=sum(shared))
        expected = (0, blocks, {name for bit, name in FACTORS.items() if factors & bit})
        assert (error, held.blocks, set(held.limited_by)) == expected, (limits.target, warps, registers, shared)


def test_targets_are_found_as_people_write_them():
    assert {limits_of(text).target for text in ("sm_90", "SM90", "90", "9.0", "sm_90a")} == {"sm_90"}
    assert [limits_of(target).target for target in TARGETS] == list(TARGETS)
    with pytest.raises(UsageError, match="--target 'sm_70' is not known"):
        limits_of("sm_70")
