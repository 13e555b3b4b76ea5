"""The CUDA forward and backward for GPUs from sm_80 on, counted from kernels/mta_kernels/conv_attention/cuda_sm80.

All products are `mma.sync`. A warp goes through the keys of its rows in chunks of 32 columns, and skips those that no
row sees. Of its rows some only feed the convolution. Names are the kernels'.
"""

from __future__ import annotations

from mta_kernels.operation import Convolution
from mtabench.model import banded, fused
from mtabench.model.fused import Tiles
from mtabench.model.kernel import Kernel, tensor_bytes
from mtabench.problem.case import BYTES_PER_ELEMENT, Case

# What the products reach of the rate of `mma.sync` alone, calibrated on cuda-fwd.csv and sm80-bwd.csv of an H200: two
# warps a scheduler wait for operands from shared memory and for softmax. The backward has three barriers a tile instead
# of two, and stores p, dc and ds.
FORWARD_SHARE, BACKWARD_SHARE = 0.62, 0.55
# Of a block: its first copies, its taps, its last rows.
FORWARD_START_S, BACKWARD_START_S = 6e-6, 5e-6
HALF_DEPTH = 2 / 3  # of a product's time, for one of half the depth: cuda-forward-instructions.csv of an H100
CHUNK, WARP_ROWS, STEP, EIGHT = 32, 32, 16, 8  # columns and rows of a warp; of a product, depth and columns
HALF, FLOAT = 2, 4
MATRICES = 512  # bytes that one `ldmatrix` reads, or the taps of one query tap
MOST_HEAD_DIM = 128  # above it, rows of out leave a warp 16 rows, and waits that this does not count


def forward(case: Case, tiles: Tiles, sm_count: int) -> list[Kernel]:
    """The launch of a forward; `tiles.forward` are rows, with those above, and keys of a tile."""
    (rows, _), depth, heads = tiles.forward, _depth(case), case.batch * case.heads
    own = rows - (case.conv.query_taps - 1)
    pairs = heads * _scores(case, rows, own)
    read = 2 * CHUNK * depth * HALF + _convolution_bytes(case)  # keys, values
    read += 0 if tiles.in_registers else WARP_ROWS * depth * HALF  # queries
    copied = 2 * depth * HALF / rows  # keys and values, a score
    queries, keys = tensor_bytes(case)
    kernel = Kernel(
        "cuda_forward",
        macs=pairs * (2 * depth + convolution_macs(case.conv)),
        by_mma=True,
        tensor_share=FORWARD_SHARE,
        exponentials=pairs,
        shared_bytes=pairs * (read / (WARP_ROWS * CHUNK) + HALF + copied),
        l2_bytes=pairs * copied,
        memory_bytes=2 * queries + 2 * keys,
        waves=heads * -(-case.seq // own) / (sm_count * tiles.blocks),
        wave_s=FORWARD_START_S,
    )
    return [kernel]


def backward(case: Case, tiles: Tiles, sm_count: int) -> list[Kernel]:
    """The launches of a backward.

    `tiles.probabilities` are rows, with those above, and keys of a tile; `tiles.value_gradients` the places of p, or
    ds, that a block multiplies, and the depth of a step.
    """
    (rows, _), (places, _), depth = tiles.probabilities, tiles.value_gradients, _depth(case)
    heads, element = case.batch * case.heads, BYTES_PER_ELEMENT[case.dtype]
    own = rows - 2 * (case.conv.query_taps - 1)
    chunks = banded.chunks_of(case, sm_count * tiles.blocks, rows=own)
    queries, keys = tensor_bytes(case)
    pairs, stored = heads * _scores(case, rows, own), heads * _scores(case, own, own)
    # By rows: scores, the probabilities' gradient, both convolutions, the weight's gradient.
    taps = -(-case.conv.query_taps // 2)
    weight_macs = taps * eights(case.conv) * STEP * EIGHT * STEP / (EIGHT * STEP)
    read = 2 * CHUNK * depth * HALF + 2 * _convolution_bytes(case)
    read += 0 if tiles.in_registers else 2 * WARP_ROWS * depth * HALF
    read += WARP_ROWS // STEP * (_loads(case) + CHUNK // EIGHT * taps) * MATRICES
    by_rows = pairs * (read / (WARP_ROWS * CHUNK) + 2 * HALF + 2 * depth * HALF / rows)
    # Products, of p with grad_out, of ds with q and with k: both operands are copied, then read by a warp of 64 places.
    parts = -(-depth // 64)
    by_products = stored * 3 * (element * (1 + parts) + depth * element * (1 / places + 1 / 64))
    ends = [
        min(case.seq, (chunk + 1) * chunks.rows) if case.operation.causal else case.seq
        for chunk in range(chunks.of_head)
    ]
    sum_rows = 2 * heads * (sum(ends) + sum(ends[:-1]))  # of dk and dv: written once a chunk, read again by the next
    blocks = heads * (
        -(-case.seq // own) + sum(2 * -(-end // places) for end in ends) + chunks.of_head * -(-chunks.rows // places)
    )
    kernel = Kernel(
        "cuda_backward",
        macs=pairs * (2 * depth + 2 * convolution_macs(case.conv) + weight_macs) + stored * 3 * depth,
        by_mma=True,
        tensor_share=BACKWARD_SHARE,
        exponentials=pairs,
        shared_bytes=by_rows + by_products,
        l2_bytes=pairs * 2 * depth * HALF / rows + stored * (5 * element + 3 * depth * element / places),
        memory_bytes=4 * queries + 2 * keys + stored * 5 * element + sum_rows * case.head_dim * FLOAT,
        memory_share=fused.STREAM_SHARE,
        waves=blocks / (sm_count * tiles.blocks),
        wave_s=BACKWARD_START_S,
    )
    names = "cuda_backward_prepare", "cuda_backward_exact", "sums, to the dtype of q"
    return banded.backward_launches(case, kernel, names, 3)


def _depth(case: Case) -> int:
    return -(-case.head_dim // STEP) * STEP


def eights(conv: Convolution) -> int:
    """Eights of scores that eight columns of c touch."""
    return -(-conv.pad // EIGHT) + -(-(conv.key_taps - 1 - conv.pad) // EIGHT) + 1


def convolution_macs(conv: Convolution, *, in_pairs: bool = False) -> float:
    """Of a score: of a tap's products each pair of eights is a whole one, a last eight one of half the depth.

    `in_pairs`: the last eights of two rows are one product, but for the first and the last tap.
    """
    pairs, rest = divmod(eights(conv), 2)
    products = conv.query_taps * (pairs + HALF_DEPTH * rest)
    if in_pairs and eights(conv) == 3 and conv.query_taps % 2 == 0:
        products = conv.query_taps + (conv.query_taps - 1) / 2 + HALF_DEPTH
    return STEP * products


def _loads(case: Case) -> int:
    """Pairs of eights of a chunk's columns and of those beside it."""
    return (CHUNK // EIGHT + eights(case.conv)) // 2


def _convolution_bytes(case: Case) -> int:
    """That a warp reads for a chunk: the two sets of its rows share what they load, and the taps."""
    taps = case.conv.query_taps
    return ((taps + 1) * _loads(case) + taps) * MATRICES


def _scores(case: Case, rows: int, own: int) -> int:
    """Scores of a head that warps compute: whole chunks up to the last key that their rows see."""
    if not case.operation.causal:
        return -(-case.seq // own) * rows * -(-case.seq // CHUNK) * CHUNK
    last = (
        min(first + own - rows + warp + WARP_ROWS, case.seq)
        for first in range(0, case.seq, own)
        for warp in range(0, rows, WARP_ROWS)
    )
    return sum(WARP_ROWS * -(-max(row, 0) // CHUNK) * CHUNK for row in last)
