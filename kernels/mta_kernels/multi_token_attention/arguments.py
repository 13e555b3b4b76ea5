"""Checks of the arguments of the whole multi-token attention, which every backend shares."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mta_kernels.conv_attention.arguments import as_float, as_int, check_arguments, check_like, check_weight, is_int
from mta_kernels.multi_token_attention.mixers import Mixers
from mta_kernels.operation import format_value


class NormGate(NamedTuple):
    """The steps after each head's output: a normalisation, then a gate; None leaves one out."""

    norm_weight: Tensor | None = None  # [D]
    norm_eps: float = 1e-5
    depth: int | None = None  # of the layer, from 0
    gate_weight: Tensor | None = None  # [1, D] or [D, D]
    gate_bias: Tensor | None = None  # [1] or [D]

    @classmethod
    def of(
        cls, norm_weight: Tensor | None, norm_eps: float, depth: int | None, gate_weight: Tensor | None,
        gate_bias: Tensor | None,
    ) -> NormGate:  # fmt: skip
        """The public functions' arguments, unchecked, with numbers as Python's."""
        return cls(norm_weight, as_float(norm_eps), as_int(depth), gate_weight, gate_bias)

    @property
    def factor(self) -> float:
        """The factor on the normalised output: smaller in deep layers; 1 without a depth."""
        return 1.0 if self.depth is None else 1.0 - (0.8 - 0.6 * math.exp(-0.3 * self.depth))

    @property
    def steps(self) -> tuple[Tensor | None, float, float, Tensor | None, Tensor | None]:
        """The arguments that `norm_and_gate` takes after an output."""
        return self.norm_weight, self.norm_eps, self.factor, self.gate_weight, self.gate_bias

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """The tensors by name."""
        return {"norm_weight": self.norm_weight, "gate_weight": self.gate_weight, "gate_bias": self.gate_bias}


def check_call(
    q: Tensor, k: Tensor, v: Tensor, given: Mixers, after: NormGate, pad_key: str, *, dropout: float = 0.0,
    seed: int | Tensor | None = None, q_history: Tensor | None = None, cu_seqlens: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ValueError or TypeError, in one sentence, unless the arguments are those of `multi_token_attention`."""
    convolutions = {"pre_conv": given.pre_conv, "post_conv": given.post_conv}
    check_arguments(q, k, v, pad_key, convolutions, q_history=q_history, cu_seqlens=cu_seqlens)
    check_mixers(given, q)
    check_norm_and_gate(after, q)
    check_dropout(dropout, seed, q)


def check_mixers(given: Mixers, q: Tensor, like: str = "q") -> None:
    """Raise ValueError or TypeError, by its name, for the first mixer that does not fit q, whose name is `like`."""
    for name, x in given._asdict().items():
        if x is None:
            continue
        if name.endswith("conv"):
            check_weight(x, q.shape[1], q, name=name, like=like)
        else:
            check_mixing(x, q, name=name, like=like)


def check_mixing(mix: Tensor, q: Tensor, *, name: str, like: str = "q") -> None:
    """Raise unless `mix`, by its `name`, is `[H, H]`, or `[G, c, c]` with `G * c = H`, H being the heads of q.

    Its dtype and device must pass `check_like`; `like` is the name of q.
    """
    heads = q.shape[1]
    order = "(out, in)" if name == "pre_mix" else "(in, out)"
    if mix.dim() not in (2, 3) or 0 in mix.shape or mix.shape[-1] != mix.shape[-2]:
        raise ValueError(
            f"{name} has shape {tuple(mix.shape)}; expected [{heads}, {heads}] {order}, "
            f"or groups of heads [groups, heads of a group, heads of a group] {order}"
        )
    groups, size = (mix.shape[0] if mix.dim() == 3 else 1), mix.shape[-1]
    if groups * size != heads:
        raise ValueError(
            f"{name} has shape {tuple(mix.shape)}, which mixes {groups * size} heads, and {like} has {heads}; "
            f"give [{heads}, {heads}] {order}, or [groups, c, c] with groups * c = {heads}"
        )
    check_like(name, mix, q, like)


def check_norm_and_gate(after: NormGate, q: Tensor, like: str = "q") -> None:
    """Raise unless the parts of `after` fit the head dim, device and dtype of q, whose name is `like`."""
    head_dim = q.shape[3]
    norm_weight, norm_eps, depth, gate_weight, gate_bias = after
    if norm_weight is not None:
        if norm_weight.shape != (head_dim,):
            raise ValueError(
                f"norm_weight has shape {tuple(norm_weight.shape)}; expected [{head_dim}], a number a head dim"
            )
        check_like("norm_weight", norm_weight, q, like)
    if not isinstance(norm_eps, float) or not 0 <= norm_eps < math.inf:
        raise ValueError(
            f"norm_eps is {format_value(norm_eps)}; expected a finite number from 0 on, 1e-5 in the paper's models"
        )
    check_depth(depth)
    if depth is not None and norm_weight is None:
        raise ValueError(
            f"depth is {depth} and norm_weight is missing; the depth rescales the normalised output: "
            "give norm_weight, torch.ones(head_dim) at first, or leave out depth"
        )
    if gate_weight is None:
        if gate_bias is not None:
            raise ValueError("gate_bias is given without gate_weight; give both, or leave out gate_bias")
        return
    if gate_weight.dim() != 2 or gate_weight.shape[1] != head_dim or gate_weight.shape[0] not in (1, head_dim):
        raise ValueError(
            f"gate_weight has shape {tuple(gate_weight.shape)}; expected [1, {head_dim}] or [{head_dim}, {head_dim}], "
            "the weight of a torch.nn.Linear"
        )
    check_like("gate_weight", gate_weight, q, like)
    if gate_bias is not None:
        if gate_bias.shape != gate_weight.shape[:1]:
            raise ValueError(
                f"gate_bias has shape {tuple(gate_bias.shape)}; expected [{gate_weight.shape[0]}], "
                "as many numbers as gate_weight has rows"
            )
        check_like("gate_bias", gate_bias, q, like)


def check_depth(depth: int | None) -> None:
    """Raise ValueError unless `depth` is None or the index of a layer."""
    if depth is not None and (not is_int(depth) or not 0 <= depth < 2**63):
        raise ValueError(
            f"depth is {format_value(depth)}; expected the layer's index, a whole number from 0 to 2**63 - 1, or None"
        )


def check_share(dropout: float) -> None:
    """Raise ValueError unless `dropout` is a share below 1."""
    if not isinstance(dropout, float) or not 0 <= dropout < 1:
        raise ValueError(
            f"dropout is {format_value(dropout)}; expected a number from 0 to below 1, the share that is dropped"
        )


def check_dropout(dropout: float, seed: int | Tensor | None, q: Tensor) -> None:
    """Raise unless `dropout` is a share below 1, and `seed` None, a whole number or a 0-d int64 tensor beside q."""
    check_share(dropout)
    if isinstance(seed, Tensor):
        if seed.dim() or seed.dtype != torch.int64 or seed.device != q.device:
            raise ValueError(
                f"seed has shape {tuple(seed.shape)}, dtype {seed.dtype}, on {seed.device}; "
                f"expected a whole number, or a torch.int64 tensor without dimensions on {q.device}"
            )
    elif seed is not None and (not is_int(seed) or not 0 <= seed < 2**63):
        raise ValueError(
            f"seed is {format_value(seed)}; expected a whole number from 0 to 2**63 - 1, or None for another each call"
        )
