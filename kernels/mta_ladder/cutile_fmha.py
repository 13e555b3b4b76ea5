"""Rung 8, `cutile-fmha`: the algorithm of `triton-fmha` in cuTile for Python, NVIDIA's tile language.

There is no interpreter; `fmha_kernel` takes the language as an argument, so that a test can give it one. Needs the
extra `cutile` (cuda-tile and its compiler), a GPU of sm_80 or later and a driver of CUDA 13. Hopper needs cuda-tile
1.4 and the compiler of CUDA 13.3.
"""

# No `from __future__ import annotations`: cuTile reads the kernel's annotations, which name a local variable.
import ctypes
import functools
import importlib.util
import math
import os
import re
import shutil
import subprocess
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mta_kernels.allocation import empty

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = range(16, 257)
INSTALL = "pip install 'mtabench[cutile]'"


def fmha_kernel(ct: ModuleType) -> Any:
    """The kernel, in the language `ct`: `cuda.tile`."""

    def attend(accumulator, running_max, running_sum, scores, values, scale):
        """Online softmax (arXiv 2205.14135): take in one tile of unscaled scores and its values."""
        new_max = ct.maximum(running_max, ct.max(scores, axis=1, keepdims=True) * scale)
        p = ct.exp2(scores * scale - new_max, flush_to_zero=True)  # [TILE_M, TILE_N]
        rescale = ct.exp2(running_max - new_max, flush_to_zero=True)
        running_sum = running_sum * rescale + ct.sum(p, axis=1, keepdims=True)
        accumulator = ct.mma(ct.astype(p, values.dtype), values, accumulator * rescale)
        return accumulator, new_max, running_sum

    @ct.kernel
    def attention_cutile_kernel(
        q, k, v, out, scale: float, GROUP: ct.Constant[int], CAUSAL: ct.Constant[bool],  # type: ignore[name-defined]
        TILE_M: ct.Constant[int], TILE_N: ct.Constant[int], TILE_D: ct.Constant[int], TILE_V: ct.Constant[int],  # type: ignore[name-defined]
    ):  # fmt: skip
        """One block: TILE_M queries of one head. q `[B, Hq, M, D]`, k `[B, Hkv, N, D]`, v `[B, Hkv, N, Dv]` and
        out `[B, Hq, M, Dv]`, of any strides. `scale` is in units of log2, and positive.

        An index counts tiles, not elements. What lies outside an array reads as zero and is not stored.
        """
        zero = ct.PaddingMode.ZERO
        query_rows, key_rows = q.shape[2], k.shape[2]
        query_tile = ct.num_blocks(0) - 1 - ct.bid(0)  # causal tiles near the end have the most keys: start with them
        head, batch = ct.bid(1), ct.bid(2)
        kv_head = head // GROUP

        first_position = query_tile * TILE_M + key_rows - query_rows
        position = first_position + ct.arange(TILE_M, dtype=ct.int32)  # the last key that a causal query sees
        if CAUSAL:
            all_see_tiles = (first_position + 1) // TILE_N
            end = ct.cdiv(min(first_position + TILE_M, key_rows), TILE_N)
        else:
            all_see_tiles = key_rows // TILE_N
            end = ct.cdiv(key_rows, TILE_N)

        queries = ct.load(q, (batch, head, query_tile, 0), (1, 1, TILE_M, TILE_D), padding_mode=zero)
        queries = ct.reshape(queries, (TILE_M, TILE_D))

        def score_tile(key_tile):
            keys = ct.load(
                k, (batch, kv_head, 0, key_tile), (1, 1, TILE_D, TILE_N), order=(0, 1, 3, 2), padding_mode=zero
            )
            nothing = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
            return ct.mma(queries, ct.reshape(keys, (TILE_D, TILE_N)), nothing)

        def value_tile(key_tile):
            values = ct.load(v, (batch, kv_head, key_tile, 0), (1, 1, TILE_N, TILE_V), padding_mode=zero)
            return ct.reshape(values, (TILE_N, TILE_V))

        accumulator = ct.zeros((TILE_M, TILE_V), dtype=ct.float32)
        running_max = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
        running_sum = ct.zeros((TILE_M, 1), dtype=ct.float32)
        for key_tile in range(all_see_tiles):
            accumulator, running_max, running_sum = attend(
                accumulator, running_max, running_sum, score_tile(key_tile), value_tile(key_tile), scale
            )
        for key_tile in range(all_see_tiles, end):
            key = key_tile * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
            seen = key[None, :] <= position[:, None] if CAUSAL else (key < key_rows)[None, :]
            # Masked before the maximum is taken, which a padded key's score of zero could win.
            scores = ct.where(seen, score_tile(key_tile), -math.inf)
            accumulator, running_max, running_sum = attend(
                accumulator, running_max, running_sum, scores, value_tile(key_tile), scale
            )

        result = ct.astype(accumulator / running_sum, out.dtype)
        ct.store(out, (batch, head, query_tile, 0), ct.reshape(result, (1, 1, TILE_M, TILE_V)))

    return attention_cutile_kernel


@functools.cache
def _compiled_kernel() -> Any:
    import cuda.tile

    return fmha_kernel(cuda.tile)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Attention of `q [B, Hq, M, D]`, `k [B, Hkv, N, D]`, `v [B, Hkv, N, Dv]`: `[B, Hq, M, Dv]` in q's dtype.

    Causal: the queries are the last M of N positions. Strides may be any; nothing is copied. The first call with new
    tile sizes or a new alignment compiles for seconds, into cuda-tile's own cache.
    """
    import cuda.tile

    out = empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    grid, arguments = launch_arguments(q, k, v, out, causal, scale, torch.cuda.get_device_capability(q.device))
    with torch.cuda.device(q.device):
        cuda.tile.launch(torch.cuda.current_stream(), grid, _compiled_kernel(), arguments)
    return out


def launch_arguments(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, causal: bool, scale: float, capability: tuple[int, int]
) -> tuple[tuple[int, int, int], tuple]:
    """The grid and the kernel's arguments on a GPU of this capability."""
    if scale <= 0:  # the kernel scales after it has taken the maximum
        q, scale = q * scale, 1.0
    batch, heads, query_rows, head_dim = q.shape
    tile_d, tile_v = (max(16, 1 << (columns - 1).bit_length()) for columns in (head_dim, v.shape[3]))
    tile_m, tile_n = tile_rows(max(tile_d, tile_v), capability)
    sizes = (tile_m, tile_n, tile_d, tile_v)
    arguments = (q, k, v, out, scale / math.log(2), heads // k.shape[1], causal, *sizes)
    return (-(-query_rows // tile_m), heads, batch), arguments


def tile_rows(columns: int, capability: tuple[int, int]) -> tuple[int, int]:
    """Queries and keys of a tile of so many columns. The compiler fits its stages to the GPU's shared memory."""
    if capability[0] in (9, 10):
        return 128 if columns <= 128 else 64, 64
    return 64, 64 if columns <= 128 else 32


def unsupported(*, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why this rung cannot run with these here, in one clause, or None."""
    if dtype not in DTYPES:
        return f"cutile-fmha takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is outside {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}"
    if device.type != "cuda":
        return f"cuTile kernels need an NVIDIA GPU, not a {device.type} device; they have no interpreter"
    if not has_cuda_tile():
        return f"cuda-tile is not installed ({INSTALL})"
    targets = compiler_targets()
    if not targets:
        return f"cuTile's compiler, tileiras, is not installed ({INSTALL})"
    target = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    if target not in targets:
        return f"this tileiras compiles for {', '.join(targets)} but not for {target}; a newer one may ({INSTALL} -U)"
    if driver_version() < 13000:
        return "cuTile needs an NVIDIA driver of CUDA 13 (580 or later)"
    return None


def has_cuda_tile() -> bool:
    """Is the package there?"""
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.tile") is not None


@functools.cache
def compiler_targets() -> tuple[str, ...]:
    """GPUs that cuTile's compiler knows ("sm_90"), empty where there is none."""
    found = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    roots = [*(found.submodule_search_locations or () if found else ()), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [os.path.join(root, "bin") for root in roots if root] + [os.environ.get("PATH", "")]
    compiler = shutil.which("tileiras", path=os.pathsep.join(places))
    if compiler is None:
        return ()
    helped = subprocess.run([compiler, "--help"], capture_output=True, text=True, check=False)
    return tuple(re.findall(r"^\s*=(sm_\d+)\s", helped.stdout, re.MULTILINE))


def driver_version() -> int:
    """The newest CUDA of the driver, 13020 for 13.2, 0 without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value
