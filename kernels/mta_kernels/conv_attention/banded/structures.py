"""What the banded kernels are given, in ctypes, and how their heads are scheduled."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p

from torch import Tensor

from mta_kernels.nvrtc.structures import Rows, Weight, fields

L2_BYTES = 32 << 20  # keys and values that L2 holds


class Positions(ctypes.Structure):
    """`struct Positions` of positions.cuh."""

    _fields_ = (("spans", c_void_p), *fields(c_int, "heads group query_rows key_rows"))


class Inputs(ctypes.Structure):
    """`struct Inputs` of exact.cuh."""

    _fields_ = (*fields(Rows, "q k v"), ("weight", Weight), ("scale", c_float))


def heads_in_l2(k: Tensor, heads: int) -> int:
    """How many of `heads` query heads (of all sequences) are scheduled together; `k` is `[B, Hkv, N, D]`.

    Their longest work tiles go first, so that the last tiles to end are short, and their keys and values stay in L2.
    Groups are as equal as can be: a last group of few heads would have few blocks to share its long tiles.
    """
    groups = min(heads, -(-2 * k.nbytes // L2_BYTES))
    return -(-heads // groups)
