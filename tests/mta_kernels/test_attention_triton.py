"""The ladder's Triton rungs against float64: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from kernel_inputs import DEVICE, poison_memory, relative_error
from torch import Tensor

pytest.importorskip("triton")

import triton
from triton.runtime import _allocation

from mta_kernels import gpu_limits
from mta_ladder import attention_reference, triton_descriptor, triton_fmha, triton_pointer
from mtabench.static.limits import limits_of

RUNGS = (triton_pointer, triton_descriptor, triton_fmha)
MOST_ERROR = {torch.float16: 0.002, torch.bfloat16: 0.01}
every_rung = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.__name__.rpartition(".")[2])


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN."""
    poison_memory(monkeypatch)


def make(queries=100, keys=100, head_dim=64, value_dim=None, heads=(1, 1), batch=1, dtype=torch.float32, magnitude=1.0):
    """Random q, k and v on the test device."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads[0], queries, head_dim), (heads[1], keys, head_dim), (heads[1], keys, value_dim or head_dim))
    q, k, v = (torch.randn(batch, *shape, generator=generator) for shape in shapes)
    return tuple(x.to(DEVICE, dtype) for x in (q * magnitude, k, v))


def check(rung: ModuleType, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float = 0.125) -> Tensor:
    """Run a rung; its output is within the error bar, and no further from float64 than twice eager."""
    out = rung.attention(q, k, v, causal=causal, scale=scale)
    exact = attention_reference(q.double(), k.double(), v.double(), causal=causal, scale=scale)
    eager = attention_reference(q, k, v, causal=causal, scale=scale)
    assert out.shape == exact.shape
    assert out.dtype == q.dtype
    eager_error = relative_error(eager, exact)
    if q.dtype == torch.float32:
        allowed = max(1e-5, 2 * eager_error)  # large scores have large errors in float32 too
    else:
        allowed = min(MOST_ERROR[q.dtype], max(2 * eager_error, 4 * torch.finfo(q.dtype).eps))
    assert relative_error(out, exact) <= allowed, (relative_error(out, exact), allowed)
    return out


@every_rung
@pytest.mark.parametrize("head_dim", [96, 256])
def test_head_dims(rung: ModuleType, head_dim: int) -> None:
    check(rung, *make(70, 70, head_dim, dtype=torch.float16))


@every_rung
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 128), (17, 33)])
def test_values_of_another_head_dim(rung: ModuleType, head_dim: int, value_dim: int) -> None:
    check(rung, *make(70, 70, head_dim, value_dim, dtype=torch.float16))


def token_major(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def dim_major(x: Tensor) -> Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def test_what_is_laid_out_as_a_rung_wants_it_is_not_copied() -> None:
    q, k, _ = make(48, 48, 64, dtype=torch.float16)
    packed = token_major(q).transpose(1, 2)
    assert packed.contiguous() is packed
    transposed = dim_major(k).transpose(2, 3)
    assert triton_descriptor.head_major(transposed) is transposed
    assert triton_descriptor.head_major(k) is k


def test_the_caller_keeps_their_allocator() -> None:
    """A descriptor made in a kernel needs memory, which Triton asks of an allocator that is set for all."""
    before = _allocation._allocator.get()
    triton_descriptor.attention(*make(), causal=True, scale=0.2)
    assert _allocation._allocator.get() is before


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_tiles_of_every_gpu(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = limits_of(target)
    monkeypatch.setattr(triton_fmha, "compiled_capability", lambda device: limits.capability)
    monkeypatch.setattr(triton_fmha, "shared_memory_limit", lambda device: limits.shared_per_block)
    if DEVICE == "cuda":
        # A GPU with a copy engine turns pointers into descriptors on the device, and wants room for them.
        triton.set_allocator(lambda size, alignment, stream: torch.ones(size, dtype=torch.int8, device=DEVICE))
        if limits.shared_per_block > gpu_limits.shared_memory_limit(torch.device("cuda")):
            pytest.skip(f"the tiles of {target} do not fit here")
    for head_dim in (40, 256):
        check(triton_fmha, *make(130, 130, head_dim, dtype=torch.float16))


# Compiles rungs as `attention` would for a GPU that is not there, and prints what a kernel takes of it.
COMPILE = """
import json, sys, torch
from mtabench.static import machine_code
from mtabench.static.absent_gpu import compiled, compiles_for
from mtabench.static.limits import limits_of
from mta_ladder import triton_descriptor, triton_fmha, triton_pointer
from mta_kernels.plan import plan

limits = limits_of(sys.argv[1])
number = 10 * limits.capability[0] + limits.capability[1]

with compiles_for(limits):
    for word in sys.argv[2:]:
        rung, _, head_dim = word.partition(":")
        x = torch.empty(1, 4, 8192, int(head_dim), dtype=torch.bfloat16, device="meta")
        call = globals()[rung].attention
        *_, launch = plan(limits.planned, call, x, x[:, :2], x[:, :2], causal=True, scale=0.1).calls
        name, result = launch.name, compiled(launch)
        usage = machine_code.usage_of(result.asm["cubin"], number)[result.metadata.name]
        spills = machine_code.spills_of(result.asm["ptx"], ("-lineinfo",))[result.metadata.name]
        stored = spills.stores if usage.stack else 0
        print(json.dumps([name, head_dim, result.metadata.shared, stored, "wgmma" in result.asm["ptx"]]))
"""
COMPILED = {  # `mtabench inspect` compiles them all
    "sm_80": "triton_fmha:128",
    "sm_90": "triton_pointer:128 triton_descriptor:128 triton_fmha:128 triton_fmha:256",
}


@pytest.mark.parametrize("target", COMPILED)
def test_kernels_fit_gpus_that_are_not_there_without_spills(target: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    words = [sys.executable, "-c", COMPILE, target, *COMPILED[target].split()]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == len(COMPILED[target].split())
    for name, head_dim, shared_bytes, spilled_bytes, wgmma in kernels:
        assert shared_bytes <= limits_of(target).shared_per_block, (name, head_dim)
        assert spilled_bytes == 0, (name, head_dim)
        assert wgmma == (target == "sm_90"), (name, head_dim)


@every_rung
def test_unsupported_says_what_would_work(rung: ModuleType) -> None:
    device = torch.device(DEVICE)
    assert rung.unsupported(device=device, dtype=torch.float16, head_dim=64) is None
    assert "16 to 256" in rung.unsupported(device=device, dtype=torch.float16, head_dim=320)
    assert "float16" in rung.unsupported(device=device, dtype=torch.float64, head_dim=64)
