"""The Hopper kernels of conv attention, counted from kernels/mta_kernels/conv_attention/hopper (see its README).

A warpgroup works on 64 rows by tiles of 64 keys; of these rows, or of those of the backward's two warpgroups, some only
feed the convolution. Its products read most operands from shared memory, the convolution's scores once a tap: that is
the nearest limit. Names are the kernels'.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from mtabench.model import fused
from mtabench.model.kernel import Kernel, scores, tensor_bytes
from mtabench.problem.case import BYTES_PER_ELEMENT, Case

# What the kernels reach of the peak of shared memory, calibrated on fwd.csv and hopper-bwd.csv of an H200. Forward: ncu
# sees 73 to 91 %; softmax runs while other warpgroups multiply. Backward: each of five products is waited for, and two
# warpgroups an SM fill few of these waits.
FORWARD_SHARED_SHARE, BACKWARD_SHARED_SHARE = 0.82, 0.64
# A block is alone on its SM: nothing hides its first copies, its taps and zeros, and its last rows. Forward blocks of
# two warpgroups stay and take one work after another, and fetch the next meanwhile.
BLOCK_START_S, FORWARD_START_S, NEXT_WORK_S = 12e-6, 6e-6, 4.5e-6

ROWS, KEYS, STEP = 64, 64, 16  # rows and keys of a tile, depth of one product
BACKWARD_WARPGROUPS, HOPPER_SMS = 2, 132
# Of the backward's scratch: rows of a chunk, chunks it has room for, bytes it may take however few heads there are.
MOST_CHUNK_ROWS, FEWEST_SLOTS = 4248, 4
CHEAP_SCRATCH, SPARED_SCRATCH = 2 * 2**30, 4 * 2**30
PLACES = 256  # of p, or ds, of each row that a block multiplies
LENT_ROWS = 8  # of scores that the second of two warpgroups of the forward has from the first
SCORES_ABOVE, GRADS_ABOVE = 16, 8  # rows of scores and of dc that the backward's second warpgroup has from the first
CARRIED, BACK_COLUMNS = 16, 24  # columns of scores that stay for the next tile; columns of the weight's product
MOST_VALUES, MOST_BACKWARD = 128, 128  # columns of v a block; head dims of the backward
MOST_TAPS = (8, 17)
HALF, FLOAT = 2, 4


class Product(NamedTuple):
    """`times` products of 64 rows with so many columns, so deep; A comes from shared memory or from registers."""

    columns: int
    depth: int
    times: int = 1
    in_registers: bool = False

    @property
    def macs(self) -> int:
        """Multiply-adds of all of them."""
        return self.times * ROWS * self.columns * self.depth

    @property
    def shared_bytes(self) -> int:
        """Bytes of operands that all of them read."""
        return self.times * (ROWS * (not self.in_registers) + self.columns) * self.depth * HALF


def forward_warpgroups(head_dim: int) -> int:
    """Warpgroups of a block of the forward that multiply."""
    return 3 if head_dim <= 64 else 2


def forward_rows(head_dim: int, taps: int) -> tuple[int, ...]:
    """Rows of out that each of a block's warpgroups computes: of two, the second has its rows above from the first."""
    own = ROWS - (taps - 1)
    return (own, ROWS) if forward_warpgroups(head_dim) == 2 else (own,) * 3


def forward(case: Case, sm_count: int) -> list[Kernel]:
    """The launches of a forward."""
    taps, warpgroups = case.conv.query_taps, forward_warpgroups(case.head_dim)
    parts = -(-case.head_dim // MOST_VALUES)  # blocks that share the columns of v, each with all scores
    values, own = case.head_dim // parts, forward_rows(case.head_dim, taps)
    heads = case.batch * case.heads * parts
    tiles = heads * _tiles(case, own, _left(case))
    steps = _steps(case.head_dim)
    in_registers = STEP if warpgroups == 3 else steps if parts == 1 else 0  # columns of the queries
    products = (
        Product(KEYS, in_registers, in_registers=True),  # queries
        Product(KEYS, steps - in_registers),
        Product(2 * STEP, STEP, times=KEYS // STEP, in_registers=True),  # scores as they are, then shifted by rows
        Product(2 * STEP, STEP, times=KEYS // STEP * (taps - 1)),
        Product(values, KEYS, in_registers=True),
    )
    copied = KEYS * (case.head_dim + values) * BYTES_PER_ELEMENT[case.dtype] / warpgroups  # keys and values
    lent = LENT_ROWS * (warpgroups == 2) / warpgroups
    stored = (ROWS + lent) * KEYS * HALF  # scores
    queries, keys = tensor_bytes(case)
    kernel = replace(
        _tile_kernel("hopper_forward", tiles, products, stored + copied),
        shared_share=FORWARD_SHARED_SHARE,
        overlapped=True,
        l2_bytes=tiles * copied,
        memory_bytes=2 * queries + 2 * keys,
        waves=heads * -(-case.seq // sum(own)) / sm_count,
        wave_s=NEXT_WORK_S if warpgroups == 2 else FORWARD_START_S,
    )
    return [Kernel("hopper_prepare"), kernel]


def backward(case: Case, sm_count: int) -> list[Kernel]:
    """The launches of a backward, which there is up to head dim MOST_BACKWARD.

    One launch computes rows and, from what these leave in the scratch, products: it takes the time of both.
    """
    rows, products = backward_rows(case, sm_count), backward_products(case, sm_count)
    both = replace(
        rows,
        name="hopper_backward",
        macs=rows.macs + products.macs,
        shared_bytes=rows.shared_bytes + products.shared_bytes,
        l2_bytes=rows.l2_bytes + products.l2_bytes,
        memory_bytes=rows.memory_bytes + products.memory_bytes,
    )
    launches = backward_launches(case, both, ("hopper_prepare", "hopper_backward_exact", "to the dtype of q"), 2)
    return launches[:3] if rounds(case) else launches


def rounds(case: Case) -> bool:
    """Whether the backward itself rounds dk and dv: no query heads have sums in common."""
    return case.impl != "cuda" and case.kv_heads == case.heads


def backward_launches(case: Case, main: Kernel, others: tuple[str, str, str], last: int) -> list[Kernel]:
    """A preparation, `main`, rows beyond fp16, and `last` launches that bring gradients to the dtype of q."""
    queries, keys = tensor_bytes(case)
    prepare, exact, to_dtype = others
    floats = queries // BYTES_PER_ELEMENT[case.dtype] * FLOAT
    return [
        Kernel(prepare, memory_bytes=2 * queries + keys, memory_share=fused.SMALL_SHARE),
        main,
        Kernel(exact),
        Kernel(to_dtype, launches=last, memory_bytes=2 * (floats + keys), memory_share=fused.SMALL_SHARE),
    ]


def backward_rows(case: Case, sm_count: int) -> Kernel:
    """The part of the backward that computes rows of scores: dq, the weight's gradient, p and ds."""
    element, heads, taps = BYTES_PER_ELEMENT[case.dtype], case.batch * case.heads, case.conv.query_taps
    block_rows = backward_block_rows(taps)
    queries, keys = tensor_bytes(case)
    tiles = heads * BACKWARD_WARPGROUPS * _tiles(case, (block_rows,), CARRIED)
    products = (
        Product(KEYS, _steps(case.head_dim), times=2),  # scores, and the probabilities' gradient
        Product(2 * STEP, STEP, times=2 * (KEYS // STEP), in_registers=True),  # convolution, and its transpose
        Product(2 * STEP, STEP, times=2 * (KEYS // STEP) * (taps - 1)),
        Product(BACK_COLUMNS, STEP, times=KEYS // 8 * (ROWS // STEP)),  # the weight's gradient
        Product(case.head_dim, KEYS, in_registers=True),  # dq
    )
    copied = 3 * KEYS * case.head_dim * element / BACKWARD_WARPGROUPS  # values, and keys twice
    stored = 2 * (ROWS * KEYS + ROWS * CARRIED) * HALF  # scores and dc; their last columns are stored again
    # One warpgroup stores rows for the other, which copies them and moves their last columns.
    passed = (SCORES_ABOVE + GRADS_ABOVE) * (3 * KEYS + 2 * CARRIED) * HALF / BACKWARD_WARPGROUPS
    written = tiles * 2 * block_rows / BACKWARD_WARPGROUPS * KEYS * element  # p and ds
    return replace(
        _tile_kernel("rows", tiles, products, stored + passed + copied),
        shared_share=BACKWARD_SHARED_SHARE,
        l2_bytes=tiles * copied + written,
        memory_bytes=3 * queries + 2 * keys + written,
        memory_share=fused.STREAM_SHARE,
        waves=heads * -(-case.seq // block_rows) / sm_count,
    )


def backward_products(case: Case, sm_count: int) -> Kernel:
    """The part that multiplies p and ds of chunks by output gradients and queries, and adds to sums of dv and dk."""
    element, heads, chunks = BYTES_PER_ELEMENT[case.dtype], case.batch * case.heads, chunks_of(case, sm_count)
    tiles = 2 * heads * scores(case.seq, ROWS, PLACES, case.operation.causal) // (ROWS * KEYS)
    product = Product(case.head_dim, ROWS)
    copied = ROWS * (KEYS + case.head_dim * KEYS / PLACES) * element
    ends = [
        min(case.seq, (chunk + 1) * chunks.rows) if case.operation.causal else case.seq
        for chunk in range(chunks.of_head)
    ]
    # Written once a chunk, read again by the next; the last time in q's dtype, if they are rounded.
    rounded = 2 * heads * case.seq * rounds(case)
    sum_rows = 2 * heads * (sum(ends) + sum(ends[:-1])) - rounded
    return Kernel(
        "products",
        macs=tiles * product.macs,
        shared_bytes=tiles * (product.shared_bytes + copied),
        l2_bytes=tiles * copied,
        memory_bytes=tiles * ROWS * KEYS * element
        + 2 * tensor_bytes(case)[0]
        + (sum_rows * FLOAT + rounded * element) * case.head_dim,
    )


class Chunks(NamedTuple):
    """Of a backward: rows of a chunk, chunks of a head, and chunks that the scratch has room for."""

    rows: int
    of_head: int
    slots: int


def chunks_of(case: Case, at_once: int = HOPPER_SMS, rows: int | None = None) -> Chunks:
    """As `ChunkPlan` of banded/backward_plan.py; where fewer blocks run at once, the slots are fewer.

    `rows` are those that a block computes, if they are not a Hopper's.
    """
    heads = case.batch * case.heads
    if rows is None:
        rows = backward_block_rows(case.conv.query_taps)
    row_bytes = 2 * BYTES_PER_ELEMENT[case.dtype] * scratch_pitch(case.seq)
    blocks, most_blocks = -(-case.seq // rows), max(heads * MOST_CHUNK_ROWS, SPARED_SCRATCH // row_bytes) // rows
    count = -(-blocks // max(min(MOST_CHUNK_ROWS // rows, most_blocks // FEWEST_SLOTS), 1))
    chunk_blocks = -(-blocks // count)
    few, many = (-(-times * at_once // chunk_blocks) + 3 for times in (1, 3))
    cheap = CHEAP_SCRATCH // (row_bytes * rows * chunk_blocks)
    slots = min(max(few, min(many, cheap)), heads * count, max(most_blocks // chunk_blocks, 1))
    return Chunks(chunk_blocks * rows, count, slots)


def scratch_pitch(seq: int) -> int:
    """Numbers of p, or ds, of a row in the scratch."""
    return -(-(seq + CARRIED) // KEYS) * KEYS


def scratch_bytes(case: Case) -> int:
    """Bytes of p and ds that a backward keeps at a time, on a GPU with a Hopper's SMs."""
    if case.impl == "cuda" or case.head_dim > MOST_BACKWARD:  # as backward_constants.py chooses by a Hopper's memory
        rows, blocks = (64 if 120 <= case.head_dim <= 128 or case.head_dim > 224 else 128), 1 + (case.head_dim <= 128)
        chunks = chunks_of(case, HOPPER_SMS * blocks, rows - 2 * (case.conv.query_taps - 1))
    else:
        chunks = chunks_of(case)
    return 2 * chunks.slots * chunks.rows * scratch_pitch(case.seq) * BYTES_PER_ELEMENT[case.dtype]


def backward_block_rows(taps: int) -> int:
    """Rows of dq that a block of the backward computes: of its 128 some only feed the convolution and its transpose."""
    return BACKWARD_WARPGROUPS * ROWS - 2 * (taps - 1)


def _tile_kernel(name: str, tiles: int, products: Sequence[Product], other_bytes: float) -> Kernel:
    """A kernel of so many tiles, each with these products, and so many other bytes of shared memory."""
    return Kernel(
        name,
        macs=tiles * sum(product.macs for product in products),
        exponentials=tiles * ROWS * KEYS,
        shared_bytes=tiles * (sum(product.shared_bytes for product in products) + other_bytes),
        wave_s=BLOCK_START_S,
    )


def _tiles(case: Case, own: Sequence[int], beyond: int) -> int:
    """Tiles of a head; c ends up to `beyond` columns before the scores.

    `own` are the rows of warpgroups, or of blocks, one after another and then again.
    """
    tiles = end = 0
    for rows in itertools.cycle(own):
        end = min(end + rows, case.seq)
        tiles += -(-((end if case.operation.causal else case.seq) + beyond) // KEYS)
        if end == case.seq:
            return tiles
    raise ValueError("no rows")


def _left(case: Case) -> int:
    """Columns of c left of the scores that they touch: the taps ahead of a key, in slabs of 8."""
    others = case.conv.key_taps - 1
    return -(-(others - others // 2) // 8) * 8


def _steps(head_dim: int) -> int:
    """The head dim in whole steps of a product."""
    return -(-head_dim // STEP) * STEP
