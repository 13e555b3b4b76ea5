"""Queries and keys for the kernel of kept logits, and the float64 definition of what it gives."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from kernel_inputs import DEVICE
from torch import Tensor

from mta_kernels.multi_token_attention.mix_cuda import keep_logits

NAN = float("nan")


@dataclass
class Case:
    """A chunk of `rows` of M queries against N keys, and its scratch, full of NaN."""

    q: Tensor
    k: Tensor
    pre_mix: Tensor | None
    scale: float
    first_row: int
    rows: int
    causal: bool

    @property
    def positions(self) -> Tensor:
        return self.k.shape[2] - self.q.shape[2] + self.first_row + torch.arange(self.rows, device=self.q.device)

    @property
    def keys(self) -> int:
        return int(self.positions[-1]) + 1 if self.causal else self.k.shape[2]

    def run(self, workers: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        batch, heads = self.q.shape[:2]
        pitch = -(-self.keys // 128) * 128
        kept = torch.full((batch, heads, self.rows, pitch), NAN, dtype=torch.bfloat16, device=self.q.device)
        scales = torch.full(kept.shape[:3], NAN, device=self.q.device)
        logsumexp = torch.full((self.rows, heads, batch), NAN, device=self.q.device).permute(2, 1, 0)
        keep_logits(
            self.q, self.k, self.pre_mix, kept, scales, logsumexp, scale=self.scale, first_row=self.first_row,
            keys=self.keys, causal=self.causal, workers=workers,
        )  # fmt: skip
        return kept, scales, logsumexp

    def logits(self, *, rounded: bool, dtype: torch.dtype = torch.float64) -> Tensor:
        """In float64; `rounded` rounds scores to bfloat16 between, in powers of two, as the kernel does."""
        heads = self.q.shape[1]
        k = self.k.repeat_interleave(heads // self.k.shape[1], 1)
        q = self.q[:, :, self.first_row : self.first_row + self.rows]
        scores = q.to(dtype) @ k.to(dtype).transpose(2, 3) * self.scale
        if rounded:
            scores = (scores / math.log(2)).to(torch.bfloat16).to(dtype) * math.log(2)
        if self.pre_mix is not None:
            scores = torch.einsum("hg,bgij->bhij", self.pre_mix.to(torch.bfloat16).to(dtype), scores)
        if self.causal:
            seen = torch.arange(k.shape[2], device=k.device) <= self.positions[:, None]
            scores = scores.masked_fill(~seen, -torch.inf)
        return scores

    def check(self, workers: int | None = None) -> None:
        """Probabilities and logsumexp to within what rounding scores to bfloat16 costs; zeros in all whole blocks."""
        kept, scales, logsumexp = self.run(workers)
        for batch in range(self.q.shape[0]):  # not all of float64 at once
            one = Case(self.q[batch : batch + 1], self.k[batch : batch + 1], self.pre_mix, self.scale, self.first_row,
                       self.rows, self.causal)  # fmt: skip
            one.compare(kept[batch], scales[batch], logsumexp[batch])

    def compare(self, kept: Tensor, scales: Tensor, logsumexp: Tensor) -> None:
        exact, rounded = self.logits(rounded=False)[0], self.logits(rounded=True)[0]
        keys = exact.shape[2]
        lse, rounded_lse = exact.logsumexp(2), rounded.logsumexp(2)
        got = kept.double() * scales[..., None].double()
        for first in range(0, self.rows, 64):
            last = min(first + 63, self.rows - 1)
            end = (int(self.positions[last]) if self.causal else keys - 1) // 64 * 64 + 64
            tile = slice(first, first + 64)
            padded = (0, max(0, end - keys))
            want = torch.nn.functional.pad((exact[:, tile] - lse[:, tile, None]).exp(), padded)[..., :end]
            rough = torch.nn.functional.pad((rounded[:, tile] - rounded_lse[:, tile, None]).exp(), padded)[..., :end]
            part = got[:, tile, :end]
            assert part.isfinite().all()
            assert (part[want == 0] == 0).all()
            error, allowed = (part - want).norm(dim=2), (rough.to(torch.bfloat16).double() - want).norm(dim=2)
            worst = (error / (1.6 * allowed + 4e-3 * want.norm(dim=2))).max()
            assert worst <= 1, f"rows {first}: {worst}"
        slack = 1.6 * (rounded_lse - lse).abs().amax(1, keepdim=True) + 1e-3 + 1e-6 * lse.abs()
        assert ((logsumexp.double() - lse).abs() <= slack).all(), ((logsumexp.double() - lse).abs() - slack).max()


def make_case(
    *, heads: int, rows: int, keys: int, head_dim: int = 64, batch: int = 1, queries: int | None = None,
    first_row: int = 0, causal: bool = True, kv_heads: int | None = None, size: float = 1.0, mixed: bool = True,
    seed: int = 0, device: str = DEVICE,
) -> Case:  # fmt: skip
    """`rows` rows from `first_row` on of `queries` (by default no more); scores of about `size`."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q = normal(batch, heads, queries or first_row + rows, head_dim) * size
    k = normal(batch, kv_heads or heads, keys, head_dim)
    pre = torch.eye(heads, device=device) + 0.3 * normal(heads, heads)
    return Case(
        q.to(torch.bfloat16), k.to(torch.bfloat16), pre if mixed else None, head_dim**-0.5, first_row, rows, causal
    )
