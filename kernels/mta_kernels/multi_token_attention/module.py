"""The whole multi-token attention as a module, whose parameters have the names and shapes of the paper's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mta_kernels.backend import Choice
from mta_kernels.conv_attention import identity_weight
from mta_kernels.conv_attention.arguments import (
    as_float,
    as_int,
    check_are_tensors,
    check_count,
    check_floating_point,
    is_int,
)
from mta_kernels.multi_token_attention.api import multi_token_attention
from mta_kernels.multi_token_attention.arguments import check_depth, check_share
from mta_kernels.multi_token_attention.choice import check_backend, explain
from mta_kernels.multi_token_attention.decode.api import multi_token_attention_decode
from mta_kernels.multi_token_attention.decode.arguments import check_wants_no_gradient
from mta_kernels.multi_token_attention.decode.reference import prefill_state
from mta_kernels.multi_token_attention.decode.state import DecodeState, needs_state
from mta_kernels.multi_token_attention.mixers import Mixers, operation_of
from mta_kernels.operation import format_value, key_padding

PROJECTIONS = ("wq", "wk", "wv", "wo")  # of the original's attention, which a model has besides this module


class Preset(NamedTuple):
    """A language model of the paper: every fourth layer from the third on convolves, all mix heads."""

    heads: int
    head_dim: int
    layers: int


PRESETS = {
    "mta-300m": Preset(16, 64, 20),
    "mta-550m": Preset(10, 128, 24),
    "mta-830m": Preset(16, 96, 24),
    "mta-1b": Preset(16, 128, 24),
}


class MultiTokenAttention(nn.Module):
    """`multi_token_attention` with its mixers as parameters, by default all parts of the paper's models.

    - `pre_conv`, `post_conv`: query taps and key taps of a convolution, or None: `mta_kernel [heads, 1, cq, ck]` and
      `mta_kernel_after_sm`.
    - `pre_mix`: whether scores of heads are mixed: `wpsm.weight [heads, heads]`.
    - `post_mix`: True mixes the probabilities of all heads, a number mixes them within groups of so many heads:
      `head_kernel [groups, c, c]`, (in, out). "linear" mixes all heads by `wposm.weight [heads, heads]`, (out, in).
    - `norm`: the RMSNorm of each head's output, `subln.weight [head_dim]`; `depth`, a layer's index, rescales it.
    - `gate`: True has one gate a head, `gate.weight [1, head_dim]`; "full" one a number, `[head_dim, head_dim]`.
    - `dropout` drops probabilities, in training alone.

    At first every mixer is the identity and the norm's weight is 1, as in the original. Its gate is no identity: the
    weight is normal with standard deviation `(heads * head_dim) ** -0.5`, cut off at three of them, and the bias begins
    as in `torch.nn.Linear`. `load_state_dict` takes a layer's entries as `layer_entries` picks them from a
    checkpoint of the original. Raises ValueError for parts that do not fit, and TypeError for another dtype.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        pre_conv: tuple[int, int] | None = (6, 11),
        pre_mix: bool = True,
        post_conv: tuple[int, int] | None = (6, 11),
        post_mix: bool | int | str = True,
        norm: bool = True,
        depth: int | None = None,
        gate: bool | str = True,
        dropout: float = 0.0,
        causal: bool = True,
        scale: float | None = None,
        pad_key: str = "both",
        backend: str = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        heads, head_dim, depth, post_mix = map(as_int, (heads, head_dim, depth, post_mix))
        dropout = as_float(dropout)
        self.heads, self.head_dim, self.depth, self.dropout = heads, head_dim, depth, dropout
        self.causal, self.scale, self.pad_key, self.backend = causal, scale, pad_key, backend
        check_count("heads", heads)
        check_count("head_dim", head_dim)
        _check_taps(pre_conv=pre_conv, post_conv=post_conv)
        key_padding(1, pad_key)
        _check_parts(heads, pre_mix, post_mix, norm, depth, gate)
        check_share(dropout)
        if dtype is not None:
            check_floating_point(dtype)
        there: Any = {"dtype": dtype, "device": device}

        def taps(shape: tuple[int, int] | None) -> nn.Parameter | None:
            weight = None if shape is None else identity_weight(heads, *shape, pad_key=pad_key, **there)
            return None if weight is None else nn.Parameter(weight[:, None])

        self.mta_kernel = taps(pre_conv)
        self.wpsm = nn.Linear(heads, heads, bias=False, **there) if pre_mix else None
        self.mta_kernel_after_sm = taps(post_conv)
        self.head_kernel = self.wposm = None
        if post_mix == "linear":
            self.wposm = nn.Linear(heads, heads, bias=False, **there)
        elif post_mix is not False:
            together = heads if post_mix is True else int(post_mix)
            self.head_kernel = nn.Parameter(torch.empty(heads // together, together, together, **there))
        self.subln = nn.RMSNorm(head_dim, eps=1e-5, **there) if norm else None
        self.gate = nn.Linear(head_dim, head_dim if gate == "full" else 1, **there) if gate else None
        self.reset_parameters()
        operation = operation_of(Mixers(**self._mixing()), head_dim, causal=causal, scale=scale, pad_key=pad_key)
        check_backend(backend, operation, 0.0)

    @classmethod
    def preset(cls, name: str, *, layer: int, **options: Any) -> MultiTokenAttention:
        """A layer, counted from 0, of a model of the paper: "mta-300m", "mta-550m", "mta-830m" or "mta-1b".

        `options` are the module's and replace the preset's. Raises ValueError for another name, or a layer that
        the model does not have.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"preset is {name!r}; expected one of {', '.join(map(repr, PRESETS))}")
        heads, head_dim, layers = PRESETS[name]
        layer = as_int(layer)
        if not is_int(layer) or not 0 <= layer < layers:
            raise ValueError(f"layer is {format_value(layer)}; {name} has the layers 0 to {layers - 1}")
        if layer % 4 != 2:
            options = {"pre_conv": None, "post_conv": None} | options
        return cls(**{"heads": heads, "head_dim": head_dim} | options)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Make every mixer the identity again, and draw the gate's numbers anew."""
        for kernel in (self.mta_kernel, self.mta_kernel_after_sm):
            if kernel is not None:
                heads, _, *taps = kernel.shape
                kernel.copy_(identity_weight(heads, *taps, pad_key=self.pad_key, device=kernel.device)[:, None])
        for linear in (self.wpsm, self.wposm):
            if linear is not None:
                linear.weight.copy_(torch.eye(self.heads, device=linear.weight.device))
        if self.head_kernel is not None:
            self.head_kernel.copy_(torch.eye(self.head_kernel.shape[1], device=self.head_kernel.device))
        if self.subln is not None:
            self.subln.reset_parameters()
        if self.gate is not None:
            self.gate.reset_parameters()
            deviation = (self.heads * self.head_dim) ** -0.5
            nn.init.trunc_normal_(self.gate.weight, std=deviation, a=-3 * deviation, b=3 * deviation)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MultiTokenAttention:
        """nn.Module's `_apply`, but taps keep their strides.

        `.to(memory_format=torch.channels_last)` gives their dimension of size 1 a stride that gradients never have; DDP
        would warn about it at every step.
        """
        super()._apply(fn, recurse)
        for taps in (self.mta_kernel, self.mta_kernel_after_sm):
            if taps is not None and taps.stride(1) != taps.stride(0):
                taps.data = taps.data.flatten().view(taps.shape)
        return self

    def mixers(self) -> dict[str, Any]:
        """The tensors of the parts, as this package's functions take them by keyword, besides depth and options."""
        given = {
            "pre_conv": None if self.mta_kernel is None else self.mta_kernel.squeeze(1),
            "pre_mix": None if self.wpsm is None else self.wpsm.weight,
            "post_conv": None if self.mta_kernel_after_sm is None else self.mta_kernel_after_sm.squeeze(1),
            "post_mix": self.head_kernel if self.wposm is None else self.wposm.weight.t(),
            "norm_weight": None if self.subln is None else self.subln.weight,
            "gate_weight": None if self.gate is None else self.gate.weight,
            "gate_bias": None if self.gate is None else self.gate.bias,
        }
        return {name: x for name, x in given.items() if x is not None}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_history: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        seed: int | Tensor | None = None,
    ) -> Tensor:
        """`[B, heads, M, D]` of `q [B, heads, M, D]` and `k, v [B, Hkv, N, D]`, as `multi_token_attention`.

        `q_history` is for a chunk of a prompt, `cu_seqlens` for documents, `seed` for a dropout that can be repeated.
        Raises as that function, and ValueError for other heads than the module's.
        """
        self._check_heads(q=q)
        return multi_token_attention(
            q, k, v, **self.mixers(), depth=self.depth, dropout=self.dropout if self.training else 0.0, seed=seed,
            causal=self.causal, scale=self.scale, pad_key=self.pad_key, q_history=q_history, cu_seqlens=cu_seqlens,
            backend=self.backend,
        )  # fmt: skip

    def prefill_state(
        self, q_window: Tensor, k_cache: Tensor, *, lengths: Tensor, block_table: Tensor | None = None
    ) -> DecodeState | None:
        """The state that `decode` needs besides the caches after prompts of `lengths`, as `prefill_state`, or None.

        Raises as `decode`.
        """
        self._check_steps(q_window)
        mixing = self._mixing()
        if not needs_state(Mixers(**mixing)):
            return None
        mixing.pop("post_mix", None)
        options: dict[str, Any] = {"scale": self.scale, "pad_key": self.pad_key, "block_table": block_table}
        return prefill_state(q_window, k_cache, lengths=lengths, **mixing, **options)

    def decode(
        self,
        q_window: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        lengths: Tensor,
        state: DecodeState | None = None,
        block_table: Tensor | None = None,
        splits: int | str = "auto",
    ) -> Tensor:
        """The newest row `[B, heads, 1, D]` from the caches, as `multi_token_attention_decode` with all parts.

        Drops no probabilities. The parameters get no gradient, and may require one. Raises as that function, and
        ValueError where the module is not causal.
        """
        check_are_tensors(q_window=q_window, k_cache=k_cache, v_cache=v_cache)
        self._check_steps(q_window)
        check_wants_no_gradient(q_window, k_cache, v_cache)
        with torch.no_grad():
            return multi_token_attention_decode(
                q_window, k_cache, v_cache, lengths=lengths, state=state, **self.mixers(), depth=self.depth,
                scale=self.scale, pad_key=self.pad_key, block_table=block_table, backend=self.backend, splits=splits,
            )  # fmt: skip

    def _check_heads(self, **queries: Tensor) -> None:
        """Raise ValueError, by its name, for queries whose heads do not match the parameters."""
        for name, q in queries.items():
            if isinstance(q, Tensor) and q.dim() == 4 and (q.shape[1], q.shape[3]) != (self.heads, self.head_dim):
                raise ValueError(
                    f"{name} has shape {tuple(q.shape)}; expected [batch, {self.heads}, rows, {self.head_dim}], as the "
                    f"module is MultiTokenAttention({self.heads}, {self.head_dim})"
                )

    def _check_steps(self, q_window: Tensor) -> None:
        """Raise ValueError where the module is not causal, or for queries of other heads."""
        if not self.causal:
            raise ValueError("causal is False, and a decode step is causal; make the module with causal=True")
        self._check_heads(q_window=q_window)

    def _mixing(self) -> dict[str, Any]:
        """The parts around the softmax, by keyword."""
        return {name: x for name, x in self.mixers().items() if name in Mixers._fields}

    def explain(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, decode: bool = False
    ) -> Choice:
        """Which backend a call of the module takes, and why; raises as `explain`.

        If `decode`, for a step by the method `decode`: q, k and v are its window of queries and contiguous caches.
        """
        options: dict[str, Any] = {"causal": self.causal, "cu_seqlens": cu_seqlens, "backend": self.backend}
        if decode:
            self._check_steps(q)
            with torch.no_grad():
                return explain(q, k, v, **self._mixing(), **options, decode=True)
        self._check_heads(q=q)
        return explain(q, k, v, **self._mixing(), dropout=self.dropout if self.training else 0.0, **options)

    def extra_repr(self) -> str:
        shapes = {name: list(x.shape) for name, x in self.named_parameters(recurse=False)}
        return (
            f"{self.heads}, {self.head_dim}, {''.join(f'{name}={shape}, ' for name, shape in shapes.items())}"
            f"depth={self.depth}, dropout={self.dropout}, causal={self.causal}, scale={self.scale}, "
            f"pad_key={self.pad_key!r}, backend={self.backend!r}"
        )


def layer_entries(state_dict: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """A layer's entries (from 0) of a checkpoint of the original, for `MultiTokenAttention.load_state_dict`.

    `state_dict` is of the whole model, with names that begin with `layers.LAYER.attention.`. The projections `wq`,
    `wk`, `wv` and `wo` are left out: a model has them besides this module. Raises ValueError if nothing remains, and
    TypeError for what is no state dict.
    """
    if not isinstance(state_dict, Mapping) or not all(isinstance(name, str) for name in state_dict):
        raise TypeError(
            f"state_dict is a {type(state_dict).__name__}; expected a mapping from names to tensors, as torch.load "
            "gives it of a checkpoint"
        )
    prefix = f"layers.{layer}.attention."
    entries = {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}
    entries = {name: x for name, x in entries.items() if name.partition(".")[0] not in PROJECTIONS}
    if not entries:
        raise ValueError(
            f"the state dict has no mixer named {prefix}...; expected that of the original's whole model, "
            "and a layer that has mixers, counted from 0"
        )
    return entries


def _check_taps(**convolutions: object) -> None:
    """Raise ValueError, by its name, for the first that is neither None nor query taps and key taps."""
    for name, taps in convolutions.items():
        is_pair = isinstance(taps, tuple | list) and len(taps) == 2
        if taps is not None and not is_pair:
            raise ValueError(f"{name} is {taps!r}; expected query taps and key taps such as (6, 11), or None")
        for count in taps or ():  # type: ignore[attr-defined]
            check_count(f"{name} is {taps!r}: a number of taps", as_int(count))


def _check_parts(
    heads: int, pre_mix: bool, post_mix: bool | int | str, norm: bool, depth: int | None, gate: bool | str
) -> None:
    """Raise ValueError, in one sentence, for options of the module that do not fit."""
    if not isinstance(pre_mix, bool):  # a number would be taken for groups
        raise ValueError(f"pre_mix is {pre_mix!r}; expected True, for all {heads} heads, or False")
    is_group = isinstance(post_mix, int) and (isinstance(post_mix, bool) or (post_mix > 0 and heads % post_mix == 0))
    if not is_group and post_mix != "linear":
        raise ValueError(
            f"post_mix is {format_value(post_mix)}; expected True, False, 'linear' or the heads of a group, "
            f"a number that divides the {heads} heads"
        )
    if not isinstance(norm, bool):
        raise ValueError(f"norm is {norm!r}; expected True or False")
    if not isinstance(gate, bool) and gate != "full":
        raise ValueError(f"gate is {gate!r}; expected True, False or 'full'")
    check_depth(depth)
    if depth is not None and not norm:
        raise ValueError(f"depth is {depth} and norm is False; the depth rescales the norm: leave out one of them")
