"""The CUDA kernels of common calls, compiled ahead: `python -m mta_kernels.common_kernels`, for a wheel.

`scripts/build_wheel` runs it. A call of another shape compiles on the user's machine at its first call. So does every
call if a CUDA release newer than the driver made the machine code.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from mta_kernels import code_cache
from mta_kernels.conv_attention import conv_attention, conv_attention_decode
from mta_kernels.nvrtc import compiler, shipped
from mta_kernels.nvrtc.compiler import Source
from mta_kernels.plan import A100, H200, Plan, plan

DTYPES = (torch.bfloat16, torch.float16)
TAPS = (6, 11)  # of the paper's models
HEAD_DIMS = {"hopper": (H200, (64, 96, 128, 256)), "cuda": (A100, (64, 96, 128))}
CAUSAL_AND_PACKED = ((True, False), (True, True), (False, False))
DECODE_HEAD_DIMS, DECODE_GROUPS = (64, 128), (4, 8)  # query heads a KV head: without sharing, decode is Triton's
# A decode plan takes all its kernels for these: batch sizes, keys of a sequence, keys of a page or 0.
BATCHES, KEYS, PAGE_SIZES = (1, 64), (500, 4096, 65536), (0, 16, 256)


def common_sources() -> list[Source]:
    """The sources that common calls launch, each once."""
    calls = (call for found in itertools.chain(_passes(), _decode()) for call in found.calls)
    found = {call.source.file_name: call.source for call in calls if call.language == "cuda"}
    return list(found.values())


def _passes() -> Iterator[Plan]:
    for backend, (gpu, head_dims) in HEAD_DIMS.items():
        for dtype, head_dim, (causal, packed) in itertools.product(DTYPES, head_dims, CAUSAL_AND_PACKED):
            q, k, v = (_tensor(1, 2, 512, head_dim, dtype=dtype).requires_grad_() for _ in range(3))
            bounds = _tensor(3, dtype=torch.int32) if packed else None
            tensors, options = (q, k, v, _tensor(2, *TAPS, dtype=dtype)), {"causal": causal, "cu_seqlens": bounds}
            for backward in (False, True):
                yield plan(gpu, conv_attention, *tensors, **options, backend=backend, backward=backward)


def _decode() -> Iterator[Plan]:
    shapes = itertools.product(
        (A100, H200), DTYPES, DECODE_HEAD_DIMS, DECODE_GROUPS, BATCHES, KEYS, PAGE_SIZES
    )  # fmt: skip
    for gpu, dtype, head_dim, group, batch, keys, page_size in shapes:
        heads, table = 2 * group, None
        q, weight = (_tensor(*sizes, dtype=dtype) for sizes in ((batch, heads, TAPS[0], head_dim), (heads, *TAPS)))
        cache = _tensor(batch, 2, keys, head_dim, dtype=dtype)
        if page_size:
            pages = -(-keys // page_size)
            cache = _tensor(batch * pages, 2, page_size, head_dim, dtype=dtype)
            table = _tensor(batch, pages, dtype=torch.int32)
        options: dict[str, Any] = {
            "lengths": _tensor(batch, dtype=torch.int32),
            "block_table": table,
            "backend": "cuda",
        }
        yield plan(gpu, conv_attention_decode, q, cache, cache, weight, **options)


def _tensor(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def compile_into_package(sources: Sequence[Source]) -> None:
    """Compile these into the package's folder of shipped code, in place of what was there."""
    folder = shipped.folder_of(int(compiler.version().split(".")[0]))
    shutil.rmtree(shipped.FOLDER, ignore_errors=True)

    def one(source: Source) -> int:
        code, _ = compiler.compile_source(source)
        code_cache.write_whole(folder / source.file_name, code)
        return len(code)

    size = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, code_size in enumerate(pool.map(one, sources), 1):
            size += code_size
            print(f"\r{done} of {len(sources)} kernels, {size / 1e6:.1f} MB", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


if __name__ == "__main__":
    if reason := compiler.missing_package():
        sys.exit(f"error: {reason}")
    compile_into_package(common_sources())
