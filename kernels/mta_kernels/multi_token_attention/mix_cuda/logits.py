"""Launches logits.cu: the constants of a shape, the distribution of its work, and the kernels' arguments."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.call_memory import keep
from mta_kernels.conv_attention.hopper import source as hopper
from mta_kernels.conv_attention.hopper.tensor_maps import has_describable_strides, tensor_map
from mta_kernels.multi_token_attention.rows_cuda import rows
from mta_kernels.multi_token_attention.rows_cuda.rows import Matrix
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.kernel import SecondKernel, kernel
from mta_kernels.nvrtc.structures import fields

FOLDER = Path(__file__).parent
MOST_HEADS, MOST_HEAD_DIM = 16, 128


def shape_unsupported(dtype: torch.dtype, heads: int, head_dim: int) -> str | None:
    """Why no Hopper GPU could run a shape, or None."""
    if dtype != torch.bfloat16:
        return f"dtype {dtype} is not bfloat16"
    if heads > MOST_HEADS:
        return f"{heads} heads are more than {MOST_HEADS}"
    if head_dim % 16 or not 16 <= head_dim <= MOST_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of 16 up to {MOST_HEAD_DIM}"
    return None


def source(name: str, constants: dict[str, Any], columns: int) -> Source:
    """The source of a kernel that uses products of so many columns, for sm_90a."""
    header = hopper.wgmma_header((columns, "Bfloat16"))
    headers = headers_in(hopper.FOLDER, rows.FOLDER, FOLDER) | {"wgmma.cuh": header}
    return Source(FOLDER / name, "sm_90a", constants, headers)


TILE_ROWS, BLOCK_KEYS, STEP_KEYS = 64, 64, 32  # as in logits_layout.cuh
THREADS, FINISH_THREADS = 32 * 16, 256
LEAST_BLOCKS = 2  # of 64 keys, the least work of a cluster
MAX_LAUNCHES = 1024
_launches: dict[tuple, Any] = {}


@dataclass(frozen=True)
class LogitConstants:
    """The constants of logits.cu for a shape."""

    heads: int
    head_dim: int

    kernel_name, threads = "mix_logits", THREADS

    @property
    def split(self) -> int:
        """Blocks that share a tile of rows, each with the queries of some heads."""
        return 1 if self.head_dim <= 64 else 2

    @property
    def tiles(self) -> int:
        """Tiles of a cluster, which take the same keys."""
        return self.split

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.split * self.tiles

    @property
    def rows(self) -> int:
        """Query rows of a cluster."""
        return self.tiles * TILE_ROWS

    @property
    def buffers(self) -> int:
        """Buffers for a step's scores of a block's rows."""
        return 2 * self.split

    @property
    def shared_memory(self) -> int:
        """Bytes of a block, as logits_layout.cuh lays them out."""
        rows, slabs = TILE_ROWS // self.split, -(-self.head_dim // 64)
        planes = 16 * (rows * STEP_KEYS * 2 + 16)
        stages = 2 * -(-self.heads // (2 * self.split))
        barriers = 2 * stages + self.buffers * (rows // 16 + 4)
        return stages * slabs * STEP_KEYS * 128 + self.buffers * planes + rows * 128 + barriers * 8

    def source(self, architecture: str = "sm_90a") -> Source:
        constants = {
            "HEADS": self.heads, "HEAD_DIM": self.head_dim, "SPLIT": self.split, "TILES": self.tiles,
            "CLUSTER": self.cluster, "BUFFERS": self.buffers, "BULK": 1, "BYTES": self.shared_memory,
            "FINISH_THREADS": FINISH_THREADS,
        }  # fmt: skip
        return source("logits.cu", constants, STEP_KEYS)


@functools.cache
def constants_for(heads: int, head_dim: int) -> LogitConstants:
    """The constants of a shape; raises ValueError where `shape_unsupported` has a reason."""
    if reason := shape_unsupported(torch.bfloat16, heads, head_dim):
        raise ValueError(reason)
    return LogitConstants(heads, head_dim)


class LogitArguments(ctypes.Structure):
    """`struct Arguments` of logits_layout.cuh."""

    _fields_ = (
        ("pre", Matrix), *fields(c_void_p, "kept parts scales logsumexp"),
        *fields(c_int64, "sums_batch sums_head sums_row pitch"), ("scale", c_float),
        *fields(c_int, "units batch rows first_row first_position keys causal group most_blocks workers most_parts"),
    )  # fmt: skip


@dataclass(frozen=True)
class Deal:
    """How clusters divide the blocks of 64 keys of all tiles of rows: numbers of logits_layout.cuh."""

    units: int
    most_blocks: int
    workers: int
    most_parts: int  # pieces of a row


@functools.lru_cache(256)
def dealt_out(
    batch: int, rows: int, tile: int, first_position: int, keys: int, pitch: int, causal: bool, workers: int
) -> Deal:  # fmt: skip
    """Divide the work evenly over `workers` clusters, or fewer if there is little, with tiles of `tile` rows."""
    most_blocks = pitch // BLOCK_KEYS if causal else -(-keys // BLOCK_KEYS)
    blocks = [most_blocks] * -(-rows // tile)
    if causal:
        last = range(first_position + tile - 1, first_position + tile * len(blocks), tile)
        blocks = [min(position // BLOCK_KEYS + 1, most_blocks) for position in last]
    units = batch * sum(blocks)
    workers = max(1, min(workers, units // LEAST_BLOCKS))
    return Deal(units, most_blocks, workers, max(blocks) // (units // workers) + 2)


def keep_logits(
    q: Tensor, k: Tensor, pre_mix: Tensor | None, kept: Tensor, scales: Tensor, logsumexp_out: Tensor, *, scale: float,
    first_row: int, keys: int, causal: bool, workers: int | None = None,
) -> None:  # fmt: skip
    """Write the exponentials of a chunk's mixed logits, each row's over its own reference, and the rows' sums.

    Rows `first_row` on of `q [B, H, M, D]` against the first `keys` rows of `k [B, H / group, N, D]`; query i has
    position `N - M + i`, which if `causal` is the last key that it sees, and `keys` is one past the chunk's last.
    `kept [B, H, R, pitch]` (contiguous, `pitch` a multiple of 64 from `keys` on) gets `exp(logits - reference)`, zeros
    where a key is not seen: all blocks of 64 keys that some row of the same 64 rows sees. `scales [B, H, R]` (float32,
    contiguous) gets 1 over the row's sum of these, and `logsumexp_out [B, H, R]` (float32, any strides) its natural
    logsumexp. A row that sees nothing has zeros and minus infinity. `pre_mix [H, H]` (out, in) is float32 or bfloat16,
    or None; `workers` overrides how many clusters share the work.
    Raises ValueError for layouts other than these, and where `shape_unsupported` has a reason.
    """
    batch, heads, rows, pitch = kept.shape
    if not rows * batch:
        return
    constants = constants_for(heads, q.shape[3])
    first_position = k.shape[2] - q.shape[2] + first_row
    workers = workers or clusters_at_once(constants, q.device)
    deal = dealt_out(batch, rows, constants.rows, first_position, keys, pitch, causal, workers)
    parts = empty(deal.most_parts * 2 * scales.numel(), dtype=torch.float32, device=q.device)
    key = (
        q.data_ptr(), q.shape, q.stride(), k.data_ptr(), k.shape, k.stride(),
        None if pre_mix is None else (pre_mix.data_ptr(), pre_mix.stride(), pre_mix.dtype),
        kept.data_ptr(), kept.shape, scales.data_ptr(), logsumexp_out.data_ptr(), logsumexp_out.stride(),
        parts.data_ptr(), scale, first_row, keys, causal, deal, q.device,
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        _check(q, k, kept, scales, keys)
        arguments = LogitArguments(
            pre=Matrix.of(pre_mix), kept=kept.data_ptr(), parts=parts.data_ptr(), scales=scales.data_ptr(),
            logsumexp=logsumexp_out.data_ptr(), sums_batch=logsumexp_out.stride(0), sums_head=logsumexp_out.stride(1),
            sums_row=logsumexp_out.stride(2), pitch=pitch, scale=scale, batch=batch, rows=rows, first_row=first_row,
            first_position=first_position, keys=keys, causal=causal, group=heads // k.shape[1], units=deal.units,
            most_blocks=deal.most_blocks, workers=deal.workers, most_parts=deal.most_parts,
        )  # fmt: skip
        launch = keep(_launches, key, _launch(constants, q, k, scales, arguments), MAX_LAUNCHES)
    launch()


def _launch(constants: LogitConstants, q: Tensor, k: Tensor, scales: Tensor, arguments: LogitArguments) -> Any:
    """Both kernels' launches, prepared for the driver."""
    maps = [tensor_map(x, (1, 1, STEP_KEYS, 64)) for x in (q, k)]
    blocks, device = arguments.workers * constants.cluster, q.device.index
    finish = kernel(SecondKernel(constants, "finish_logits", FINISH_THREADS), device)
    return driver.LaunchSequence(
        kernel(constants, device).prepared((blocks, 1), *maps, arguments),
        finish.prepared((-(-scales.numel() // FINISH_THREADS), 1), arguments),
    )


def _check(q: Tensor, k: Tensor, kept: Tensor, scales: Tensor, keys: int) -> None:
    """Raise ValueError for a layout that the kernels do not take."""
    pitch = kept.shape[3]
    if not kept.is_contiguous() or pitch % BLOCK_KEYS or pitch < keys or kept.data_ptr() % 16:
        raise ValueError(
            f"kept logits are {list(kept.shape)} with strides {kept.stride()}; expected contiguous rows of a multiple "
            f"of {BLOCK_KEYS} columns, {keys} or more, at a multiple of 16 bytes"
        )
    if not scales.is_contiguous() or scales.shape != kept.shape[:3]:
        raise ValueError(f"scales are {list(scales.shape)}; expected contiguous {list(kept.shape[:3])}")
    for x in (q, k):
        if not has_describable_strides(x) or x.data_ptr() % 16:
            raise ValueError(f"strides {x.stride()} of q or k are not for the copy engine; expected `rows_of` of it")


@functools.cache
def clusters_at_once(constants: LogitConstants, device: torch.device) -> int:
    """Clusters that a GPU runs at the same time; more would start after these."""
    mix = kernel(constants, device.index)
    return driver.clusters_at_once(mix.function, constants.cluster, THREADS, constants.shared_memory, device.index)
