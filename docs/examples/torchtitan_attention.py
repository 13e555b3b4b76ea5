"""Attention for trainers in the style of torchtitan: packed documents, FSDP2, tensor parallelism. Copy it, change it.

`InnerAttention` takes the place of torchtitan's wrapper of variable-length attention and owns one parameter.
`Attention` has the projections around it. `TENSOR_PARALLEL` is its plan for `parallelize_module`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from mta_kernels.conv_attention import conv_attention, identity_weight


class InnerAttention(nn.Module):
    """Causal conv attention within documents: `q [tokens, heads, head_dim]`, k and v with as many heads or fewer.

    `cu_seq_q [documents + 1]` are the bounds of documents among the tokens. The other arguments belong to
    torchtitan's wrapper, and are not needed: keys and queries have the same tokens.
    """

    def __init__(self, heads: int, query_taps: int = 6, key_taps: int = 11) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, query_taps, key_taps, dtype=torch.float32))
        self.init_weights()

    def init_weights(self) -> None:
        """Plain attention. Trainers that build a model without memory call it once the parameters are there."""
        identity = identity_weight(*self.weight.shape).to(self.weight.device, self.weight.dtype)
        if isinstance(self.weight, DTensor):
            identity = distribute_tensor(identity, self.weight.device_mesh, self.weight.placements)
        with torch.no_grad():
            self.weight.copy_(identity)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None = None,
        max_q: int | None = None, max_k: int | None = None,
    ) -> Tensor:  # fmt: skip
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, tokens, head_dim], views
        return conv_attention(q, k, v, weight, cu_seqlens=cu_seq_q)[0].transpose(0, 1)


class Attention(nn.Module):
    """Grouped-query attention of `x [batch, tokens, dim]`; `rotate` is the rotary embedding of q and k."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.inner_attention = InnerAttention(heads)

    def forward(self, x: Tensor, rotate: Callable[[Tensor], Tensor], cu_seqlens: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        # -1: with tensor parallelism these are the heads of this rank.
        q, k, v = (linear(x).view(batch, tokens, -1, self.head_dim) for linear in (self.wq, self.wk, self.wv))
        flat = (part.flatten(0, 1) for part in (rotate(q), rotate(k), v))  # [batch * tokens, heads, head_dim]
        return self.wo(self.inner_attention(*flat, cu_seqlens).reshape(batch, tokens, -1))


class ShardHeads(ParallelStyle):
    """Each rank has the weights of its heads, which is all that a convolution of scores needs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.detach(), device_mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(sharded))
        return module


TENSOR_PARALLEL = {
    "wq": ColwiseParallel(),
    "wk": ColwiseParallel(),
    "wv": ColwiseParallel(),
    "inner_attention": ShardHeads(),
    "wo": RowwiseParallel(),
}
