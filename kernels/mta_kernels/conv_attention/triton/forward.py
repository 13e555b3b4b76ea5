"""The fused forward: tile sizes, and the launches; the kernel is in forward_kernel.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from mta_kernels.allocation import empty
from mta_kernels.conv_attention.arguments import head_parts
from mta_kernels.conv_attention.triton.forward_kernel import _conv_attention_fwd_kernel
from mta_kernels.conv_attention.triton.launch import (
    call_signature,
    cdiv,
    dependent_launches,
    launch,
    next_power_of_2,
    operand,
)
from mta_kernels.conv_attention.triton.prepare import Prepared, dot_precision, prepare
from mta_kernels.gpu_limits import compiled_capability, tile_limits
from mta_kernels.operation import Operation

# On Hopper: bytes of expanded keys of the heads whose programs run together, half of its L2. And the most columns of a
# tile at the diagonal: the narrower the tile, the fewer products the mask discards.
KEYS_IN_L2, MASKED_COLUMNS = 24 * 2**20, 128
# Causal calls of fewer keys have no wider tiles anywhere: wide tiles leave more keys to the loop at the diagonal, whose
# pipeline is short. On an H200 they take 19 % longer with 1024 keys of 128, and are faster from 4096 on.
KEYS_OF_WIDE_TILES = 2048


@dataclass(frozen=True)
class ForwardConfig:
    """Tile sizes of the forward.

    `num_stages` is the depth of the copy pipeline, `masked_stages` its depth for the few tiles at the diagonal.
    These have a loop of their own unless registers hold the queries.
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
        if self.q_in_registers:
            loading = self.block_m * slice_bytes * slices
            stage = self.block_n * slice_bytes * slices + values
            needed = max(loading, self.num_stages * stage)
        else:
            stage = (self.block_m + self.block_n) * slice_bytes
            if slices == 1:  # no inner loop: the values are in the pipeline too
                stage += values
            needed = values + max(self.num_stages, self.masked_stages) * stage
        return needed + 1024


def conv_attention_forward(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *,
    head_chunk: int = 0, spans: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Conv attention of `q [B, Hq, M, D]`, `k, v [B, Hkv, N, D]`, `weight [Hq, cq, ck]`.

    The queries are the last M of N positions; the convolution sees zeros above their first row. Computes `head_chunk`
    query heads at a time, all if 0: the scratch memory is theirs alone. `spans [2, N]` int32 limits row i
    to the keys from `spans[0, i]` to before `spans[1, i]`, both nondecreasing, for M = N; k and v should be zeros
    where the convolution reaches past a span.
    Returns out `[B, Hq, M, D]`, in the dtype of q, and the logsumexp of each row of convolved scores, `[B, Hq, M]`
    float32.
    """
    out = empty(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if head_chunk in (0, q.shape[1]):
        _forward_heads(operation, q, k, v, weight, out, logsumexp, spans)
    else:
        for part, kv_part in head_parts(q.shape[1], k.shape[1], head_chunk):
            inputs = q[:, part], k[:, kv_part], v[:, kv_part], weight[part]
            _forward_heads(operation, *inputs, out[:, part], logsumexp[:, part], spans)
    return out, logsumexp


def _forward_heads(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor,
    spans: Tensor | None,
) -> None:  # fmt: skip
    """Write the results of some heads."""
    causal = operation.causal
    signature = call_signature(q, k, v, weight, spans, out, logsumexp, options=(causal, operation.conv.pad))
    prepared = prepare(operation, q, k, v, weight, signature=signature)
    config = forward_config(
        depth=prepared.queries.shape[2], block_d=value_block(q), short=causal and k.shape[2] < KEYS_OF_WIDE_TILES,
        **tile_limits(q),
    )  # fmt: skip
    batch, heads, query_rows, head_dim = out.shape
    queries, keys, values = prepared.queries, prepared.keys, prepared.values
    block_d = value_block(values)
    host_descriptors = compiled_capability(values.device)[0] >= 9
    dependent, depth = dependent_launches(values), queries.shape[2]
    head_depth = (cdiv(depth, config.block_depth) - 1) * config.block_depth if config.q_in_registers else 0
    q_head, k_head = (
        operand(x, [1, rows, head_depth], host_descriptors) if head_depth else None
        for x, rows in ((queries, config.block_m), (keys, config.block_n))
    )
    masked_n = min(config.block_n, MASKED_COLUMNS) if host_descriptors else config.block_n
    k_masked, v_masked = (
        (None, None)
        if config.q_in_registers or not host_descriptors
        else (operand(keys, [1, masked_n, config.block_depth], True), operand(values, [1, 1, masked_n, block_d], True))
    )
    launch(
        _conv_attention_fwd_kernel, cdiv(query_rows, config.block_m) * batch * heads, signature,
        operand(queries, [1, config.block_m, config.block_depth], host_descriptors),
        operand(keys, [1, config.block_n, config.block_depth], host_descriptors),
        operand(values, [1, 1, config.block_n, block_d], host_descriptors),
        q_head, k_head, k_masked, v_masked,
        prepared.units, prepared.band, spans, out, logsumexp,
        *queries.stride()[:2], *keys.stride()[:2], *values.stride()[:3], *out.stride()[:2], *logsumexp.stride()[:2],
        heads, batch * heads // keys.shape[0], heads // values.shape[1], query_rows, values.shape[2],
        heads_at_once(prepared, causal), batch * heads, 1.0,
        HOST_DESCRIPTORS=host_descriptors, CAUSAL=causal, SPANS=spans is not None,
        BAND=prepared.band_width, BAND_PITCH=prepared.band.shape[-1], DEPTH=depth, HEAD_DIM=head_dim,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_DEPTH=config.block_depth,
        HEAD_DEPTH=head_depth, BLOCK_D=block_d,
        Q_IN_REGISTERS=config.q_in_registers, MASKED_STAGES=config.masked_stages, MASKED_N=masked_n,
        SUMS_IN_THREADS=compiled_capability(values.device)[0] == 9 and not config.q_in_registers,
        ALIGNMENT=16 // values.element_size(), PRECISION=dot_precision(values.dtype),
        DEPENDENT_LAUNCH=dependent, num_warps=config.num_warps, num_stages=config.num_stages, launch_pdl=dependent,
    )  # fmt: skip


def heads_at_once(prepared: Prepared, causal: bool) -> int:
    """Heads whose programs run together: on Hopper, if causal, as many as L2 has room for their keys; else one."""
    keys = prepared.keys
    if not causal or compiled_capability(keys.device) != (9, 0):
        return 1
    head_bytes = keys.shape[1] * keys.shape[2] * keys.element_size()
    return min(prepared.queries.shape[0], max(1, KEYS_IN_L2 // head_bytes))


@functools.cache
def forward_config(
    *, depth: int, block_d: int, short: bool, element_size: int, compute_capability: tuple[int, int],
    shared_memory: int,
) -> ForwardConfig:  # fmt: skip
    """Tile sizes for a GPU of this capability, from 8.0 on, that fit in `shared_memory` bytes a program.

    Raises ValueError if none does. `short` is whether the call is causal and has fewer keys than KEYS_OF_WIDE_TILES.
    """
    configs = []  # the fastest first, as far as they were measured
    if element_size == 4:
        if block_d <= 128:
            configs.append(ForwardConfig(64, 32, 32, False, 4, 2, 2))
        configs.append(ForwardConfig(32, 32, 32, False, 4, 2, 2))
    elif compute_capability[0] >= 9:
        slices = -(-depth // 128)
        if compute_capability[0] == 9 and slices <= (3 if block_d <= 64 else 2 if block_d <= 128 else 0):
            # Two programs an SM.
            configs.append(ForwardConfig(64, 64, 128, True, 4, 3 if slices == 1 else 2, 1))
        on_hopper = compute_capability[0] == 9 and block_d <= 128
        if on_hopper and not short:
            configs.append(ForwardConfig(128, 256, 64, False, 8, 3, 2))
        if compute_capability[0] != 10 or block_d <= 128:  # sm_100: accumulators of 256 columns fill the tensor memory
            configs.append(ForwardConfig(128, 128, 64, False, 8, 5 if on_hopper else 4, 2))
    if element_size == 2:
        configs += [
            ForwardConfig(128, 64 if block_d <= 128 else 32, 64, False, 8, 3, 2),
            ForwardConfig(64, 64 if block_d <= 128 else 32, 64, False, 4, 2, 2),
        ]
    for config in configs:
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
    return max(128 // v.element_size(), next_power_of_2(v.shape[3]))
