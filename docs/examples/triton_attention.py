"""A fused forward of plain attention in Triton, and why it cannot run everywhere.

mtabench verify --impl docs/examples/triton_attention.py:attention
mtabench fwd --impl docs/examples/triton_attention.py:attention,sdpa-cudnn --seq 1k..16k
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # queries, and keys, of a tile


@triton.jit
def forward(
    q_ptr, k_ptr, v_ptr, out_ptr, heads, group, tokens, head_dim, scale,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program a tile of queries of one head; tensors are contiguous `[B, H, N, D]`."""
    tile, head = tl.program_id(0), tl.program_id(1)
    kv_head = head // heads * (heads // group) + head % heads // group
    rows, columns = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = columns[None, :] < head_dim
    own = rows[:, None] * head_dim + columns[None, :]
    q_at = head.to(tl.int64) * tokens * head_dim + own
    q = tl.load(q_ptr + q_at, mask=inside & (rows[:, None] < tokens), other=0.0)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    end = tl.minimum((tile + 1) * ROWS, tokens) if CAUSAL else tokens
    for start in range(0, end, ROWS):
        keys = start + tl.arange(0, ROWS)
        at = kv_head.to(tl.int64) * tokens * head_dim + keys[:, None] * head_dim + columns[None, :]
        there = inside & (keys[:, None] < tokens)
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = keys[None, :] < tokens
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        kept = tl.exp(highest - new)
        p = tl.exp(scores - new[:, None])
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        out = out * kept[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total, highest = total * kept + tl.sum(p, 1), new
    result = (out / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + q_at, result, mask=inside & (rows[:, None] < tokens))


class Attention:
    """An object to measure: a call is the forward, and `unsupported` says what it cannot do."""

    work = "tiled"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        batch, heads, tokens, head_dim = q.shape
        out = torch.empty_like(q)
        forward[triton.cdiv(tokens, ROWS), batch * heads](
            q, k, v, out, heads, heads // k.shape[1], tokens, head_dim, scale,
            CAUSAL=causal, ROWS=ROWS, COLUMNS=max(16, triton.next_power_of_2(head_dim)),
        )  # fmt: skip
        return out

    def unsupported(self, device: str, head_dim: int) -> str | None:
        if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton needs a GPU, or its interpreter (TRITON_INTERPRET=1)"
        return None if head_dim <= 128 else f"head dim {head_dim} is above 128"


attention = Attention()
