"""The fused forward: plain flash attention over longer queries and keys (the expanded form).

`c[i, j] = Q'[i] . K'[j]` with rows of `DEPTH = min(cq, ck) * head_dim` numbers, online softmax, `out = p V`.
Scores within the causal band come ready from `prepare`; every other score is a product that needs no mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mta_kernels.conv_attention.triton.prepare import LN_2, Prepared, dot_precision, prepare

# The interpreter takes the tiles of a Hopper GPU.
INTERPRETED_CAPABILITY = (9, 0)
INTERPRETED_SHARED_MEMORY = 227 * 1024


@triton.jit
def _conv_attention_fwd_kernel(
    q_desc, k_desc, v_desc, band_ptr, out_ptr, logsumexp_ptr,
    stride_qh, stride_qn, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    heads, k_group, v_group, seq_len, one,
    HOST_DESCRIPTORS: tl.constexpr, CAUSAL: tl.constexpr, BAND: tl.constexpr, BAND_PITCH: tl.constexpr,
    DEPTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DEPTH: tl.constexpr, BLOCK_D: tl.constexpr,
    Q_IN_REGISTERS: tl.constexpr, MASKED_STAGES: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head.

    q_desc `[B*Hq, N, DEPTH]`, k_desc `[B*H, N, DEPTH]` each shared by `k_group` query heads,
    v_desc `[B, Hkv, N, D]`, each shared by `v_group`, band `[B*Hq, N, BAND_PITCH]`, out `[B, Hq, N, D]` and
    logsumexp `[B, Hq, N]` (of the convolved scores, natural units) contiguous.
    They are descriptors made on the host, for the copy engine, or pointers where a GPU has none.
    Q_IN_REGISTERS loads the queries once; otherwise their slices are read again for every key block. `one` is 1.0.
    """
    if not HOST_DESCRIPTORS:
        # Every row starts at a multiple of 16 bytes: 8 elements of 16 bits or 4 of 32.
        q_desc = tl.make_tensor_descriptor(
            q_desc, shape=[tl.num_programs(0), seq_len, DEPTH],
            strides=[tl.multiple_of(stride_qh, ALIGNMENT), tl.multiple_of(stride_qn, ALIGNMENT), 1],
            block_shape=[1, BLOCK_M, BLOCK_DEPTH],
        )  # fmt: skip
        k_desc = tl.make_tensor_descriptor(
            k_desc, shape=[tl.num_programs(0), seq_len, DEPTH],
            strides=[tl.multiple_of(stride_kh, ALIGNMENT), tl.multiple_of(stride_kn, ALIGNMENT), 1],
            block_shape=[1, BLOCK_N, BLOCK_DEPTH],
        )  # fmt: skip
        v_desc = tl.make_tensor_descriptor(
            v_desc, shape=[tl.num_programs(0), heads // v_group, seq_len, HEAD_DIM],
            strides=[tl.multiple_of(stride_vb, ALIGNMENT), tl.multiple_of(stride_vh, ALIGNMENT),
                     tl.multiple_of(stride_vn, ALIGNMENT), 1],
            block_shape=[1, 1, BLOCK_N, BLOCK_D],
        )  # fmt: skip

    query_blocks = tl.cdiv(seq_len, BLOCK_M)
    batch_head = tl.program_id(0) // query_blocks
    # Causal blocks near the end have the most keys: start with them.
    first_query = (query_blocks - 1 - tl.program_id(0) % query_blocks) * BLOCK_M
    query = first_query + tl.arange(0, BLOCK_M)
    k_head = batch_head // k_group

    queries = ()
    if Q_IN_REGISTERS:
        for start in tl.static_range(0, DEPTH, BLOCK_DEPTH):
            q = q_desc.load([batch_head, first_query, start]).reshape(BLOCK_M, BLOCK_DEPTH)
            # An operand that comes from arithmetic stays in registers; a plain load is read from shared memory.
            queries += ((q.to(tl.float32) * one).to(q.dtype),)

    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    if CAUSAL:
        unmasked_end = tl.maximum(first_query - BAND + 1, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(first_query + BLOCK_M, seq_len)
    else:
        unmasked_end = seq_len // BLOCK_N * BLOCK_N
        end = seq_len
    # Flattened with the loop over slices, so that the copies run ahead over the end of a key block.
    for first_key in tl.range(0, unmasked_end, BLOCK_N, flatten=not Q_IN_REGISTERS):
        scores = _score_tile(queries, q_desc, k_desc, batch_head, k_head, first_query, first_key, one,
                             DEPTH, BLOCK_M, BLOCK_N, BLOCK_DEPTH, Q_IN_REGISTERS, PRECISION)  # fmt: skip
        v = v_desc.load([batch_head // heads, batch_head % heads // v_group, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
        accumulator, running_max, running_sum = _attend(accumulator, running_max, running_sum, scores, v, PRECISION)
    for first_key in tl.range(unmasked_end, end, BLOCK_N, num_stages=MASKED_STAGES):
        scores = _score_tile(queries, q_desc, k_desc, batch_head, k_head, first_query, first_key, one,
                             DEPTH, BLOCK_M, BLOCK_N, BLOCK_DEPTH, Q_IN_REGISTERS, PRECISION)  # fmt: skip
        key = first_key + tl.arange(0, BLOCK_N)
        if CAUSAL:
            back = query[:, None] - key[None, :]  # [BLOCK_M, BLOCK_N]
            if BAND > 0:
                in_band = (back >= 0) & (back < BAND) & (query < seq_len)[:, None]
                band_rows = band_ptr + (batch_head.to(tl.int64) * seq_len + first_query) * BAND_PITCH
                near = (query - first_query)[:, None] * BAND_PITCH + back
                scores = tl.where(in_band, tl.load(band_rows + near, mask=in_band, other=0.0), scores)
            scores = tl.where(back >= 0, scores, float("-inf"))
        else:
            scores = tl.where((key < seq_len)[None, :], scores, float("-inf"))
        v = v_desc.load([batch_head // heads, batch_head % heads // v_group, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
        accumulator, running_max, running_sum = _attend(accumulator, running_max, running_sum, scores, v, PRECISION)

    out = accumulator / running_sum[:, None]
    dim = tl.arange(0, BLOCK_D)
    row = batch_head.to(tl.int64) * seq_len + query
    inside = query < seq_len
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * HEAD_DIM + dim[None, :], out, mask=inside[:, None] & (dim < HEAD_DIM)[None, :])
    tl.store(logsumexp_ptr + row, (running_max + tl.log2(running_sum)) * LN_2, mask=inside)


@triton.jit
def _score_tile(
    queries, q_desc, k_desc, batch_head, k_head, first_query, first_key, one,
    DEPTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
    Q_IN_REGISTERS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Convolved scores of a tile, in base-2 units: `[BLOCK_M, BLOCK_N]`, by slices of the depth."""
    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if Q_IN_REGISTERS:
        for start in tl.static_range(0, DEPTH, BLOCK_DEPTH):
            k = k_desc.load([k_head, first_key, start]).reshape(BLOCK_N, BLOCK_DEPTH)
            scores = tl.dot(queries[start // BLOCK_DEPTH], k.T, scores, input_precision=PRECISION)
    else:
        for start in tl.range(0, DEPTH, BLOCK_DEPTH):
            q = q_desc.load([batch_head, first_query, start]).reshape(BLOCK_M, BLOCK_DEPTH)
            k = k_desc.load([k_head, first_key, start]).reshape(BLOCK_N, BLOCK_DEPTH)
            if PRECISION == "ieee":
                # Sums of short sums round less than one long sum; `one` keeps the compiler from merging them.
                scores += tl.dot(q, k.T, input_precision=PRECISION) * one
            else:
                scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
    return scores


@triton.jit
def _attend(accumulator, running_max, running_sum, scores, v, PRECISION: tl.constexpr):
    """Online softmax (arXiv 2205.14135): take in one tile of base-2 scores and its values."""
    # Finite from the first tile on: its first key is one that every query of the block sees.
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    p = tl.exp2(scores - new_max[:, None])  # [BLOCK_M, BLOCK_N]
    rescale = tl.exp2(running_max - new_max)
    running_sum = running_sum * rescale + tl.sum(p, 1)
    accumulator = tl.dot(p.to(v.dtype), v, accumulator * rescale[:, None], input_precision=PRECISION)
    return accumulator, new_max, running_sum


@dataclass(frozen=True)
class ForwardConfig:
    """Tile sizes of the forward.

    `num_stages` is the depth of the copy pipeline, `masked_stages` that of the few tiles at the diagonal.
    """

    block_m: int
    block_n: int
    block_depth: int
    q_in_registers: bool
    num_warps: int
    num_stages: int
    masked_stages: int

    def shared_memory(self, depth: int, block_d: int, element_size: int) -> int:
        """Bytes of shared memory that a program needs, rounded up a little."""
        slices = -(-depth // self.block_depth)
        slice_bytes = self.block_depth * element_size
        values = self.block_n * block_d * element_size
        band = 4 * self.block_m * self.block_n  # changes its layout there
        if self.q_in_registers:
            loading = self.block_m * slice_bytes * slices
            stage = self.block_n * slice_bytes * slices + values
            needed = max(loading, self.num_stages * stage, self.masked_stages * stage + band)
        else:
            stage = (self.block_m + self.block_n) * slice_bytes
            if slices == 1:  # no inner loop: the values are in the pipeline too
                stage += values
            needed = values + max(self.num_stages * stage, self.masked_stages * stage + band)
        return needed + 1024


def conv_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, causal: bool, scale: float, pad: int
) -> tuple[Tensor, Tensor]:
    """Conv attention of `q [B, Hq, N, D]`, `k, v [B, Hkv, N, D]`, `weight [Hq, cq, ck]`.

    Returns out `[B, Hq, N, D]` and the logsumexp of each row of convolved scores, `[B, Hq, N]` float32.
    """
    prepared = prepare(q, k, v, weight, causal=causal, scale=scale, pad=pad)
    config = forward_config(
        depth=prepared.queries.shape[2],
        block_d=value_block(q),
        element_size=q.element_size(),
        compute_capability=capability(q.device),
        shared_memory=shared_memory_limit(q.device),
    )
    return launch_forward(prepared, q.shape, causal, config)


def launch_forward(prepared: Prepared, shape: torch.Size, causal: bool, config: ForwardConfig) -> tuple[Tensor, Tensor]:
    """Run the fused kernel on prepared inputs; `shape` is that of q and of the result. Returns out and logsumexp."""
    batch, heads, seq_len, head_dim = shape
    queries, keys, values = prepared.queries, prepared.keys, prepared.values
    block_d = value_block(values)
    blocks = [
        (queries, [1, config.block_m, config.block_depth]),
        (keys, [1, config.block_n, config.block_depth]),
        (values, [1, 1, config.block_n, block_d]),
    ]
    host_descriptors = capability(values.device)[0] >= 9
    operands = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), block) if host_descriptors else x for x, block in blocks
    ]
    out = torch.empty(shape, dtype=values.dtype, device=values.device)
    logsumexp = torch.empty(shape[:3], dtype=torch.float32, device=values.device)
    _conv_attention_fwd_kernel[(triton.cdiv(seq_len, config.block_m) * batch * heads,)](
        *operands, prepared.band, out, logsumexp,
        *queries.stride()[:2], *keys.stride()[:2], *values.stride()[:3],
        heads, batch * heads // keys.shape[0], heads // values.shape[1], seq_len, 1.0,
        HOST_DESCRIPTORS=host_descriptors,
        CAUSAL=causal, BAND=prepared.band_width, BAND_PITCH=prepared.band.shape[-1],
        DEPTH=queries.shape[2], HEAD_DIM=head_dim,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_DEPTH=config.block_depth, BLOCK_D=block_d,
        Q_IN_REGISTERS=config.q_in_registers, MASKED_STAGES=config.masked_stages,
        ALIGNMENT=16 // out.element_size(), PRECISION=dot_precision(out.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out, logsumexp


def forward_config(
    *, depth: int, block_d: int, element_size: int, compute_capability: tuple[int, int], shared_memory: int
) -> ForwardConfig:
    """Tile sizes for these shapes on a GPU of this capability, within `shared_memory` bytes a program.

    Chosen by measuring on an H200.
    """
    candidates = []
    if element_size == 4:
        if block_d <= 128:
            candidates.append(ForwardConfig(64, 32, 32, False, 4, 2, 2))
        candidates.append(ForwardConfig(32, 32, 32, False, 4, 2, 2))
    elif compute_capability[0] >= 9:
        slices = -(-depth // 128)
        if compute_capability[0] == 9 and slices <= (3 if block_d <= 64 else 2 if block_d <= 128 else 0):
            # Two programs an SM.
            candidates.append(ForwardConfig(64, 64, 128, True, 4, 3 if slices == 1 else 2, 1))
        candidates.append(ForwardConfig(128, 128, 64, False, 8, 4, 2))
    if element_size == 2:
        candidates.append(ForwardConfig(128, 64 if block_d <= 128 else 32, 64, False, 8, 3, 2))
        candidates.append(ForwardConfig(64, 64 if block_d <= 128 else 32, 64, False, 4, 2, 2))
        candidates.append(ForwardConfig(64, 32, 32, False, 4, 2, 2))
    for config in candidates:
        if config.shared_memory(depth, block_d, element_size) <= shared_memory:
            return config
    raise ValueError(
        f"the smallest tiles for depth {depth} and head_dim up to {block_d} need more than "
        f"the {shared_memory} bytes of shared memory of this GPU; backend='reference' needs none"
    )


def value_block(v: Tensor) -> int:
    """Columns of a tile of values: head_dim as a power of two, and 128 bytes at least.

    Triton 3.6 reads narrower, differently swizzled tiles wrongly on Hopper when the loop is not pipelined.
    """
    return max(128 // v.element_size(), triton.next_power_of_2(v.shape[3]))


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of `device`, (9, 0) for Hopper."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else INTERPRETED_CAPABILITY


def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that one program can have on `device`."""
    if device.type != "cuda":
        return INTERPRETED_SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
