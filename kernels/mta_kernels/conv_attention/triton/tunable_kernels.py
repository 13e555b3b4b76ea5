"""What can be tuned, one function each: its candidates for a shape, and how to run one on random inputs.

These are the kernels of the Triton backend, by their tile sizes, and which backend "auto" takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mta_kernels.allocation import empty, empty_like
from mta_kernels.backend import Request
from mta_kernels.conv_attention.tile_sizes import Key
from mta_kernels.gpu_limits import shared_memory_limit, sm_count, tile_limits
from mta_kernels.operation import Operation


@dataclass(frozen=True)
class TunedShape:
    """What to tune for: `q [batch, heads, seq_len, head_dim]`, in decode one query and a cache of `seq_len` keys."""

    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    taps: tuple[int, int]
    dtype: torch.dtype
    causal: bool = True

    @property
    def operation(self) -> Operation:
        """What is computed."""
        return Operation.of(self.taps, self.head_dim, causal=self.causal)

    def request(self, gradients: bool, device: torch.device) -> Request:
        """What "auto" is asked for, of a forward alone or with the backward."""
        return Request(self.operation, device, self.dtype, self.head_dim, gradients, key_rows=self.seq_len)

    def key(self, kernel: str) -> Key:
        """Under which a choice for this shape is saved."""
        decode = (self.heads // self.kv_heads, self.batch * self.kv_heads) if kernel.startswith("decode") else ()
        return Key.of(self.dtype, self.head_dim, self.taps, self.causal, self.seq_len, *decode)


@dataclass(frozen=True)
class Problem:
    """`run` gives what a config computes, in tensors that hold `blank` where nothing is written."""

    candidates: Sequence[Any]
    run: Callable[[Any], Sequence[Tensor]]
    blank: float = float("nan")


def forward_problem(shape: TunedShape, device: torch.device) -> Problem:
    """The fused forward of `forward.py` on prepared inputs, also for shapes that it computes for packed inputs only."""
    from mta_kernels.conv_attention.triton.forward import forward_candidates, launch_forward, value_block

    (q, *_), prepared, signature = _prepared(shape, device)
    out, logsumexp = empty_like(q), empty(q.shape[:3], dtype=torch.float32, device=device)

    def run(config: Any) -> Sequence[Tensor]:
        launch_forward(prepared, out, logsumexp, shape.causal, None, config, signature)
        return out, logsumexp

    depth, block_d = prepared.queries.shape[2], value_block(q)
    return Problem(forward_candidates(depth=depth, block_d=block_d, **tile_limits(q)), run)


def probabilities_problem(shape: TunedShape, device: torch.device) -> Problem:
    """The first kernel of the backward, on the last chunk of rows: the one that sees the most keys."""
    from mta_kernels.conv_attention.triton.backward_scores import launch_probabilities

    inputs = _last_chunk(shape, device)

    def run(config: Any) -> Sequence[Tensor]:
        launch_probabilities(inputs.prepared, inputs.logsumexp, inputs.p, inputs.chunk, config)
        return (inputs.p,)

    return Problem(inputs.candidates, run, blank=0.0)


def value_gradients_problem(shape: TunedShape, device: torch.device) -> Problem:
    """The second kernel of the backward, on the last chunk of rows."""
    from mta_kernels.conv_attention.triton.backward import gradient_scale, output_gradient
    from mta_kernels.conv_attention.triton.backward_scores import (
        launch_probabilities,
        launch_value_gradients,
        value_gradients_candidates,
    )
    from mta_kernels.conv_attention.triton.forward import value_block

    inputs = _last_chunk(shape, device)
    values, p, dc = inputs.prepared.values, inputs.p, inputs.dc
    launch_probabilities(inputs.prepared, inputs.logsumexp, p, inputs.chunk, inputs.candidates[0])
    grad_out = _normal(shape, device, *inputs.out.shape)
    loss_scale = gradient_scale(grad_out, values, None)
    grad_rows, delta = output_gradient(grad_out, inputs.out, loss_scale)
    dv = torch.zeros(p.shape[0], shape.seq_len, shape.head_dim, dtype=torch.float32, device=device)

    def run(config: Any) -> Sequence[Tensor]:
        launch_value_gradients(p, dc, values, grad_rows, delta, loss_scale, dv, inputs.chunk, config)
        return dc, dv

    candidates = value_gradients_candidates(
        block_d=value_block(values), element_size=p.element_size(), shared_memory=shared_memory_limit(device)
    )
    return Problem(candidates, run, blank=0.0)


def decode_problem(shape: TunedShape, device: torch.device, bulk: bool = False) -> Problem:
    """One decode step on a contiguous cache, with as many splits as "auto" takes; read by the copy engine if `bulk`."""
    from mta_kernels.conv_attention.triton.decode import launch_decode
    from mta_kernels.conv_attention.triton.decode_plan import DecodeConfig, auto_splits, decode_candidates

    q, k, v, weight = _inputs(shape, device, query_rows=min(shape.taps[0], shape.seq_len))
    lengths = torch.full((shape.batch,), shape.seq_len, dtype=torch.int32, device=device)
    group = shape.heads // shape.kv_heads
    limits = {
        "key_taps": shape.taps[1], "block_d": max(16, 1 << (shape.head_dim - 1).bit_length()),
        "element_size": q.element_size(), "shared_memory": shared_memory_limit(device),
    }  # fmt: skip

    def run(config: DecodeConfig) -> Sequence[Tensor]:
        splits = auto_splits(config, limits, shape.batch * shape.kv_heads, shape.seq_len, group, sm_count(device))
        tensors = q, k, v, weight, lengths, None
        return (launch_decode(shape.operation, *tensors, splits=splits, config=config, bulk=bulk),)

    return Problem(decode_candidates(group=group, bulk=bulk, **limits), run)


def backends_problem(shape: TunedShape, device: torch.device, gradients: bool) -> Problem:
    """The forward, or with `gradients` forward and backward, of every backend that has them."""
    from mta_kernels.conv_attention.backends import CONV_ATTENTION, BackendConfig

    inputs = _inputs(shape, device)
    grad_out = _normal(shape, device, *inputs[0].shape)

    def run(config: BackendConfig) -> Sequence[Tensor]:
        kernels: Any = CONV_ATTENTION.named(config.backend)
        out, logsumexp = kernels.forward(shape.operation, *inputs)
        if not gradients:
            return out, logsumexp
        return kernels.backward(shape.operation, *inputs, out, logsumexp, grad_out)

    return Problem([BackendConfig(x.name) for x in CONV_ATTENTION.able(shape.request(gradients, device))], run)


KERNELS: dict[str, Callable[[TunedShape, torch.device], Problem]] = {
    "forward": forward_problem,
    "probabilities": probabilities_problem,
    "value_gradients": value_gradients_problem,
    "decode": decode_problem,
    "decode_bulk": partial(decode_problem, bulk=True),
    "forward_backend": partial(backends_problem, gradients=False),
    "training_backend": partial(backends_problem, gradients=True),
}


@dataclass(frozen=True)
class _LastChunk:
    """What both kernels of the backward take: `p` and `dc` are zeros, `candidates` those of the probabilities."""

    prepared: Any
    out: Tensor
    logsumexp: Tensor
    p: Tensor
    dc: Tensor
    chunk: Any
    candidates: Sequence[Any]


def _last_chunk(shape: TunedShape, device: torch.device) -> _LastChunk:
    from mta_kernels.conv_attention.triton.backward import CHUNK_ROWS
    from mta_kernels.conv_attention.triton.backward_scores import chunks, probabilities_candidates
    from mta_kernels.conv_attention.triton.forward import conv_attention_forward

    inputs, prepared, signature = _prepared(shape, device)
    q = inputs[0]
    out, logsumexp = conv_attention_forward(shape.operation, *inputs)
    chunk = chunks(shape.seq_len, shape.seq_len, CHUNK_ROWS, shape.causal, None, signature)[-1]
    pitch = -(-chunk.keys * q.element_size() // 16) * 16 // q.element_size()  # rows begin at multiples of 16 bytes
    scratch = torch.zeros(2, shape.batch * shape.heads, chunk.rows, pitch, dtype=q.dtype, device=device)
    p, dc = scratch[..., : chunk.keys]
    return _LastChunk(prepared, out, logsumexp, p, dc, chunk, probabilities_candidates(**tile_limits(q)))


def _prepared(shape: TunedShape, device: torch.device) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Any, int]:
    """Random q, k, v and weight, what `prepare` makes of them, and the signature of a call with them."""
    from mta_kernels.conv_attention.triton.launch import call_signature
    from mta_kernels.conv_attention.triton.prepare import prepare

    inputs = _inputs(shape, device)
    signature = call_signature(*inputs, options=shape.causal)
    return inputs, prepare(shape.operation, *inputs, signature=signature), signature


def _inputs(
    shape: TunedShape, device: torch.device, query_rows: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v and weight; `query_rows` is the sequence length if None."""
    q = _normal(shape, device, shape.batch, shape.heads, query_rows or shape.seq_len, shape.head_dim)
    k, v = (_normal(shape, device, shape.batch, shape.kv_heads, shape.seq_len, shape.head_dim) for _ in range(2))
    return q, k, v, _normal(shape, device, shape.heads, *shape.taps) * 0.3


def _normal(shape: TunedShape, device: torch.device, *sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=shape.dtype, device=device)
