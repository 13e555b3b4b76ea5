"""The constants of values.cu for a shape."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from mta_kernels.conv_attention.hopper.source import Product
from mta_kernels.multi_token_attention.mix_cuda.shapes import source
from mta_kernels.nvrtc.compiler import Source
from mta_kernels.nvrtc.structures import ELEMENTS

KEYS, THREADS = 32, 512
UNIT = 8 * 16 * KEYS * 2  # bytes: exponentials of 8 rows, 16 heads and the keys of a step
SHARED_BYTES = 232448  # of a block, on sm_90
PLANE_STAGES = 2


@dataclass(frozen=True)
class ValuesConstants:
    """The constants of a kernel: `cluster` blocks share a tile of `rows` query rows, 64 or 128.

    A block's sums, its heads x rows x head_dim in float32, must fit into half of the registers.
    """

    heads: int
    head_dim: int
    cluster: int
    rows: int
    value_stages: int

    kernel_name, threads = "mix_values", THREADS

    @functools.cached_property
    def bytes_beside_units(self) -> int:
        """Of shared memory, as values_layout.cuh lays it out; barriers of units excepted."""
        slots, own = 16 // self.cluster, -(-self.heads // self.cluster)
        values = own * -(-self.head_dim // 64) * KEYS * 128
        piece = 8 * KEYS * slots * 2
        planes, sent = self.rows // 8 * piece, self.rows // self.cluster // 8 * piece
        stages = self.value_stages * values + PLANE_STAGES * (planes + (self.cluster - 1) * sent)
        return stages + 16 * (self.value_stages + PLANE_STAGES)

    @property
    def units(self) -> int:
        """As many as there is room for, the same for each group of 8 rows that a block mixes."""
        groups = self.rows // self.cluster // 8
        return (SHARED_BYTES - self.bytes_beside_units) // (UNIT + 16) // groups * groups

    @property
    def shared_memory(self) -> int:
        return self.bytes_beside_units + self.units * (UNIT + 16)

    def source(self, architecture: str = "sm_90a") -> Source:
        element = ELEMENTS[torch.bfloat16]
        constants = {
            "ELEMENT": element, "HEADS": self.heads, "HEAD_DIM": self.head_dim, "CLUSTER": self.cluster, "BULK": 1,
            "ROWS": self.rows, "UNITS": self.units, "VALUE_STAGES": self.value_stages, "PLANE_STAGES": PLANE_STAGES,
            "SHARED_BYTES": self.shared_memory,
        }  # fmt: skip
        return source("values.cu", constants, Product(self.head_dim, element, "values"))


def constants_for(heads: int, head_dim: int) -> ValuesConstants:
    """What was best of those measured."""
    if head_dim <= 64:
        return ValuesConstants(heads, head_dim, cluster=2, rows=64, value_stages=2)
    return ValuesConstants(heads, head_dim, cluster=4, rows=64, value_stages=3)
