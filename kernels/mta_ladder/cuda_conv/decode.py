"""Launches the two kernels of decode.cu: one computes a split's share of the keys, one combines the splits."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int, c_void_p

import torch
from torch import Tensor

from mta_kernels import planned
from mta_kernels.allocation import empty
from mta_kernels.conv_attention.arguments import MAX_SPLITS, check_splits
from mta_kernels.conv_attention.reference import check_decode_arguments
from mta_kernels.gpu_limits import sm_count
from mta_kernels.nvrtc.structures import Rows, fields, in_chunks
from mta_kernels.operation import key_padding, softmax_scale
from mta_ladder.cuda_conv.attention import refuse, taps_of
from mta_ladder.cuda_conv.shape import Shape, launch

BLOCKS_PER_SM = 4
KEYS = 128  # a step of a block


class Arguments(ctypes.Structure):
    """`struct Arguments` of decode.cu."""

    _fields_ = (
        *fields(Rows, "q k v"), *fields(c_void_p, "weight lengths partial maxima sums out"), ("scale_log2", c_float),
        *fields(c_int, "heads group window splits pad"),
    )  # fmt: skip


def conv_attention_decode(
    q_window: Tensor, k_cache: Tensor, v_cache: Tensor, weight: Tensor, *, lengths: Tensor, splits: int | str = "auto",
    scale: float | None = None, pad_key: str = "both",
) -> Tensor:  # fmt: skip
    """One decode step, `[B, Hq, 1, D]`, as `mta_kernels.conv_attention.conv_attention_decode` without pages.

    `splits` blocks share a query head's keys, "auto" by `choose_splits`. Has no gradient. A length of 0 gives zeros;
    nothing waits for the device. Raises ValueError or TypeError for arguments that do not fit or are refused.
    """
    check_decode_arguments(q_window, k_cache, v_cache, weight, lengths, pad_key)
    refuse(q_window, weight)
    check_splits(splits)
    q, k, v = (in_chunks(x.detach()) for x in (q_window, k_cache, v_cache))
    batch, heads, window, head_dim = q.shape
    count = choose_splits(batch, heads, k.shape[2], q.device) if splits == "auto" else int(splits)
    shape, taps = Shape(q.dtype, head_dim, *weight.shape[1:]), taps_of(weight)
    lengths = lengths.to(torch.int32).contiguous()
    partial = empty(batch * heads, count, head_dim, dtype=torch.float32, device=q.device)
    maxima, sums = empty(2, batch * heads, count, dtype=torch.float32, device=q.device)
    out = empty(batch, heads, 1, head_dim, dtype=q.dtype, device=q.device)
    arguments = Arguments(
        Rows.of(q), Rows.of(k), Rows.of(v), taps.data_ptr(), lengths.data_ptr(), partial.data_ptr(), maxima.data_ptr(),
        sums.data_ptr(), out.data_ptr(), softmax_scale(scale, head_dim) * math.log2(math.e), heads,
        heads // k.shape[1], window, count, key_padding(weight.shape[2], pad_key),
    )  # fmt: skip
    launch(shape, "decode.cu", "conv_attention_decode_split", count * heads * batch, q.device, arguments)
    launch(shape, "decode.cu", "conv_attention_decode_combine", heads * batch, q.device, arguments)
    if (recorder := planned.recorder()) is not None:
        recorder.found.splits = count
    return out


def choose_splits(batch: int, heads: int, capacity: int, device: torch.device | str) -> int:
    """Blocks that share a query head's keys: enough to fill the GPU once, but each with at least one step."""
    wanted = BLOCKS_PER_SM * sm_count(torch.device(device)) // (batch * heads)
    return max(1, min(wanted, -(-capacity // KEYS), MAX_SPLITS))
