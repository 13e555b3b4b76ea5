"""The constants of decode's CUDA kernels for a shape, and how many programs of them a GPU takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mta_kernels.conv_attention.cuda_decode import plan as conv_decode
from mta_kernels.conv_attention.cuda_decode.plan import FEWEST_KEYS, has_whole_chunks
from mta_kernels.gpu_limits import capability, shared_memory_limit
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.nvrtc.compiler import Source, headers_in, missing_package
from mta_kernels.nvrtc.structures import ELEMENTS
from mta_kernels.operation import ONE_TAP, Convolution, Operation

FOLDER = Path(__file__).parent
FEWEST_SEQUENCES = 8  # where these kernels are the faster: decision 55
SHARED_BYTES = 227 * 1024  # that a block must be able to have; a step of few heads would do with less
FEWEST_HEADS, MOST_HEADS, MOST_HEAD_DIM, MOST_TAPS = 8, 16, 128, 16
FLOATS = "PRE_TAPS_FLOAT", "PRE_MIX_FLOAT", "POST_TAPS_FLOAT", "POST_MIX_FLOAT"
TURN = 128  # keys, as in layout.cuh
MERGE_THREADS = 512
AHEAD_TILES = 4  # of a warp's values, which memory can bring while the last programs still read keys
RING_BYTES = 136 * 1024  # of a program's buffers: beside them the kernel of older rows has room on an SM


@dataclass(frozen=True)
class StepConstants:
    """The constants of the kernels, as layout.cuh explains them."""

    dtype: torch.dtype
    heads: int
    head_dim: int
    paged: bool
    pre: Convolution | None
    pre_mix: bool
    post: Convolution | None
    post_mix: bool
    floats: tuple[bool, bool, bool, bool] = (False,) * 4  # whether these four parts are float32

    @property
    def threads(self) -> int:
        return 32 * self.heads

    @property
    def tile_keys(self) -> int:
        """Of a warp's tile."""
        return 32 if self.head_dim <= 64 else 16

    @property
    def tile_bytes(self) -> int:
        """Of a warp's tile of rows."""
        return self.tile_keys * (2 * self.head_dim + 16)

    @property
    def stages(self) -> int:
        """Tiles of a warp, on their way or multiplied."""
        return max(2, min(6, RING_BYTES // (self.heads * self.tile_bytes)))

    @property
    def keys_bytes(self) -> int:
        """Shared memory of keys.cu."""
        products = 0 if self.pre is None else 16 * (self.tile_keys + 4) * 4
        ring = self.stages * self.tile_bytes
        return self.heads * (ring + products + 2 * (TURN + 4) * 4 + 16 * 8) + 32 * 32

    @property
    def values_bytes(self) -> int:
        """Shared memory of values.cu."""
        row = 0 if self.post is None else (TURN + self.post.key_taps - 1) * 4
        ring = self.stages * self.tile_bytes
        return self.heads * (ring + (1 + self.post_mix) * (TURN * 2 + 16) + row + 2 * 16 * 8)

    @property
    def merge_bytes(self) -> int:
        """Shared memory of merge.cu."""
        return MERGE_THREADS * 16

    def source(self, name: str, shared_memory: int, architecture: str) -> Source:
        """Of one kernel."""
        pre, post = self.pre or ONE_TAP, self.post or ONE_TAP
        constants = {
            "ELEMENT": ELEMENTS[self.dtype], "HEADS": self.heads, "HEAD_DIM": self.head_dim, "PAGED": int(self.paged),
            "KEYS": self.tile_keys, "STAGES": self.stages, "AHEAD": AHEAD_TILES,
            "PRE_QUERY_TAPS": pre.query_taps, "PRE_KEY_TAPS": pre.key_taps, "PRE_PAD": pre.pad,
            "POST_KEY_TAPS": post.key_taps, "POST_PAD": post.pad, "PRE_CONV": int(self.pre is not None),
            "PRE_MIX": int(self.pre_mix), "POST_CONV": int(self.post is not None),
            "OLDER": int(post.query_taps > 1), "POST_MIX": int(self.post_mix), "MERGE_THREADS": MERGE_THREADS,
            "SHARED_BYTES": shared_memory, **dict(zip(FLOATS, map(int, self.floats), strict=True)),
        }  # fmt: skip
        headers = headers_in(FOLDER, ("layout.cuh", "decode_instructions.cuh")) | headers_in(
            conv_decode.FOLDER, ("work.cuh", "sm80_decode.cuh")
        )
        return Source(FOLDER / name, architecture, constants, headers)


def constants_for(operation: Operation, q: Tensor, mixers: Mixers, block_table: Tensor | None) -> StepConstants:
    """Of a step whose arguments `unsupported` has no reason against."""
    return StepConstants(
        q.dtype, q.shape[1], q.shape[3], block_table is not None, operation.pre_conv, mixers.pre_mix is not None,
        operation.post_conv, mixers.post_mix is not None, _floats(mixers),
    )  # fmt: skip


def _floats(mixers: Mixers) -> tuple[bool, bool, bool, bool]:
    pre_taps, pre_mix, post_taps, post_mix = (x is not None and x.dtype == torch.float32 for x in mixers)
    return pre_taps, pre_mix, post_taps, post_mix


def pays(operation: Operation, batch: int) -> bool:
    """Whether a step of so many sequences is faster by these kernels than by Triton's: with a convolution before."""
    return operation.pre_conv is not None and batch >= FEWEST_SEQUENCES


def unsupported(operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Why these kernels cannot take a step, or None if they can."""
    if not q_window.is_cuda or capability(q_window.device) < (8, 0):
        return "they need an NVIDIA GPU from sm_80 on"
    if shared_memory_limit(q_window.device) < SHARED_BYTES:
        return f"they need a GPU with {SHARED_BYTES // 1024} KB of shared memory for a block"
    return missing_package() or shape_unsupported(operation, q_window, k_cache, v_cache)


def shape_unsupported(operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Why no GPU could, or None."""
    _, heads, _, head_dim = q_window.shape
    if reason := heads_unsupported(operation, q_window.dtype, heads, k_cache.shape[1], head_dim):
        return reason
    if not all(has_whole_chunks(cache) for cache in (k_cache, v_cache)):
        return "rows of the caches are not whole chunks of 16 bytes"
    return None


def heads_unsupported(
    operation: Operation, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> str | None:  # fmt: skip
    """The same, whatever the layout of the caches."""
    taps = [step.key_taps for step in (operation.pre_conv, operation.post_conv) if step is not None]
    if dtype not in ELEMENTS:
        return f"dtype {dtype} is not float16 or bfloat16"
    if heads != kv_heads or not FEWEST_HEADS <= heads <= MOST_HEADS:
        return f"{heads} query heads are not {FEWEST_HEADS} to {MOST_HEADS}, each with a KV head"
    if head_dim % 16 or head_dim > MOST_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of 16 up to {MOST_HEAD_DIM}"
    if any(count > MOST_TAPS for count in taps):
        return f"{max(taps)} key taps are more than {MOST_TAPS}"
    return None


def programs_for(sm_count: int, batch: int, capacity: int, splits: int) -> int:
    """Programs of a step: `splits` a sequence unless 0, else one an SM if there is work for them."""
    return batch * splits if splits else min(sm_count, max(1, batch * -(-capacity // FEWEST_KEYS)))
