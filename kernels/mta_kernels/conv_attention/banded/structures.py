"""The constants and arguments that the banded kernels share, and how their heads are scheduled."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mta_kernels.nvrtc.structures import ELEMENTS, Rows, Weight, fields
from mta_kernels.operation import Convolution

L2_BYTES = 32 << 20  # keys and values that L2 holds


@dataclass(frozen=True)
class BandedConstants:
    """The constants with which the constants of every kernel begin."""

    dtype: torch.dtype
    head_dim: int
    conv: Convolution
    causal: bool
    spans: bool

    def constants(self) -> dict[str, Any]:
        return {
            "ELEMENT": ELEMENTS[self.dtype], "HEAD_DIM": self.head_dim, "QUERY_TAPS": self.conv.query_taps,
            "KEY_TAPS": self.conv.key_taps, "PAD": self.conv.pad, "CAUSAL": int(self.causal),
            "SPANS": int(self.spans),
        }  # fmt: skip


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
