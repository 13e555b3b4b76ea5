"""Which kernels of conv attention a GPU that is not here would run, what fits it, and what is refused: by plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mta_kernels.conv_attention import conv_attention, conv_attention_decode, explain
from mta_kernels.conv_attention.backends import CONV_ATTENTION
from mta_kernels.conv_attention.triton.backward_scores import probabilities_config, value_gradients_config
from mta_kernels.conv_attention.triton.forward import forward_config
from mta_kernels.plan import A100, H200, KernelCall, PlannedGpu, on_planned, plan

BF16, FP32 = torch.bfloat16, torch.float32
RTX_4090 = PlannedGpu("NVIDIA GeForce RTX 4090", (8, 9), 99 * 1024, 100 * 1024, 128, 24 * 10**9)
TAPS = (6, 11)


def meta(*sizes: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=grad)


def inputs(head_dim: int, taps: tuple[int, int] = TAPS, batch: int = 1, rows: int = 4096, **options: Any) -> tuple:
    x = meta(batch, 2, rows, head_dim, **options)
    return x, x, x, meta(2, *taps, **options)


@pytest.mark.parametrize(
    ("major", "head_dim", "taps", "forward", "training"),
    [
        (8, 64, (6, 11), "cuda", "cuda"), (8, 64, (4, 11), "triton", "triton"), (8, 64, (3, 9), "triton", "triton"),
        (8, 136, (6, 11), "cuda", "cuda"), (8, 256, (1, 11), "triton", "triton"), (9, 64, (6, 11), "hopper", "hopper"),
        (9, 136, (6, 11), "triton", "cuda"), (9, 144, (6, 11), "hopper", "hopper"),
        (10, 64, (6, 11), "triton", "triton"), (10, 256, (6, 11), "triton", "triton"),
        (11, 64, (6, 11), "triton", "triton"), (12, 128, (2, 9), "triton", "triton"), (12, 128, (3, 9), "cuda", "cuda"),
        (12, 128, (6, 11), "cuda", "cuda"),
    ],
)  # fmt: skip
def test_auto_takes_cuda_where_triton_has_more_to_multiply(major, head_dim, taps, forward, training) -> None:
    gpu = H200 if major == 9 else replace(A100, capability=(major, 0))
    with on_planned(gpu):
        found = [explain(*inputs(head_dim, taps, grad=grad)).backend for grad in (False, True)]
    assert found == [forward, training]


@pytest.mark.parametrize(
    ("gpu", "batch", "heads", "keys", "backend", "head_dim"),
    [
        (H200, 1, 8, 1 << 12, "triton", 64), (H200, 1, 8, (1 << 12) + 1, "cuda", 64), (H200, 4, 8, 1024, "triton", 64),
        (H200, 8, 8, 1024, "cuda", 64), (H200, 1, 8, 8192, "triton", 128), (H200, 1, 4, 8192, "triton", 64),
        (H200, 1, 10, 64, "cuda", 64), (A100, 1, 8, 64, "cuda", 64), (A100, 1, 2, 64, "triton", 64),
    ],
)  # fmt: skip
def test_auto_takes_cuda_for_steps_of_heads_that_share_many_keys(gpu, batch, heads, keys, backend, head_dim) -> None:
    cache = meta(batch, 2, keys, head_dim)
    with on_planned(gpu):
        found = explain(meta(batch, heads, 6, head_dim), cache, cache, meta(heads, 3, 5), decode=True)
    assert found.backend == backend


def test_cuda_takes_what_triton_would_if_triton_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    others = tuple(replace(x, why_not=lambda _: "no") if x.name == "triton" else x for x in CONV_ATTENTION.kernels)
    monkeypatch.setattr(CONV_ATTENTION, "kernels", others)
    with on_planned(A100):
        assert explain(*inputs(64, (3, 9))).backend == "cuda"


LONG, SHORT, IN_REGISTERS = (128, 256, 3, 8), (128, 128, 5, 8), (64, 64, 2, 4)


@pytest.mark.parametrize(
    ("head_dim", "taps", "rows", "causal", "tiles"),
    [
        (64, TAPS, 1024, True, IN_REGISTERS), (64, TAPS, 4096, True, IN_REGISTERS),
        (64, (11, 11), 1024, True, SHORT), (64, (11, 11), 4096, True, LONG),
        (128, TAPS, 1024, True, SHORT), (96, (7, 7), 2047, True, SHORT), (128, TAPS, 2048, True, LONG),
        (128, TAPS, 16384, True, LONG), (128, TAPS, 1024, False, LONG), (256, TAPS, 1024, True, (128, 128, 4, 8)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_tiles_of_a_triton_forward_on_hopper(dtype, head_dim, taps, rows, causal, tiles) -> None:
    """Causal calls of few keys have narrow tiles, since wide ones leave much to the loop at the diagonal."""
    (*_, call) = plan(H200, conv_attention, *inputs(head_dim, taps, rows=rows, dtype=dtype), causal=causal,
                      backend="triton").calls  # fmt: skip
    assert tuple(call.constants[x] for x in ("BLOCK_M", "BLOCK_N", "num_stages", "num_warps")) == tiles


@pytest.mark.parametrize("gpu", [A100, H200, RTX_4090, replace(H200, capability=(10, 0))], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("size", [2, 4])
def test_tiles_of_triton_fit_every_gpu(gpu: PlannedGpu, size: int) -> None:
    limits = {"element_size": size, "compute_capability": gpu.capability, "shared_memory": gpu.shared_memory}
    assert probabilities_config(**limits).shared_memory(size) <= gpu.shared_memory
    for block_d in (128 // size, 128, 256):
        found = value_gradients_config(block_d=block_d, element_size=size, shared_memory=gpu.shared_memory)
        assert found.shared_memory(block_d, size) <= gpu.shared_memory
        for depth in (block_d // 2 + 8, block_d, 3 * block_d, 16 * block_d):
            for short in (False, True):
                tiles = forward_config(depth=depth, block_d=block_d, short=short, **limits)
                assert tiles.shared_memory(depth, block_d, size) <= gpu.shared_memory
                with pytest.raises(ValueError, match="need more than the 9999 bytes of shared memory"):
                    forward_config(depth=depth, block_d=block_d, short=short, **limits | {"shared_memory": 9999})


OUTSIDE = "taps are outside 1x1 to"
NEEDS_ROOM = "the backward of head_dim 136 with 6x11 taps needs more shared memory than the 99 KB that a thread block"


@pytest.mark.parametrize(
    ("backend", "gpu", "decode", "given", "words"),
    [
        ("hopper", H200, False, (FP32, 64, TAPS), "dtype torch.float32 is not float16 or bfloat16"),
        ("hopper", H200, False, (BF16, 20, TAPS), "20 is not a multiple of 8 from 16 to 128, or of 16 up to 256"),
        ("hopper", H200, False, (BF16, 136, TAPS), "head_dim 136 is not"),
        ("hopper", H200, False, (BF16, 64, (9, 11)), f"9x11 {OUTSIDE} 8x17"),
        ("hopper", A100, False, (BF16, 64, TAPS), "A100-SXM4-80GB is no Hopper GPU"),
        ("hopper", H200, True, (BF16, 64, TAPS), "has no decode; use 'cuda' or 'triton'"),
        ("cuda", A100, False, (FP32, 64, TAPS), "dtype torch.float32 is not float16 or bfloat16"),
        ("cuda", A100, False, (BF16, 20, TAPS), "head_dim 20 is not a multiple of 8 from 16 to 256"),
        ("cuda", A100, False, (BF16, 264, TAPS), "head_dim 264"),
        ("cuda", A100, False, (BF16, 64, (6, 18)), f"6x18 {OUTSIDE} 8x17"),
        ("cuda", RTX_4090, False, (BF16, 136, TAPS), NEEDS_ROOM),
        ("cuda", RTX_4090, False, (BF16, 128, TAPS), ""),
        ("cuda", A100, True, (FP32, 64, TAPS), "dtype torch.float32 is not float16 or bfloat16"),
        ("cuda", A100, True, (BF16, 264, TAPS), "head_dim 264 is outside 16 to 256"),
        ("cuda", A100, True, (BF16, 64, (17, 11)), f"17x11 {OUTSIDE} 16x31"),
        ("cuda", A100, True, (BF16, 17, (6, 31)), ""),
    ],
)
def test_what_a_gpu_cannot_run_is_refused(backend, gpu, decode, given, words) -> None:
    """The backward alone, where there is room for the forward."""
    dtype, head_dim, taps = given

    def chosen(grad: bool) -> str:
        with on_planned(gpu):
            tensors = inputs(head_dim, taps, rows=32, dtype=dtype, grad=grad)
            return explain(*tensors, backend=backend, decode=decode).backend

    if words == NEEDS_ROOM:
        assert chosen(grad=False) == backend
    if not words:
        assert chosen(grad=not decode) == backend
        return
    with pytest.raises(ValueError, match=words):
        chosen(grad=not decode)


@pytest.mark.parametrize("gpu", [A100, H200, RTX_4090], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("taps", [(1, 1), (8, 17)], ids=str)
def test_kernels_fit_the_gpu(gpu: PlannedGpu, taps: tuple[int, int]) -> None:
    """Two blocks of a forward share a multiprocessor, unless its shared memory is the smallest."""
    for head_dim in (16, 64, 72, 128, 136, 256) if gpu is not RTX_4090 else (16, 64, 72, 128):
        tensors = inputs(head_dim, taps, rows=512, grad=True)
        for backend in ("cuda", "hopper") if gpu is H200 and head_dim != 136 else ("cuda",):
            (*_, forward) = plan(gpu, conv_attention, *tensors, backend=backend).calls
            backward = plan(gpu, conv_attention, *tensors, backend=backend, backward=True).calls
            assert max(call.shared_memory for call in (forward, *backward)) <= gpu.shared_memory
            if backend == "cuda" and gpu is not RTX_4090:
                assert 2 * (forward.shared_memory + 1024) <= gpu.shared_memory_of_sm


def step_on(
    gpu: PlannedGpu, k: Tensor, v: Tensor | None = None, *, group: int = 8, taps: tuple[int, int] = TAPS,
    pages: int = 0, backend: str = "cuda",
) -> list[KernelCall]:  # fmt: skip
    """The launches of a step on caches, or on so many pages of each sequence."""
    heads, batch = k.shape[1] * group, k.shape[0] // (pages or 1)
    table = {"block_table": meta(batch, pages, dtype=torch.int32)} if pages else {}
    tensors = meta(batch, heads, max(taps), k.shape[3]), k, k if v is None else v, meta(heads, *taps)
    lengths = meta(batch, dtype=torch.int32)
    return plan(gpu, conv_attention_decode, *tensors, lengths=lengths, backend=backend, **table).calls


CACHE = meta(8, 2, 4096, 64)


@pytest.mark.parametrize(
    ("file", "gpu", "caches", "options"),
    [
        ("hopper_heads", H200, (CACHE,), {}),
        ("hopper_heads", H200, (meta(8, 4096, 2, 64).transpose(1, 2),), {}),
        ("hopper_heads", H200, (CACHE, meta(8, 2, 2, 4096, 64)[:, 0]), {}),
        ("hopper_heads", H200, (meta(8, 2, 4096, 128),), {"group": 16}),
        ("hopper_heads", H200, (meta(256, 2, 128, 64),), {"pages": 32}),
        ("few_heads", H200, (CACHE,), {"group": 2}),
        ("many_heads", A100, (CACHE,), {}),
        ("many_heads", RTX_4090, (meta(8, 2, 4096, 128),), {"group": 18}),
        ("many_heads", H200, (CACHE[:1].expand(8, -1, -1, -1),), {}),
        ("many_heads", H200, (meta(8, 2, 4090, 64),), {}),  # no whole number of groups of keys
        ("many_heads", H200, (meta(256, 2, 64, 64),), {"pages": 32}),
        ("many_heads", H200, (meta(8, 2, 4096, 56),), {}),
        ("many_heads", H200, (meta(8, 2, 4096, 136),), {}),
        ("many_heads", H200, (CACHE,), {"taps": (9, 11)}),
        ("many_heads", H200, (CACHE,), {"taps": (6, 17)}),
    ],
)
def test_the_copy_engine_reads_caches_that_it_can_describe(file, gpu, caches, options) -> None:
    step = next(call for call in step_on(gpu, *caches, **options) if call.language == "cuda")
    assert step.source.path.stem == file
    assert step.shared_memory <= gpu.shared_memory
    assert step.grid[0] == gpu.sm_count


@pytest.mark.parametrize("backend", ["cuda", "hopper"])
def test_more_heads_than_a_grid_has_rows(backend: str) -> None:
    """A GPU takes 65535 blocks along y, and 2^31 - 1 along x."""
    tensors = inputs(16, (3, 3), batch=40000, rows=3, grad=True)
    for backward in (False, True):
        for call in plan(H200, conv_attention, *tensors, backend=backend, backward=backward).calls:
            assert call.language == "torch" or call.grid[1] < 2**16


@pytest.mark.parametrize("taps", [(1, 1), (8, 11)], ids=str)
@pytest.mark.parametrize(("batch", "rows"), [(1, 100), (1, 70_000), (32, 4096), (1, 10**6)])
def test_scratch_of_the_hopper_backward_takes_no_more_than_promised(taps, batch: int, rows: int) -> None:
    """By docs/design/hopper-backward.md: 4 GiB or 17 kB a head and key, at most 0.13 MB a key or 2 GiB."""
    tensors = inputs(64, taps, batch, rows, grad=True)
    found = plan(H200, conv_attention, *tensors, backend="hopper", backward=True)
    beside = 16 * sum(x.numel() for x in tensors)  # gradients, some of them in float32, and powers of two
    promised = min(max(4 * 2**30, 17_000 * 2 * batch * rows), max(2 * 2**30, 0.133e6 * rows))
    assert found.peak_bytes <= promised + beside
