"""Launches prepare.cu, which computes what the kernels need besides their inputs; structures that they share."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from typing import Any

from mta_kernels.conv_attention.banded.backward_plan import NORM_PARTS
from mta_kernels.conv_attention.banded.structures import BandedConstants
from mta_kernels.conv_attention.hopper.source import hopper_source
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source
from mta_kernels.nvrtc.kernel import kernel
from mta_kernels.nvrtc.structures import Rows, Weight, fields

TAP_NUMBERS = 16 * 32


@dataclass(frozen=True)
class PrepareConstants(BandedConstants):
    """The constants of prepare.cu for a shape; neither a causal mask nor spans make a difference."""

    causal: bool = True
    spans: bool = False

    kernel_name, threads, shared_memory = "hopper_prepare", 256, 32

    @property
    def tap_bytes(self) -> int:
        """Bytes of T of one head."""
        return self.conv.query_taps * TAP_NUMBERS * 2

    def source(self, architecture: str = "sm_90a") -> Source:
        return hopper_source("prepare.cu", self.constants())


@dataclass(frozen=True)
class HopperTileConstants(BandedConstants):
    """The constants that forward.cu and backward.cu share for a shape; subclasses add the others."""

    @property
    def warpgroups(self) -> int:
        """Consumers a block."""
        return 2

    @property
    def stages(self) -> int:
        """Pipeline stages: a tile of keys each, and what else is needed of the tile before."""
        raise NotImplementedError

    @property
    def prepared(self) -> PrepareConstants:
        return PrepareConstants(self.dtype, self.head_dim, self.conv)

    @property
    def slabs(self) -> int:
        """Tiles of 64 columns that hold the head dim."""
        return -(-self.head_dim // 64)

    @property
    def threads(self) -> int:
        """Threads a block: its consumers and a producer."""
        return 128 * (self.warpgroups + 1)

    def constants(self) -> dict[str, Any]:
        return {**super().constants(), "WARPGROUPS": self.warpgroups, "STAGES": self.stages}


class HopperPreparation(ctypes.Structure):
    """`struct Preparation` of prepare.cu."""

    _fields_ = (
        *fields(Rows, "v out grad_out"), ("weight", Weight),
        *fields(c_void_p, "taps taps_back weight_scale value_norms grad_norms delta counters logsumexp exact_rows"),
        ("scale_log2", c_float),
        *fields(c_int, "heads kv_heads batch query_rows key_rows counter_count"),
    )  # fmt: skip


def prepare_launch(prepared: PrepareConstants, preparation: HopperPreparation, device: int) -> driver.Launch:
    """The launch of prepare.cu, for the backward if `preparation.grad_out` is set. Other addresses may follow later."""
    backward = preparation.grad_out.start is not None
    parts = 1 + 2 * NORM_PARTS if backward else 1
    heads = preparation.heads * (preparation.batch if backward else 1)
    return kernel(prepared, device).prepared((heads, parts), preparation)
