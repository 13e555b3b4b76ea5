"""Where the scratch of a call has what."""

from __future__ import annotations

import math
from typing import NamedTuple

from mta_kernels.conv_attention.banded.backward_plan import NORM_PARTS, ChunkPlan
from mta_kernels.conv_attention.hopper.backward_constants import BackwardConstants

SCRATCH_ALIGNED = 256  # bytes, at multiples of which the parts of the scratch begin


class ScratchLayout(NamedTuple):
    """Where in the scratch, whose start is p and then ds, the rest begins, and where it ends, in bytes."""

    stored: int  # p and ds `[2, slots, pitch / 32, rows of a chunk, 32]`, in q's dtype
    prepared: dict[str, int]  # what prepare.cu writes, by the names of `Preparation` and `BackwardArguments`
    ds_unit: int
    counters: int  # of the scheduler, and one a query head
    dweight: int  # of each block of rows and warpgroup
    sums: int  # of dk, float32, where they are rounded in the end; 0 where the caller is given them
    last_sums: int  # of dv
    end: int

    @classmethod
    def of(
        cls, constants: BackwardConstants, plan: ChunkPlan, batch: int, heads: int, kv_heads: int, query_rows: int,
        sum_rows: int,
    ) -> ScratchLayout:  # fmt: skip
        """The scratch of a call; `sum_rows` are those of dk's sums, if they are in it."""
        stored = 2 * 2 * plan.slots * plan.row_blocks * constants.block_rows * plan.pitch
        numbers = {
            "taps": heads * constants.prepared.tap_bytes // 4, "taps_back": heads * constants.prepared.tap_bytes // 4,
            "weight_scale": heads,
            "value_norms": batch * kv_heads * NORM_PARTS,
            "grad_norms": (1 + constants.margins) * batch * heads * NORM_PARTS,  # and those of out
            "delta": batch * heads * query_rows, "exact_rows": batch * heads,
            "ds_unit": batch * heads, "counters": plan.counters + heads,
            "dweight": batch * heads * plan.all_row_blocks * constants.warpgroups * math.prod(constants.conv.taps),
            "sums": sum_rows * constants.head_dim, "last_sums": sum_rows * constants.head_dim,
        }  # fmt: skip
        starts, at = {}, stored
        for name, count in numbers.items():
            starts[name] = at
            at += -(-4 * count // SCRATCH_ALIGNED) * SCRATCH_ALIGNED
        apart = map(starts.pop, ("ds_unit", "counters", "dweight", "sums", "last_sums"))
        ds_unit, counters, dweight, sums, last_sums = apart
        if not sum_rows:
            sums = last_sums = 0
        return cls(stored, starts, ds_unit, counters, dweight, sums, last_sums, at)
