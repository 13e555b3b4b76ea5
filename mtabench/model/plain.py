"""The kernels of plain attention through PyTorch's SDPA: FlashAttention-2 and cuDNN, seen from outside."""

from __future__ import annotations

from collections.abc import Mapping

from mtabench.model.kernel import Kernel, scores, tensor_bytes
from mtabench.problem.case import BYTES_PER_ELEMENT, Case

BLOCK = 128  # rows and keys of a tile
WARPGROUP = 64  # rows that read a tile of keys from shared memory together


def kernels(case: Case, tensor_share: Mapping[str, float], decode_s: float) -> list[Kernel]:
    """The kernels of one call.

    `tensor_share` is what the products of a pass reach of a plain product's rate beside the exponentials; `decode_s`
    the seconds that a decode step takes to start and to end.
    """
    element = BYTES_PER_ELEMENT[case.dtype]
    queries, keys = tensor_bytes(case)
    if case.pass_ == "decode":
        cache = Kernel(
            "decode", macs=2 * case.batch * case.heads * case.seq * case.head_dim, l2_bytes=2 * keys,
            memory_bytes=2 * keys, waves=1, wave_s=decode_s,
        )  # fmt: skip
        return [cache]
    heads = case.batch * case.heads
    pairs = heads * scores(case.seq, BLOCK, BLOCK, case.operation.causal)
    tile = case.head_dim * element  # of one row
    share = tensor_share[case.pass_]
    if case.pass_ == "fwd":
        forward = Kernel(
            "forward", macs=pairs * 2 * case.head_dim, tensor_share=share, exponentials=pairs,
            shared_bytes=pairs * 2 * (tile / WARPGROUP + tile / BLOCK), l2_bytes=pairs * 2 * tile / BLOCK,
            memory_bytes=2 * queries + 2 * keys,
        )  # fmt: skip
        return [forward]
    sums = queries * 4 / element  # dq is added up in float32
    backward = Kernel(
        "backward", macs=pairs * 5 * case.head_dim, tensor_share=share, exponentials=pairs,
        shared_bytes=pairs * 5 * (tile / WARPGROUP + tile / BLOCK),
        l2_bytes=pairs * (2 * tile + 8 * case.head_dim) / BLOCK,
        memory_bytes=2 * queries + 4 * keys + sums,
    )  # fmt: skip
    return [
        Kernel("dout . out", memory_bytes=2 * queries + sums),
        backward,
        Kernel("dq to 16 bits", memory_bytes=sums + queries),
    ]
