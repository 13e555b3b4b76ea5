"""The CUDA kernels of common calls, compiled ahead: `python -m mta_kernels.common_kernels`, for a wheel.

`scripts/build_wheel` runs it. A call of another shape is compiled on the user's machine when it is first made, and so
is every call where the machine code is that of a CUDA release newer than the driver.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from mta_kernels import code_cache
from mta_kernels.conv_attention.cuda_decode.hopper_plan import HopperConstants, hopper_plan_on
from mta_kernels.conv_attention.cuda_decode.plan import plan_on
from mta_kernels.conv_attention.cuda_sm80 import backward_constants as cuda_backward
from mta_kernels.conv_attention.cuda_sm80 import forward as cuda_forward
from mta_kernels.conv_attention.hopper import backward, forward, prepare
from mta_kernels.nvrtc import compiler, shipped
from mta_kernels.nvrtc.compiler import Source
from mta_kernels.operation import Convolution, key_padding

DTYPES = (torch.bfloat16, torch.float16)
CONVOLUTION = Convolution(6, 11, key_padding(11, "both"))  # of the paper's models
HOPPER_HEAD_DIMS = (64, 96, 128, 256)
CAUSAL_AND_PACKED = ((True, False), (True, True), (False, False))
DECODE_HEAD_DIMS, DECODE_GROUPS = (64, 128), (4, 8)  # query heads a KV head: without sharing, decode is Triton's
CUDA_HEAD_DIMS = (64, 96, 128)
A100, H200 = ("sm_80", 163 * 1024), ("sm_90", 227 * 1024)  # architecture, bytes of shared memory a block may have
DECODE_GPUS = ((*A100, 108), (*H200, 132))  # and their multiprocessors


def common_sources() -> list[Source]:
    """The sources of common calls, each once."""
    found = {source.file_name: source for source in itertools.chain(_hopper(), _cuda(), _decode())}
    return list(found.values())


def _hopper() -> Iterator[Source]:
    for dtype, head_dim in itertools.product(DTYPES, HOPPER_HEAD_DIMS):
        shape = (dtype, head_dim, CONVOLUTION)
        yield prepare.PrepareConstants(*shape).source
        for causal, packed in CAUSAL_AND_PACKED:
            yield forward.ForwardConstants(*shape, causal, packed).source
            if head_dim > forward.MAX_BACKWARD_HEAD_DIM:
                yield from _cuda_backward(H200, dtype, head_dim, causal, packed)
            else:
                constants = backward.BackwardConstants(*shape, causal, packed)
                yield constants.source
                yield constants.exact.source


def _cuda() -> Iterator[Source]:
    architecture, limit = A100
    for dtype, head_dim in itertools.product(DTYPES, CUDA_HEAD_DIMS):
        for causal, packed in CAUSAL_AND_PACKED:
            shape = (dtype, head_dim, CONVOLUTION, causal, packed, limit)
            yield cuda_forward.ForwardConstants(*shape).source(architecture)
            yield from _cuda_backward(A100, dtype, head_dim, causal, packed)


def _cuda_backward(
    gpu: tuple[str, int], dtype: torch.dtype, head_dim: int, causal: bool, packed: bool
) -> Iterator[Source]:
    architecture, limit = gpu
    constants = cuda_backward.constants_for(dtype, head_dim, CONVOLUTION, causal, packed, limit)
    assert constants, "it has tiles for these head dims"
    yield constants.prepare_source(architecture)
    yield constants.source(architecture)
    yield constants.exact(architecture).source


def _decode() -> Iterator[Source]:
    for gpu, dtype, head_dim, group, paged in itertools.product(
        DECODE_GPUS, DTYPES, DECODE_HEAD_DIMS, DECODE_GROUPS, (False, True)
    ):
        architecture, limit, multiprocessors = gpu
        shape = limit, multiprocessors, dtype, head_dim, CONVOLUTION, group, paged
        for plan in (plan_on(*shape, aligned=True), hopper_plan_on(*shape) if architecture == "sm_90" else None):
            if plan is not None:
                yield plan.constants.source(architecture)
                if not plan.constants.last_adds_up:
                    yield plan.constants.source(architecture, "merge")
                if isinstance(plan.constants, HopperConstants):
                    yield plan.constants.without_merge.source(architecture)


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
