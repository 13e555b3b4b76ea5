"""The constants that backward.cu and backward_exact.cu are compiled with, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from mta_kernels.conv_attention.hopper.forward import ROWS, SLAB
from mta_kernels.conv_attention.hopper.prepare import PrepareConstants, TileConstants
from mta_kernels.conv_attention.hopper.source import Product, hopper_source
from mta_kernels.nvrtc.compiler import Source
from mta_kernels.nvrtc.structures import ELEMENTS

SCORES_ABOVE, GRADS_ABOVE = 16, 8  # rows above a warpgroup's own


class BackwardConstants(TileConstants):
    """The constants of backward.cu for a shape."""

    kernel_name = "hopper_backward"

    @property
    def stages(self) -> int:
        """Two are what there is room for above head dim 64; below, a fourth takes no less time than three."""
        return 3 if self.head_dim <= 64 else 2

    @property
    def block_rows(self) -> int:
        """Rows that a block computes whole, of those of its warpgroups."""
        return self.warpgroups * ROWS - 2 * (self.conv.query_taps - 1)

    @property
    def left(self) -> int:
        """Columns by which p's tiles begin before those of scores, LEFT of tiles.cuh."""
        return -(-(self.conv.key_taps - 1 - self.conv.pad) // 8) * 8

    @property
    def lag(self) -> int:
        """Columns by which ds's tiles do, LAG of backward_layout.cuh."""
        return self.left + -(-self.conv.pad // 8) * 8

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as backward_layout.cuh lays them out."""
        tiles = (2 * self.warpgroups + 3 * self.stages) * self.slabs
        above = SCORES_ABOVE + GRADS_ABOVE
        buffers = (self.warpgroups * 10 * (2 * ROWS + above) + 8 * above) * 16
        small = 2 * self.prepared.tap_bytes + (2 * self.stages + 5) * 8 + 16
        return tiles * SLAB + buffers + small

    def products(self) -> list[Product]:
        element = ELEMENTS[self.dtype]
        return [
            Product(64, element), Product(32, "Half"), Product(32, "Half", "fragments"),
            Product(24, "Half", "transposed"), Product(self.head_dim, element, "registers"),
            Product(self.head_dim, element, "transposed"),
        ]  # fmt: skip

    @property
    def source(self) -> Source:
        return hopper_source("backward.cu", self.products(), self.constants())


@dataclass(frozen=True)
class ExactConstants:
    """The constants of backward_exact.cu for a shape."""

    prepared: PrepareConstants
    causal: bool
    spans: bool

    kernel_name, threads = "hopper_backward_exact", 256

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as backward_exact.cu lays them out."""
        taps = self.prepared.conv.query_taps
        return 4 * ((2 * taps + 2) * self.threads + taps * self.prepared.head_dim)

    @property
    def source(self) -> Source:
        constants = self.prepared.constants() | {"CAUSAL": int(self.causal), "SPANS": int(self.spans)}
        return hopper_source("backward_exact.cu", self.prepared.products(), constants)
