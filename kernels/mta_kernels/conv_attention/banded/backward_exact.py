"""The launch of backward_exact.cu: what rows that the backwards leave out add to the gradients."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from mta_kernels.conv_attention.banded import FOLDER, banded_headers
from mta_kernels.conv_attention.banded.structures import Inputs, Positions
from mta_kernels.nvrtc.compiler import Source
from mta_kernels.nvrtc.structures import ELEMENTS, Rows, fields
from mta_kernels.operation import Convolution


@dataclass(frozen=True)
class ExactConstants:
    """The constants of backward_exact.cu for a shape, on a GPU of an architecture such as "sm_80"."""

    architecture: str
    dtype: torch.dtype
    head_dim: int
    conv: Convolution
    causal: bool
    spans: bool
    margins: bool = False

    kernel_name, threads = "backward_exact", 256

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as backward_exact.cu lays them out."""
        taps = self.conv.query_taps
        return 4 * ((2 * taps + 2) * self.threads + taps * self.head_dim)

    def constants(self) -> dict[str, Any]:
        return {
            "ELEMENT": ELEMENTS[self.dtype], "HEAD_DIM": self.head_dim, "QUERY_TAPS": self.conv.query_taps,
            "KEY_TAPS": self.conv.key_taps, "PAD": self.conv.pad, "MARGINS": int(self.margins),
            "CAUSAL": int(self.causal), "SPANS": int(self.spans),
        }  # fmt: skip

    @property
    def source(self) -> Source:
        return Source(FOLDER / "backward_exact.cu", self.architecture, self.constants(), banded_headers())


class ExactArguments(ctypes.Structure):
    """`struct Arguments` of backward_exact.cu."""

    _fields_ = (
        ("at", Positions), ("inputs", Inputs), ("grad_out", Rows), *fields(c_void_p, "logsumexp dq dk dv dweight"),
        ("weight_pitch", c_int), *fields(c_void_p, "delta dk_rounded dv_rounded weight_grad heads_done"),
        *fields(c_int, "weight_grad_is_float batch"),
    )  # fmt: skip
