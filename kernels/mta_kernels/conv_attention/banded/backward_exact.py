"""The launch of backward_exact.cu: what rows that the backwards leave out add to the gradients."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p
from dataclasses import dataclass

from mta_kernels.conv_attention.banded import FOLDER
from mta_kernels.conv_attention.banded.structures import BandedConstants, Inputs, Positions
from mta_kernels.nvrtc.compiler import Source, headers_in
from mta_kernels.nvrtc.structures import Rows, fields


@dataclass(frozen=True)
class ExactConstants(BandedConstants):
    """The constants of backward_exact.cu for a shape."""

    margins: bool = False
    architecture: str = ""  # instead of the GPU's own

    kernel_name, threads = "backward_exact", 256

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as backward_exact.cu lays them out."""
        taps = self.conv.query_taps
        return 4 * ((2 * taps + 2) * self.threads + taps * self.head_dim)

    def source(self, architecture: str) -> Source:
        return Source(
            FOLDER / "backward_exact.cu", self.architecture or architecture, self.constants(), headers_in(FOLDER)
        )


class ExactArguments(ctypes.Structure):
    """`struct Arguments` of backward_exact.cu."""

    _fields_ = (
        ("at", Positions), ("inputs", Inputs), ("grad_out", Rows), *fields(c_void_p, "logsumexp dq dk dv dweight"),
        ("weight_pitch", c_int), *fields(c_void_p, "delta dk_rounded dv_rounded weight_grad heads_done"),
        *fields(c_int, "weight_grad_is_float batch"),
    )  # fmt: skip
