"""The constants that backward.cu is compiled with, and what follows from them."""

from __future__ import annotations

from mta_kernels.conv_attention.banded.backward_exact import ExactConstants
from mta_kernels.conv_attention.hopper.forward import ROWS, SLAB
from mta_kernels.conv_attention.hopper.prepare import TileConstants
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
    def places(self) -> int:
        """PLACES of backward_products.cuh: 128 a warpgroup."""
        return 128 * self.warpgroups

    def products_of_rows(self, rows: int) -> int:
        """None: a row block writes dq itself."""
        return 0

    @property
    def exact(self) -> ExactConstants:
        shape = self.dtype, self.head_dim, self.conv, self.causal, self.spans
        return ExactConstants(*shape, self.margins, architecture="sm_90a")

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as backward_layout.cuh lays them out."""
        tiles = (2 * self.warpgroups + 3 * self.stages) * self.slabs
        scores, grads = (2 if self.head_dim <= 64 else 1) * (ROWS + SCORES_ABOVE), ROWS + GRADS_ABOVE
        buffers = (self.warpgroups * 10 * (scores + grads) + 8 * (SCORES_ABOVE + GRADS_ABOVE)) * 16
        rows = tiles * SLAB + buffers + 2 * self.prepared.tap_bytes
        product_stages = min(rows // ((self.places // 64 + self.slabs) * SLAB), 4)
        return rows + (2 * self.stages + 2 * product_stages + 12) * 8 + 32

    def products(self) -> list[Product]:
        element = ELEMENTS[self.dtype]
        return [
            Product(64, element), Product(32, "Half"), Product(32, "Half", "fragments"),
            Product(24, "Half", "transposed"), Product(self.head_dim, element, "registers"),
            Product(self.head_dim, element, "transposed"),
        ]  # fmt: skip

    def source(self, architecture: str = "sm_90a") -> Source:
        return hopper_source("backward.cu", self.products(), self.constants())
