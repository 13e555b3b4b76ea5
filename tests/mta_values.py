"""Stored exponentials for the values kernel, and the float64 definition of what comes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kernel_inputs import DEVICE
from torch import Tensor

NAN = float("nan")


@dataclass
class Stored:
    """Exponentials `[B, H, R, ld]` of a chunk's rows, NaN in columns that may not be read, and what goes with them."""

    exponentials: Tensor
    scale: Tensor
    post_mix: Tensor | None
    v: Tensor
    first_position: int
    keys: int
    causal: bool
    visible: Tensor  # [R, ld]

    @property
    def options(self) -> dict[str, Any]:
        return {"first_position": self.first_position, "keys": self.keys, "causal": self.causal}

    @property
    def out(self) -> Tensor:
        """Room for it, rows of a larger tensor."""
        batch, heads, rows, _ = self.exponentials.shape
        return torch.full((batch, heads, rows + 3, self.v.shape[3]), NAN, device=DEVICE, dtype=torch.bfloat16)[:, :, 3:]


def make_stored(
    batch: int, heads: int, kv_heads: int, rows: int, keys: int, head_dim: int, *, above: int | None = None,
    causal: bool = True, mix_dtype: torch.dtype | None = torch.float32, room: int = 64, seed: int = 0,
) -> Stored:  # fmt: skip
    """The last `rows` of `keys` positions, or `rows` from `above` on; `room` columns too many."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    ld = -(-keys // 64) * 64 + room
    first = keys - rows if above is None else above
    keys = first + rows if causal else keys
    positions, columns = torch.arange(first, first + rows, device=DEVICE)[:, None], torch.arange(ld, device=DEVICE)
    visible = (columns < keys) & ((columns <= positions) | torch.tensor(not causal, device=DEVICE))
    last = (positions - first) // 64 * 64 + 63 + first
    read = columns < (last.clamp(max=keys - 1) // 64 + 1) * 64 if causal else columns < -(-keys // 64) * 64
    logits = (random(batch, heads, rows, ld) * 2).masked_fill(~visible, -torch.inf)
    exponentials = (logits - logits[..., :32].amax(-1, keepdim=True)).exp()  # over the largest of the first, not of all
    scale = 1 / exponentials.sum(-1)
    exponentials = exponentials.bfloat16()
    exponentials.masked_fill_(~read, NAN)
    mix = torch.eye(heads, device=DEVICE) + random(heads, heads) / heads**0.5
    v = random(batch, kv_heads, max(keys, first + rows), head_dim).bfloat16()
    return Stored(
        exponentials, scale, None if mix_dtype is None else mix.to(mix_dtype), v, first, keys, causal, visible
    )  # fmt: skip


def exact(stored: Stored, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Rows of out `[B, H, R, D]` by definition, in float64 or as eager rounds, and how large each row's terms are."""
    probabilities = stored.exponentials.masked_fill(~stored.visible, 0).double() * stored.scale.double()[..., None]
    probabilities = probabilities[..., : stored.keys].to(dtype)
    mix = torch.eye(probabilities.shape[1], device=DEVICE) if stored.post_mix is None else stored.post_mix
    mix = mix.bfloat16().to(dtype)
    v = stored.v[:, :, : stored.keys].to(dtype)
    v = v.repeat_interleave(probabilities.shape[1] // v.shape[1], 1)
    terms = torch.einsum("bgij,gh->bhij", probabilities, mix.abs()).norm(dim=-1) * v.shape[3] ** 0.5
    return torch.einsum("bgij,gh->bhij", probabilities, mix) @ v, terms


def assert_near(got: Tensor, stored: Stored) -> None:
    """As near to float64 as twice eager's error, in all and in each row of each head, whose terms may cancel."""
    want, terms = exact(stored)
    got, eager = got.double(), exact(stored, torch.bfloat16)[0].double()
    assert got.isfinite().all()
    half_unit = torch.finfo(torch.bfloat16).eps / 2
    error, of_eager = (x - want for x in (got, eager))
    assert error.norm() <= max(2 * of_eager.norm(), half_unit * want.norm())
    worst, worst_of_eager = ((x.norm(dim=-1) / terms).amax() for x in (error, of_eager))
    assert worst <= max(2 * worst_of_eager, half_unit), f"{worst} where eager has {worst_of_eager}"
