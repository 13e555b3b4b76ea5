"""Launches keys.cu, values.cu and merge.cu."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.conv_attention.cuda_decode import plan as conv_decode
from mta_kernels.conv_attention.cuda_decode.decode import Lengths
from mta_kernels.conv_attention.cuda_decode.plan import FEWEST_KEYS, has_whole_chunks
from mta_kernels.gpu_limits import capability, overlaps_launches, shared_memory_limit, sm_count
from mta_kernels.multi_token_attention.arguments import NormGate
from mta_kernels.multi_token_attention.decode.state import DecodeState
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.multi_token_attention.rows_cuda.rows import Matrix
from mta_kernels.nvrtc.compiler import Source, headers_in, missing_package
from mta_kernels.nvrtc.kernel import Kernel, kernel
from mta_kernels.nvrtc.structures import ELEMENTS, Rows, Weight, fields
from mta_kernels.operation import ONE_TAP, Convolution, Operation

FOLDER = Path(__file__).parent
SHARED_BYTES = 227 * 1024  # that a block must be able to have, even where few heads need less
FEWEST_HEADS, MOST_HEADS, MOST_HEAD_DIM, MOST_TAPS = 8, 16, 128, 16
FLOATS = "PRE_TAPS_FLOAT", "PRE_MIX_FLOAT", "POST_TAPS_FLOAT", "POST_MIX_FLOAT"
TURN = 128  # keys, as in layout.cuh
MERGE_THREADS = 512
TILE_KEYS = 16  # as in layout.cuh
MOST_STAGES = 5
BAND_BYTES = 128  # as in bands.cuh


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
    floats: tuple[bool, ...] = (False,) * 4  # whether these four parts are float32
    norm: bool = False
    gate: int = 0  # 1 for one of a number a head, 2 for one of a number a head dim

    @property
    def threads(self) -> int:
        return 32 * self.heads

    @property
    def tile_bytes(self) -> int:
        """Bytes of a warp's tile of rows."""
        chunks = self.head_dim // 8
        return TILE_KEYS * 16 * (chunks if chunks % 8 == 0 else chunks + 1)

    @property
    def fixed_bytes(self) -> dict[str, int]:
        """Shared memory of keys.cu and of values.cu besides their rings."""
        before, after = ((step or ONE_TAP).query_taps for step in (self.pre, self.post))
        keys = before * (4 * (16 + TURN) + (1 + self.floats[0]) * BAND_BYTES) + 2 * (TURN + 4) * 4 + 16 * 8
        values = (1 + self.post_mix) * (TURN * 2 + 16) + after * BAND_BYTES + 16 * 4 + 2 * 16 * 8
        return {"keys": self.heads * keys + 32 * 32, "values": self.heads * values}

    def stages(self, name: str) -> int:
        """Tiles of a warp, in flight or in use; merge.cu has none."""
        if name == "merge":
            return 0
        return min(MOST_STAGES, (SHARED_BYTES - self.fixed_bytes[name]) // (self.heads * self.tile_bytes))


@dataclass(frozen=True)
class StepKernel:
    """One of the kernels of a step: "keys", "values" or "merge"."""

    name: str
    step: StepConstants

    @property
    def kernel_name(self) -> str:
        return f"mta_decode_{self.name}"

    @property
    def threads(self) -> int:
        return MERGE_THREADS if self.name == "merge" else self.step.threads

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes of a block."""
        if self.name == "merge":
            return MERGE_THREADS * 16
        step = self.step
        return step.fixed_bytes[self.name] + step.stages(self.name) * step.heads * step.tile_bytes

    def source(self, architecture: str) -> Source:
        step = self.step
        pre, post = step.pre or ONE_TAP, step.post or ONE_TAP
        constants = {
            "ELEMENT": ELEMENTS[step.dtype], "HEADS": step.heads, "HEAD_DIM": step.head_dim, "PAGED": int(step.paged),
            "STAGES": step.stages(self.name),
            "PRE_QUERY_TAPS": pre.query_taps, "PRE_KEY_TAPS": pre.key_taps, "PRE_PAD": pre.pad,
            "POST_QUERY_TAPS": post.query_taps, "POST_KEY_TAPS": post.key_taps, "POST_PAD": post.pad,
            "PRE_CONV": int(step.pre is not None), "PRE_MIX": int(step.pre_mix),
            "POST_CONV": int(step.post is not None), "POST_MIX": int(step.post_mix), "MERGE_THREADS": MERGE_THREADS,
            "SHARED_BYTES": self.shared_memory, **dict(zip(FLOATS, map(int, step.floats), strict=True)),
        }  # fmt: skip
        if self.name == "merge":  # so that the others are compiled once
            constants |= {"NORM": int(step.norm), "GATE": step.gate}
        headers = headers_in(conv_decode.FOLDER, FOLDER)
        return Source(FOLDER / f"{self.name}.cu", architecture, constants, headers)


def has_whole_groups(logits: Tensor) -> bool:
    """Whether logits of 8 keys, from a multiple of 8 on, are always contiguous and aligned, in rows of such groups."""
    return logits.stride(3) == 1 and all(n % 8 == 0 for n in (logits.shape[3], *logits.stride()[:3]))


def unsupported(operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Why these kernels cannot take a step, or None if they can."""
    if not q_window.is_cuda or capability(q_window.device) < (8, 0):
        return "they need an NVIDIA GPU from sm_80 on"
    if shared_memory_limit(q_window.device) < SHARED_BYTES:
        return f"they need a GPU with {SHARED_BYTES // 1024} KB of shared memory for a block"
    return missing_package(q_window.device) or shape_unsupported(operation, q_window, k_cache, v_cache)


def shape_unsupported(operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor) -> str | None:
    """Why no GPU could run a step, or None."""
    _, heads, _, head_dim = q_window.shape
    if reason := heads_unsupported(operation, q_window.dtype, heads, k_cache.shape[1], head_dim):
        return reason
    if not all(has_whole_chunks(cache) for cache in (k_cache, v_cache)):
        return "rows of the caches are not whole chunks of 16 bytes"
    return None


@functools.lru_cache(256)
def heads_unsupported(
    operation: Operation, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> str | None:  # fmt: skip
    """The same, whatever the layout of the caches."""
    taps = [step.taps for step in (operation.pre_conv, operation.post_conv) if step is not None]
    if dtype not in ELEMENTS:
        return f"dtype {dtype} is not float16 or bfloat16"
    if heads != kv_heads or not FEWEST_HEADS <= heads <= MOST_HEADS:
        return f"{heads} query heads are not {FEWEST_HEADS} to {MOST_HEADS}, each with a KV head"
    if head_dim % 16 or head_dim > MOST_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of 16 up to {MOST_HEAD_DIM}"
    most_queries, most_keys = map(max, zip(ONE_TAP.taps, *taps, strict=True))
    if most_keys > MOST_TAPS:
        return f"{most_keys} key taps are more than {MOST_TAPS}"
    if most_queries > MOST_TAPS:
        return f"{most_queries} query taps are more than {MOST_TAPS}"
    most = StepConstants(
        dtype, heads, head_dim, False, operation.pre_conv, True, operation.post_conv, True, (True,) * 4
    )  # fmt: skip
    if min(map(most.stages, most.fixed_bytes)) < 2:
        return f"{heads} heads of {head_dim} with {most_queries} query taps leave no room for two tiles"
    return None


class StepArguments(ctypes.Structure):
    """`struct Arguments` of layout.cuh."""

    _fields_ = (
        *fields(Rows, "q k v"), *fields(Weight, "pre_taps post_taps"), *fields(Matrix, "pre_mix post_mix"),
        ("table", c_void_p), *fields(c_int64, "table_stride_batch table_stride_page"),
        *fields(c_int, "page_bits window"), ("lengths", Lengths),
        *fields(c_int, "programs splits slots wide"), ("scale", c_float), ("logits", c_void_p),
        *fields(c_int64, "stride_lb stride_lh stride_ls stride_ln"), ("logsumexp", c_void_p),
        *fields(c_int64, "stride_sb stride_sh stride_ss"), ("seen", c_void_p), ("stride_seen", c_int64),
        *fields(c_void_p, "found partial out"), *fields(Matrix, "norm gate bias"), *fields(c_float, "eps factor"),
    )  # fmt: skip


def newest_row(
    operation: Operation, q_window: Tensor, k_cache: Tensor, v_cache: Tensor, mixers: Mixers, after: NormGate,
    lengths: Tensor, state: DecodeState | None, block_table: Tensor | None, splits: int, logits: Tensor,
) -> Tensor:  # fmt: skip
    """The newest row, for a step that passes `unsupported`: `[B, Hq, 1, D]`.

    `logits [B, H, slots, S]` are the state's, or one slot without a state. `splits` is 0 for "auto".
    """
    batch, heads, window, head_dim = q_window.shape
    device, gate = q_window.device, after.gate_weight
    constants = StepConstants(
        q_window.dtype, heads, head_dim, block_table is not None, operation.pre_conv, mixers.pre_mix is not None,
        operation.post_conv, mixers.post_mix is not None,
        tuple(x is not None and x.dtype == torch.float32 for x in mixers),
        after.norm_weight is not None, 0 if gate is None else 1 if gate.shape[0] == 1 else 2,
    )  # fmt: skip
    capacity = k_cache.shape[2] * (1 if block_table is None else block_table.shape[1])
    # One program an SM if there is work for them.
    programs = batch * splits or min(sm_count(device), max(1, batch * -(-capacity // FEWEST_KEYS)))
    if not has_whole_chunks(q_window):
        q_window = q_window.clone(memory_format=torch.contiguous_format)  # small
    scratch = empty(programs + batch, heads, head_dim + 1, dtype=torch.float32, device=device)
    out = empty(batch, heads, 1, head_dim, dtype=q_window.dtype, device=device)
    arguments = StepArguments(
        q=Rows.in_bytes(q_window), k=Rows.in_bytes(k_cache), v=Rows.in_bytes(v_cache), window=window,
        pre_taps=Weight.of(mixers.pre_conv), post_taps=Weight.of(mixers.post_conv),
        pre_mix=Matrix.of(mixers.pre_mix), post_mix=Matrix.of(mixers.post_mix),
        norm=Matrix.of(None if after.norm_weight is None else after.norm_weight[None]), gate=Matrix.of(gate),
        bias=Matrix.of(None if after.gate_bias is None else after.gate_bias[:, None]),
        lengths=Lengths(lengths.data_ptr(), lengths.stride(0) * lengths.element_size() // 4, batch, 1),
        programs=programs, splits=splits, slots=logits.shape[2], scale=operation.scale,
        wide=has_whole_groups(logits) and logits.data_ptr() % 16 == 0, logits=logits.data_ptr(),
        found=scratch.data_ptr() + 4 * (programs + batch) * heads * head_dim,
        partial=scratch.data_ptr(), out=out.data_ptr(), eps=after.norm_eps, factor=after.factor,
    )  # fmt: skip
    arguments.stride_lb, arguments.stride_lh, arguments.stride_ls, arguments.stride_ln = logits.stride()
    if state is not None:
        arguments.logsumexp, arguments.seen = state.logsumexp.data_ptr(), state.lengths.data_ptr()
        arguments.stride_sb, arguments.stride_sh, arguments.stride_ss = state.logsumexp.stride()
        arguments.stride_seen = state.lengths.stride(0)
    if block_table is not None:
        arguments.table = block_table.data_ptr()
        arguments.table_stride_batch, arguments.table_stride_page = block_table.stride()
        arguments.page_bits = k_cache.shape[2].bit_length() - 1
    keys, values, merge = _kernels(constants, device.index)
    follows = overlaps_launches(device)
    keys.launch((programs, 1), arguments)
    values.launch((programs, 1), arguments, follows=follows)
    merge.launch((batch * heads, 1), arguments, follows=follows)
    return out


@functools.cache
def _kernels(constants: StepConstants, device: int) -> tuple[Kernel, ...]:
    return tuple(kernel(StepKernel(name, constants), device) for name in ("keys", "values", "merge"))
