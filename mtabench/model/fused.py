"""The Triton kernels of conv attention, counted from kernels/mta_kernels/conv_attention/triton (see its README).

Forward: the causal band (`near`, `band`), the expanded and the padded side (`prepare`), the fused kernel. Backward: the
preparation again, five passes over the scores by chunks of rows, then the folding back and the band's own gradients.
Decode: one pass over the cache. Names are those of the kernels, without `_kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mtabench.model.kernel import Kernel, scores, tensor_bytes
from mtabench.problem.case import BYTES_PER_ELEMENT, Case

# What products reach of a plain product's rate beside the exponentials. Calibrated on results/nvidia-h200: for the
# forward on fwd.csv, for the backward on bwd.csv and a run of ncu whose rows are not kept. Queries in
# registers: half the traffic of shared memory, and two programs an SM fill each other's waits. Streamed: each slice of
# the queries is copied again. The passes of the backward reach 0.74 to 0.83 one by one, and together draw so much power
# that the clock falls to 1560 to 1750 MHz of 1980.
REGISTERS_SHARE, STREAMED_SHARE, BACKWARD_SHARE = 0.90, 0.86, 0.73
# A program's first copies, its tiles at the diagonal and its end. With queries in registers all of them are loaded
# before the first product.
REGISTERS_START_S, STREAMED_START_S, BAND_START_S = 10e-6, 5e-6, 3e-6
# Parts of a copy's bandwidth: kernels that stream whole rows, and those around the band and the folds, whose rows
# overlap.
STREAM_SHARE, SMALL_SHARE = 0.85, 0.75
# Decode: a wave of programs folds the taps, fills its pipeline and empties it; then a kernel merges. A program of two
# warps reads so many bytes a second at most, of rows of up to 64 numbers and of longer ones (few splits in
# results/nvidia-h200/decode-splits.csv).
DECODE_WAVE_S, DECODE_MERGE_S = 1.5e-6, 2.5e-6
DECODE_PROGRAM_BYTES_S, DECODE_WIDE_PROGRAM_BYTES_S = 19e9, 30e9
DECODE_PROGRAMS_PER_SM = 2

CHUNK_ROWS, ALIGNED, WARPGROUP = 2048, 128, 64
FLOAT = 4


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes that the kernels take, queries by keys; `source` says where from.

    `splits` is for decode; 0 stands for as many as fill the SMs once. `blocks` share an SM. `queries` says where those
    of a forward are that are not in registers.
    """

    forward: tuple[int, int] = (128, 128)
    in_registers: bool = False
    probabilities: tuple[int, int] = (128, 128)
    value_gradients: tuple[int, int] = (64, 128)
    splits: int = 0
    source: str = ""
    blocks: int = 1
    queries: str = "slices, copied for each block of keys"


class _Counts:
    """What the kernels of a case share: rows and heads, and the bytes of their tensors."""

    def __init__(self, case: Case) -> None:
        self.query_taps, self.key_taps = case.conv.query_taps, case.conv.key_taps
        self.case, self.element = case, BYTES_PER_ELEMENT[case.dtype]
        self.keys_expanded = self.query_taps <= self.key_taps
        self.taps = min(self.query_taps, self.key_taps)
        self.heads = case.batch * case.heads
        self.rows = self.heads * case.seq  # of queries
        self.depth = self.taps * case.head_dim
        self.values = max(128 // self.element, power_of_two(case.head_dim))  # columns of a tile of values
        self.query, self.key = tensor_bytes(case)
        self.padded = self.query if self.keys_expanded else self.key
        self.expanded = self.rows * self.depth * self.element
        band = case.operation.band
        near = self.query_taps + self.key_taps - 2 if band else 0
        self.band, self.near = (
            self.rows * max(16, power_of_two(width)) * FLOAT if width else 0 for width in (band, near)
        )
        self.sums, self.key_sums = self.query * FLOAT // self.element, self.key * FLOAT // self.element  # float32


def power_of_two(number: int) -> int:
    """`number` rounded up to a power of two."""
    return 1 << max(0, number - 1).bit_length()


def forward(case: Case, tiles: Tiles, sm_count: int) -> list[Kernel]:
    """The launches of a forward."""
    count = _Counts(case)
    (block_m, block_n), element = tiles.forward, count.element
    pairs = count.heads * scores(case.seq, block_m, block_n, case.operation.causal)
    key_row = (count.depth + count.values) * element  # of K' and of V
    query_row = 0 if tiles.in_registers else count.depth * element
    copied = key_row / block_m + query_row / block_n  # from L2 into shared memory, a score
    fused = Kernel(
        "_conv_attention_fwd",
        macs=pairs * (count.depth + count.values),
        tensor_share=REGISTERS_SHARE if tiles.in_registers else STREAMED_SHARE,
        exponentials=pairs,
        shared_bytes=pairs * (key_row / WARPGROUP + query_row / block_n + copied),
        l2_bytes=pairs * copied,
        memory_bytes=count.padded + count.expanded + count.key + count.query + count.band,
        waves=count.heads * -(-case.seq // block_m) / (sm_count * (2 if tiles.in_registers else 1)),
        wave_s=REGISTERS_START_S if tiles.in_registers else STREAMED_START_S,
    )
    return [*_preparation(count, sm_count), fused]


def backward(case: Case, tiles: Tiles, sm_count: int) -> list[Kernel]:
    """The launches of a backward."""
    count = _Counts(case)
    return [*_preparation(count, sm_count), *_score_passes(count, tiles, sm_count), *_folding(count), *_band(count)]


def decode(case: Case, tiles: Tiles, sm_count: int) -> list[Kernel]:
    """The launches of a decode step."""
    count = _Counts(case)
    sequences, slots = case.batch * case.kv_heads, DECODE_PROGRAMS_PER_SM * sm_count
    group = case.heads // case.kv_heads
    splits = tiles.splits or max(1, slots // sequences - group)
    cache = 2 * count.key
    pairs = case.batch * case.heads * case.seq
    products = max(16, power_of_two(count.key_taps))  # rows of them a key: a whole tensor core instruction
    step = Kernel(
        "_conv_attention_decode",
        macs=pairs * (products + 16) * case.head_dim,
        exponentials=pairs,
        shared_bytes=2 * cache + 2 * pairs * products * FLOAT,
        l2_bytes=cache,
        memory_bytes=cache,
        memory_limit=min(slots, sequences * splits)
        * (DECODE_PROGRAM_BYTES_S if case.head_dim <= 64 else DECODE_WIDE_PROGRAM_BYTES_S),
        waves=-(-sequences * (splits + group) // slots),
        wave_s=DECODE_WAVE_S,
    )
    partial = 2 * case.batch * case.heads * (splits + 1) * case.head_dim * FLOAT
    return [step, Kernel("_combine_splits", launches=0, l2_bytes=partial, waves=1, wave_s=DECODE_MERGE_S)]


def _preparation(count: _Counts, sm_count: int) -> list[Kernel]:
    source = count.key if count.keys_expanded else count.query
    width = power_of_two(16 + max(count.query_taps, count.key_taps) - 1)  # source rows of a banded product
    prepare = Kernel(
        "_prepare",
        macs=count.rows * max(4, power_of_two(count.taps)) * width * count.case.head_dim,
        memory_bytes=source + count.expanded + 2 * count.padded,
        memory_share=STREAM_SHARE,
    )
    if not count.band:
        return [prepare]
    near = Kernel("_near_scores", memory_bytes=count.query + count.key + count.near, memory_share=SMALL_SHARE)
    band = Kernel(
        "_band",
        l2_bytes=count.query_taps * count.near,
        memory_bytes=count.near + count.band,
        memory_share=SMALL_SHARE,
        waves=count.rows / 64 / (4 * sm_count),
        wave_s=BAND_START_S,
    )
    return [near, band, prepare]


def _score_passes(count: _Counts, tiles: Tiles, sm_count: int) -> list[Kernel]:
    """The passes over chunks of scores; P and dC are stored in the dtype of q."""
    case, element = count.case, count.element
    chunks = -(-case.seq // CHUNK_ROWS)
    ends = [min(case.seq, (chunk + 1) * CHUNK_ROWS) if case.operation.causal else case.seq for chunk in range(chunks)]
    keys = count.heads * sum(ends)  # rows of sums over queries: written once a chunk, read again by the next
    sum_rows = keys + count.heads * sum(ends[:-1])
    stored = count.heads * scores(case.seq, ALIGNED, ALIGNED, case.operation.causal)  # scores of P, and of dC
    block_m, block_n = tiles.probabilities
    pairs = count.heads * scores(case.seq, block_m, block_n, case.operation.causal)
    copied = count.depth * element * (1 / block_m + 1 / block_n)
    probabilities = Kernel(
        "_probabilities",
        launches=chunks,
        macs=pairs * count.depth,
        tensor_share=BACKWARD_SHARE,
        exponentials=pairs,
        shared_bytes=pairs * (count.depth * element * (1 / WARPGROUP + 1 / block_n) + copied + 2 * element),
        l2_bytes=pairs * (copied + element),
        memory_bytes=count.padded + count.expanded + stored * element,
        memory_share=STREAM_SHARE,
        waves=count.heads * -(-case.seq // block_m) / sm_count,
        wave_s=STREAMED_START_S,
    )
    block_m, block_n = tiles.value_gradients
    value_row = count.values * element
    value_gradients = Kernel(
        "_value_gradients",
        launches=chunks,
        macs=stored * 2 * count.values,
        tensor_share=BACKWARD_SHARE,
        shared_bytes=stored * (4 * element + 2 * value_row / WARPGROUP + value_row * (1 / block_m + 2 / block_n)),
        l2_bytes=stored * (2 * element + value_row / block_n),
        memory_bytes=stored * 2 * element + count.query + (keys * element + sum_rows * FLOAT) * case.head_dim,
        memory_share=STREAM_SHARE,
    )
    transposed = score_product("_transposed_product", stored, count.depth, element, chunks, block_n=128)
    wide = 256 if count.depth > 512 else 128
    rows = score_product("_row_product", stored, count.depth, element, chunks, block_n=wide)
    return [
        Kernel("_output_gradient", memory_bytes=3 * count.query, memory_share=SMALL_SHARE),
        probabilities,
        value_gradients,
        replace(transposed, memory_bytes=transposed.memory_bytes + count.query + sum_rows * count.depth * FLOAT),
        replace(rows, memory_bytes=rows.memory_bytes + count.expanded + count.rows * count.depth * FLOAT),
    ]


def score_product(name: str, stored: int, columns: int, element: int, launches: int, block_n: int) -> Kernel:
    """Stored scores, of `element` bytes each, with a matrix of so many columns, in tiles of 128 by `block_n`.

    The scores are read again for each block of columns.
    """
    copied = -(-columns // block_n) * element * (1 + block_n / 128)
    return Kernel(
        name, launches=launches, macs=stored * columns, tensor_share=BACKWARD_SHARE,
        shared_bytes=stored * (copied + columns * element * (1 / WARPGROUP + 1 / block_n)), l2_bytes=stored * copied,
        memory_bytes=stored * element,
    )  # fmt: skip


def _folding(count: _Counts) -> list[Kernel]:
    """From the gradients of Q' and K' (float32) back to those of q, k and the weight, and to the dtype of q."""
    chunks = -(-count.case.seq // CHUNK_ROWS)
    gradient = count.rows * count.depth * FLOAT
    overlapping, summed = (count.sums, count.key_sums) if count.keys_expanded else (count.key_sums, count.sums)
    launches = (chunks, 1) if count.keys_expanded else (1, chunks)
    expanded_from = count.key if count.keys_expanded else count.query
    results = count.sums + 2 * count.key_sums
    kernels = [
        Kernel("_overlap_add", launches=launches[0], memory_bytes=gradient + overlapping),
        Kernel("_expand_transposed", launches=launches[1], memory_bytes=gradient + summed),
        Kernel("_weight_gradient", launches=launches[1], memory_bytes=gradient + expanded_from),
        Kernel("to the dtype of q", launches=3, memory_bytes=results * (FLOAT + count.element) / FLOAT),
    ]
    return [replace(kernel, memory_share=SMALL_SHARE) for kernel in kernels]


def _band(count: _Counts) -> list[Kernel]:
    """The gradients that flow through the band."""
    if not count.band:
        return []
    kernels = [
        Kernel("_band_gradients", memory_bytes=count.query + count.key + 3 * count.band),
        Kernel("_near_scores", memory_bytes=count.query + count.key + count.near),
        Kernel("_band_transposed", l2_bytes=count.query_taps * count.band, memory_bytes=count.band + count.near),
        Kernel("_near_transposed to dq", memory_bytes=count.near + count.key + 2 * count.sums),
        Kernel("_near_transposed to dk", memory_bytes=count.near + count.query + 2 * count.key_sums),
        Kernel("_near_transposed to dv", memory_bytes=count.band + count.query + 2 * count.sums),
        Kernel(
            "_band_weight_gradient",
            l2_bytes=count.query_taps * (count.band + count.near),
            memory_bytes=count.band + count.near,
        ),
    ]
    return [replace(kernel, memory_share=SMALL_SHARE) for kernel in kernels]
