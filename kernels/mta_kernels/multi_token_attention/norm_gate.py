"""Normalisation and gate after the output of multi-token attention, in one kernel where Triton runs.

The eager `norm_and_gate` of `reference` defines the result. `mta::norm_gate` and `mta::norm_gate_backward` are
`torch.library` operators, opaque to torch.compile. The forward keeps only its input for the backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mta_kernels import flop_formulas
from mta_kernels.allocation import empty, empty_like, new_empty
from mta_kernels.conv_attention.surroundings import on_device_of, without_autocast
from mta_kernels.conv_attention.triton.backend import platform_unsupported
from mta_kernels.gpu_limits import sm_count
from mta_kernels.multi_token_attention import reference
from mta_kernels.operator_gradients import call, define, like_each, register_with_backward, under_torch_func

MAX_HEAD_DIM = 256
TILE = 4096  # numbers of x that a program holds at a time
BACKWARD = {"tile": 2048, "programs": 8, "stages": 3, "num_warps": 4}  # programs an SM
TILE_OF_PRODUCTS = 16 * MAX_HEAD_DIM  # the same where the gate is a product: 16 rows or more


def norm_and_gate(
    out: Tensor, norm_weight: Tensor | None, norm_eps: float, factor: float, gate_weight: Tensor | None,
    gate_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """RMSNorm over the last dim of `out [B, H, M, D]`, times `factor`, then a gate: same shape, dtype and strides.

    `norm_weight [D]`, `gate_weight [1, D]` or `[D, D]`, `gate_bias [1]` or `[D]`, each in out's dtype or float32, for
    checked arguments; None leaves a step out. Differentiable in every tensor: once where the kernels run, in all ways
    where eager PyTorch does (on a CPU, for float64, beyond 256 numbers a head, in torch.func).
    """
    arguments = out, norm_weight, norm_eps, factor, gate_weight, gate_bias
    if norm_weight is None and gate_weight is None:
        return out
    runs = out.is_cuda and out.shape[3] <= MAX_HEAD_DIM and platform_unsupported(out.device, out.dtype) is None
    if not runs or under_torch_func():
        return reference.norm_and_gate(*arguments)
    return call(NORM_GATE, *arguments)


def _like_forward(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x)


def _like_backward(
    x: Tensor, grad: Tensor, norm_weight: Tensor | None, norm_eps: float, factor: float, gate_weight: Tensor | None,
    gate_bias: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return torch.empty_like(x), *like_each(x, norm_weight, gate_weight, gate_bias)[1:]


NORM_GATE = define(
    "norm_gate",
    "(Tensor x, Tensor? norm_weight, float norm_eps, float factor, Tensor? gate_weight, Tensor? gate_bias) -> Tensor",
    _like_forward,
)
NORM_GATE_BACKWARD = define(
    "norm_gate_backward",
    "(Tensor x, Tensor grad, Tensor? norm_weight, float norm_eps, float factor, Tensor? gate_weight, "
    "Tensor? gate_bias) -> (Tensor dx, Tensor d_norm_weight, Tensor d_gate_weight, Tensor d_gate_bias)",
    _like_backward,
)
flop_formulas.count_flops(flop_formulas.norm_gate, flop_formulas.norm_gate_backward)


class _Call(NamedTuple):
    """The arguments of an operator, and the values that every launch derives from them."""

    x: Tensor
    norm_weight: Tensor | None
    norm_eps: float
    factor: float
    gate_weight: Tensor | None
    gate_bias: Tensor | None

    @property
    def gate(self) -> int:
        """0 without a gate, 1 for a number a row, 2 for a number a dim."""
        if self.gate_weight is None:
            return 0
        return 1 if self.gate_weight.shape[0] == 1 and self.x.shape[3] > 1 else 2

    @property
    def rows(self) -> int:
        return self.x.numel() // self.x.shape[3]

    @property
    def sizes(self) -> tuple[int | float, ...]:
        _, heads, length, _ = self.x.shape
        return heads, length, self.rows, self.norm_eps, self.factor

    @property
    def strides_of_weights(self) -> tuple[int, int, int, int]:
        """The strides of the norm's weight, of the gate (out and in), and of its bias."""
        norm = self.norm_weight.stride(0) if self.norm_weight is not None else 0
        gate = self.gate_weight.stride() if self.gate_weight is not None else (0, 0)
        return norm, gate[0], gate[1], self.gate_bias.stride(0) if self.gate_bias is not None else 0

    def tiles(self, products: bool) -> dict[str, int]:
        from mta_kernels.conv_attention.triton.launch import next_power_of_2

        block_d = max(16, next_power_of_2(self.x.shape[3]))
        if products:
            return {"BLOCK_ROWS": max(16, TILE_OF_PRODUCTS // block_d), "BLOCK_D": block_d}
        return {"BLOCK_ROWS": max(1, TILE // block_d), "BLOCK_D": block_d}

    def constants(self) -> dict[str, Any]:
        return {"HEAD_DIM": self.x.shape[3], "NORM": self.norm_weight is not None}


def run_forward(*arguments: Any) -> Tensor:
    """The operator's kernel, for the arguments of `norm_and_gate`."""
    from mta_kernels.conv_attention.triton.launch import call_signature, cdiv, launch
    from mta_kernels.conv_attention.triton.prepare import dot_precision
    from mta_kernels.multi_token_attention.norm_gate_kernels import _norm_gate_kernel

    call = _Call(*arguments)
    x, out = call.x, empty_like(call.x)
    weights = call.norm_weight, call.gate_weight, call.gate_bias
    tiles = call.tiles(call.gate == 2)
    with on_device_of(x):
        launch(
            _norm_gate_kernel, cdiv(call.rows, tiles["BLOCK_ROWS"]), call_signature(x, *weights, out),
            x, *weights, out, *x.stride(), *out.stride(), *call.strides_of_weights, *call.sizes,
            **call.constants(), GATE=call.gate, BIAS=call.gate_bias is not None, **tiles,
            BLOCK_K=min(tiles["BLOCK_D"], 32), PRECISION=dot_precision(x.dtype), num_warps=4, num_stages=2,
        )  # fmt: skip
    return out


def run_backward(x: Tensor, grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx and the gradients of the weights, empty where there is no weight."""
    call = _Call(x, *arguments)
    with on_device_of(x), without_autocast(x):
        if call.gate < 2:
            dx, sums = _backward_of_rows(call, grad)
            d_norm, d_gate, d_bias = sums[0, : x.shape[3]], sums[1, None, : x.shape[3]], sums[2, :1]
        else:
            # The gate's products are large, so PyTorch computes them; what remains is the backward of the norm alone.
            o, dz, direct = _backward_of_gate(call, grad)
            assert call.gate_weight is not None
            d_o = torch.addmm(direct, dz, call.gate_weight.to(x.dtype)).view(x.shape)
            d_gate, d_bias = dz.mT @ o, dz.sum(0, dtype=torch.float32)
            dx, sums = _backward_of_rows(call._replace(gate_weight=None, gate_bias=None), d_o)
            d_norm = sums[0, : x.shape[3]]

    def like(gradient: Tensor, weight: Tensor | None) -> Tensor:
        return new_empty(x, 0) if weight is None else gradient.to(weight.dtype, copy=True)

    return dx, like(d_norm, call.norm_weight), like(d_gate, call.gate_weight), like(d_bias, call.gate_bias)


def _backward_of_rows(call: _Call, grad: Tensor) -> tuple[Tensor, Tensor]:
    """dx and the sums `[3, D or more]` of the weights' gradients, float32, through a norm and a gate a row."""
    from mta_kernels.conv_attention.triton.launch import call_signature, cdiv, launch
    from mta_kernels.multi_token_attention.norm_gate_kernels import _norm_gate_backward_kernel

    x, dx = call.x, empty_like(call.x)
    weights = call.norm_weight, call.gate_weight, call.gate_bias
    block_d = call.tiles(False)["BLOCK_D"]
    block_rows = max(1, BACKWARD["tile"] // block_d)
    # The number of programs does not depend on the run: the order of the sums is fixed.
    programs = min(cdiv(call.rows, block_rows), BACKWARD["programs"] * sm_count(x.device))
    partial = empty(3, block_d, programs, dtype=torch.float32, device=x.device)
    norm_stride, _, gate_stride, _ = call.strides_of_weights
    launch(
        _norm_gate_backward_kernel, programs, call_signature(x, grad, *weights, dx),
        x, grad, *weights, dx, partial, *x.stride(), *grad.stride(), *dx.stride(), norm_stride, gate_stride,
        *call.sizes, **call.constants(), GATE=call.gate, BIAS=call.gate_bias is not None, BLOCK_ROWS=block_rows,
        BLOCK_D=block_d, STAGES=BACKWARD["stages"], num_warps=BACKWARD["num_warps"], num_stages=2,
    )  # fmt: skip
    return dx, partial.sum(-1)


def _backward_of_gate(call: _Call, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`o`, `dz` and `grad * sigmoid(z)` as `[rows, D]`, in x's dtype, for a gate a dim."""
    from mta_kernels.conv_attention.triton.launch import call_signature, cdiv, launch
    from mta_kernels.conv_attention.triton.prepare import dot_precision
    from mta_kernels.multi_token_attention.norm_gate_kernels import _gate_of_dims_backward_kernel

    x = call.x
    weights = call.norm_weight, call.gate_weight, call.gate_bias
    found = [empty(call.rows, x.shape[3], dtype=x.dtype, device=x.device) for _ in range(3)]
    tiles = call.tiles(True)
    launch(
        _gate_of_dims_backward_kernel, cdiv(call.rows, tiles["BLOCK_ROWS"]), call_signature(x, grad, *weights),
        x, grad, *weights, *found, *x.stride(), *grad.stride(), *call.strides_of_weights, *call.sizes,
        **call.constants(), BIAS=call.gate_bias is not None, **tiles,
        BLOCK_K=min(tiles["BLOCK_D"], 32), PRECISION=dot_precision(x.dtype), num_warps=4, num_stages=2,
    )  # fmt: skip
    return found[0], found[1], found[2]


register_with_backward(
    NORM_GATE, run_forward, NORM_GATE_BACKWARD, run_backward, "norm_and_gate",
    first=1, keeps=(), needs=(0, 1, 4, 5), of_backends=False,
)  # fmt: skip
