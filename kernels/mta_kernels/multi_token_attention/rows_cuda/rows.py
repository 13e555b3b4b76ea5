"""Launches the row kernels: which plan a shape takes, how many blocks share the rows, and the kernels' arguments."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from mta_kernels import planned
from mta_kernels.allocation import empty
from mta_kernels.gpu_limits import Gpu, capability, gpu_of, shared_memory_limit, sm_count
from mta_kernels.multi_token_attention.rows_cuda.plan import (
    MOST_HEADS,
    PORTABLE,
    RowConstants,
    RowPlan,
    plan_on,
)
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import machine_code
from mta_kernels.nvrtc.structures import ELEMENTS, fields


class Matrix(ctypes.Structure):
    """`struct Matrix` of layout.cuh."""

    _fields_ = (("start", c_void_p), *fields(c_int64, "stride_row stride_column"), ("is_float", c_int))

    @classmethod
    def of(cls, mix: Tensor | None) -> Matrix:
        """The mixing `[H, H]`, or none."""
        return cls() if mix is None else cls(mix.data_ptr(), *mix.stride(), mix.dtype == torch.float32)


class Arguments(ctypes.Structure):
    """`struct Arguments` of layout.cuh."""

    _fields_ = (
        ("operands", c_void_p * 2), *fields(Matrix, "pre post"), ("logsumexp", c_void_p),
        *fields(c_int64, "sums_batch sums_head sums_row"), ("documents", c_void_p),
        *fields(c_int64, "documents_stride ld"),
        *fields(c_int, "rows all_rows first_position keys causal block clusters pitch stages"),
        *fields(c_void_p, "parts loss_scale"),
    )  # fmt: skip


def shape_unsupported(gpu: Gpu, dtype: torch.dtype, heads: int, keys: int, backward: bool) -> str | None:
    """Why a GPU has no plan for rows of up to `keys` columns of `heads` heads, or None."""
    if dtype not in ELEMENTS:
        return f"dtype {dtype} is not float16 or bfloat16"
    if heads > MOST_HEADS[backward]:
        return f"{heads} heads are more than the {MOST_HEADS[backward]} of the CUDA row kernels"
    if plan_on(*gpu, dtype, heads, keys, backward=backward) is None:
        return f"{keys} keys of {heads} heads do not fit into the shared memory of the blocks that could share a row"
    return None


def mix_rows(
    scores: Tensor, pre_mix: Tensor | None, post_mix: Tensor | None, logsumexp_out: Tensor, *, first_position: int,
    keys: int, causal: bool, documents: Tensor | None = None, block: int = 0, plan: RowPlan | None = None,
    clusters: int | None = None,
) -> None:  # fmt: skip
    """Put mixed probabilities in the place of a chunk's scores, and write each row's logsumexp.

    `scores [B, H, R, ld]` is contiguous, fp16 or bf16, at a multiple of 16 bytes, with `ld` a multiple of 8 from `keys`
    on. Row r is of position `first_position + r`. It sees the first `keys` columns, if `causal` those up to its
    position, and of `documents [2, N]` (int32: the first position of each one's document, and one past its last) its
    own. What it does not see may be NaN before and is zero after: in all columns, or with `block`, rows and columns
    that products read at a time, in all whole blocks that some row of its block sees.
    `pre_mix [H, H]` (out, in) mixes the scores, `post_mix [H, H]` (in, out) the probabilities; each may be None,
    float32 (then rounded) or of the scores' dtype.
    `logsumexp_out [B, H, R]` is float32 of any strides. `plan` and `clusters` override what would be chosen, for
    measurements. Raises ValueError where `shape_unsupported` has a reason, or for scores of another layout.
    """
    _run(
        scores, None, pre_mix, post_mix, logsumexp_out, first_position, keys, causal, documents, None, block, plan,
        clusters,
    )  # fmt: skip


def mix_rows_backward(
    scores: Tensor, grad_probabilities: Tensor, pre_mix: Tensor | None, post_mix: Tensor | None, logsumexp: Tensor, *,
    first_position: int, keys: int, causal: bool, documents: Tensor | None = None, loss_scale: Tensor | None = None,
    block: int = 0, plan: RowPlan | None = None, clusters: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """The backward of `mix_rows`, in place: gives the gradients `[H, H]` (float32) of both mixings, None where none is.

    `scores`, as `mix_rows` takes them, become the mixed probabilities; `grad_probabilities`, the gradients of those and
    laid out as the scores, become the gradients of the scores. They are times `loss_scale` (float32) of each sequence,
    or with documents of each position, which the mixings' are not. `logsumexp [B, H, R]` is what `mix_rows` wrote; the
    rest and errors are as there. The same call gives the same bits.
    """
    parts = _run(
        scores, grad_probabilities, pre_mix, post_mix, logsumexp, first_position, keys, causal, documents, loss_scale,
        block, plan, clusters,
    )  # fmt: skip
    assert parts is not None
    # Two sums, as results of an operator share no memory.
    dpre, dpost = (None if mix is None else x.sum(0) for mix, x in ((pre_mix, parts[:, 0]), (post_mix, parts[:, 1])))
    return dpre, dpost


def _run(
    scores: Tensor, gradients: Tensor | None, pre_mix: Tensor | None, post_mix: Tensor | None, logsumexp: Tensor,
    first_position: int, keys: int, causal: bool, documents: Tensor | None, loss_scale: Tensor | None,
    block: int, plan: RowPlan | None, clusters: int | None,
) -> Tensor | None:  # fmt: skip
    """One launch; gives the warps' parts of the gradients of both mixings, `[warps, 2, H, H]`, of a backward."""
    batch, heads, rows, ld = scores.shape
    device, backward = scores.device, gradients is not None
    mixed = (pre_mix is not None, post_mix is not None)
    if not rows * batch:
        return scores.new_zeros(1, 2, heads, heads, dtype=torch.float32) if backward else None
    plan = plan or choose_plan(device, scores.dtype, heads, keys, backward, mixed)
    if plan is None:
        raise ValueError(shape_unsupported(gpu_of(device), scores.dtype, heads, keys, backward))
    operands = [scores] if gradients is None else [scores, gradients]
    for x in operands:
        if not x.is_contiguous() or x.shape != scores.shape or ld % 8 or ld < keys or x.data_ptr() % 16:
            raise ValueError(
                f"stored scores are {list(x.shape)} with strides {x.stride()}; expected contiguous rows of a multiple "
                f"of 8 columns, {keys} or more, at a multiple of 16 bytes"
            )
    cluster, stride = plan.constants.cluster, (0 if documents is None else documents.stride(0))
    if documents is not None and documents.stride(1) != 1:
        documents = documents.contiguous()
        stride = documents.stride(0)
    clusters = min(batch * rows, clusters or clusters_at_once(plan, device))
    parts = None
    if backward:
        warps = clusters * cluster * plan.constants.warps
        parts = empty(warps, 2, heads, heads, dtype=torch.float32, device=device)
    arguments = Arguments(
        operands=(c_void_p * 2)(*(x.data_ptr() for x in operands)), pre=Matrix.of(pre_mix), post=Matrix.of(post_mix),
        logsumexp=logsumexp.data_ptr(), sums_batch=logsumexp.stride(0), sums_head=logsumexp.stride(1),
        sums_row=logsumexp.stride(2), documents=None if documents is None else documents.data_ptr(),
        documents_stride=stride, ld=ld, rows=rows, all_rows=batch * rows, first_position=first_position, keys=keys,
        causal=causal, block=block, clusters=clusters, pitch=plan.pitch, stages=plan.stages,
        parts=None if parts is None else parts.data_ptr(),
        loss_scale=None if loss_scale is None else loss_scale.data_ptr(),
    )  # fmt: skip
    compiled = kernel(plan.constants, device)
    blocks, threads = clusters * cluster, plan.constants.threads
    driver.launch(compiled, (blocks, 1), threads, plan.shared_memory, device.index, arguments)
    return parts


@functools.cache
def choose_plan(
    device: torch.device, dtype: torch.dtype, heads: int, keys: int, backward: bool, mixed: tuple[bool, bool]
) -> RowPlan | None:
    """`plan_on` a device."""
    return plan_on(*gpu_of(device), dtype, heads, keys, backward=backward, mixed=mixed)


@functools.cache
def kernel(constants: RowConstants, device: torch.device) -> Any:
    """The kernel on a device, compiled at the first call: seconds, unless the disk has it."""
    major = capability(device)[0]
    architecture = driver.architecture(device.index) + ("a" if major == 9 else "")
    name = "mix_rows_backward" if constants.backward else "mix_rows"
    code = machine_code(constants.source(architecture))
    found = driver.load(code, name, shared_memory_limit(device), device.index)
    if constants.cluster > PORTABLE and not planned.gpu_at(device.index):
        from cuda.bindings import driver as cuda

        allowed = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        with torch.cuda.device(device):
            driver.checked(cuda.cuFuncSetAttribute(cuda.CUfunction(found.value), allowed, 1))
    return found


@functools.cache
def clusters_at_once(plan: RowPlan, device: torch.device) -> int:
    """Clusters that run at the same time: where they take their rows in turn, more would come after the others."""
    constants = plan.constants
    if gpu := planned.gpu_at(device.index):
        shape = constants.cluster, constants.threads, plan.shared_memory
        return planned.clusters_at_once(gpu, *shape, constants.blocks)  # the compiler leaves registers for these
    loaded = kernel(constants, device)
    if constants.cluster > 1:
        return driver.clusters_at_once(loaded, constants.cluster, constants.threads, plan.shared_memory, device.index)
    from cuda.bindings import driver as cuda

    function = cuda.CUfunction(loaded.value)
    with torch.cuda.device(device):
        found = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, constants.threads, plan.shared_memory)
        return max(1, driver.checked(found) * sm_count(device))
