"""Launches the row kernels: the plan of a shape, how many blocks share the rows, and the kernels' arguments."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mta_kernels import planned
from mta_kernels.allocation import empty
from mta_kernels.gpu_limits import Gpu, capability, gpu_of, shared_memory_limit, sm_count
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import Source, headers_in, machine_code
from mta_kernels.nvrtc.structures import ELEMENTS, fields

FOLDER = Path(__file__).parent
CLUSTERS = (1, 2, 4, 8, 16)  # blocks that share a row
PORTABLE = 8  # at most, unless a kernel allows more; an H100 has 16
MOST_HEADS = {False: 64, True: 32}  # forward, and backward, whose sums of all pairs of heads must fit into registers
# Stages, blocks an SM and warps that were fastest on an H200, best first: forward and backward.
MEASURED = {False: ((2, 3, 4), (1, 3, 7)), True: ((2, 3, 4), (3, 1, 11))}
RESERVED = 1024  # bytes of shared memory that each block needs besides its own
THREADS_AN_SM = 1536  # of sm_86 to sm_120; others have 2048
MOST_BLOCKS = 16  # an SM


@dataclass(frozen=True)
class RowConstants:
    """The constants of a kernel.

    `bulk` lets the copy engine load the rows; `blocks` an SM bounds the registers of a thread.
    """

    dtype: torch.dtype
    heads: int
    backward: bool
    mixed_before: bool
    mixed_after: bool
    bulk: bool
    cluster: int
    warps: int
    blocks: int

    @property
    def threads(self) -> int:
        return 32 * (self.warps + self.bulk)

    @functools.cached_property
    def fixed_bytes(self) -> int:
        """Bytes of shared memory before the stages, as layout.cuh lays them out."""
        padded = -(-self.heads // 16) * 16
        pairs = (self.warps + 2 * self.cluster) * padded * 8
        return -(-(112 + 1024 + 2 * padded * (2 * padded + 16) + pairs) // 128) * 128

    @property
    def kept(self) -> bool:
        """Whether a forward keeps exponentials: over any reference they fit the range of bfloat16, not of float16."""
        return self.bulk and not self.backward and self.dtype == torch.bfloat16 and self.heads <= 32

    def source(self, architecture: str) -> Source:
        squares = -(-self.heads // 16)
        tiles = 2 if self.backward else 4
        if self.threads * self.blocks > 540:  # registers
            tiles //= 2
        tiles = max(1, tiles // squares)
        constants = {
            "ELEMENT": ELEMENTS[self.dtype], "HEADS": self.heads, "CLUSTER": self.cluster, "WARPS": self.warps,
            "BULK": int(self.bulk), "PRE_MIX": int(self.mixed_before), "POST_MIX": int(self.mixed_after),
            "OPERANDS": 1 + self.backward, "BLOCKS": self.blocks, "TILES": tiles, "FIXED_BYTES": self.fixed_bytes,
            "KEEP": int(self.kept),
        }  # fmt: skip
        path = FOLDER / ("backward.cu" if self.backward else "forward.cu")
        return Source(path, architecture, constants, headers_in(FOLDER))


@dataclass(frozen=True)
class RowPlan:
    """Constants, the columns of a row that fit a block, and how many rows it has at a time."""

    constants: RowConstants
    segment: int
    stages: int

    @property
    def pitch(self) -> int:
        """Bytes of a head's columns in shared memory: odd units of 16, so that no banks conflict."""
        return 2 * self.segment + 16

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes of a block."""
        constants = self.constants
        return constants.fixed_bytes + self.stages * (1 + constants.backward) * constants.heads * self.pitch

    def blocks_an_sm(self, shared_memory: int) -> int:
        """Blocks that an SM runs at once, with so much shared memory for a block and `RESERVED` more for an SM."""
        room = (shared_memory + RESERVED) // (self.shared_memory + RESERVED)
        return max(0, min(room, MOST_BLOCKS, THREADS_AN_SM // self.constants.threads))


def plan_on(
    capability: tuple[int, int], shared_memory: int, dtype: torch.dtype, heads: int, keys: int, *, backward: bool,
    mixed: tuple[bool, bool] = (True, True),
) -> RowPlan | None:  # fmt: skip
    """The plan for rows of up to `keys` columns, or None if they do not fit into the shared memory of such a GPU.

    A block may have `shared_memory` bytes. `mixed` is whether there are mixings before and after the softmax.
    """
    for plan in _plans(capability, dtype, heads, keys, backward, mixed):
        if plan.blocks_an_sm(shared_memory) >= plan.constants.blocks:
            return plan
    return None


def _plans(
    capability: tuple[int, int], dtype: torch.dtype, heads: int, keys: int, backward: bool, mixed: tuple[bool, bool]
) -> Iterator[RowPlan]:
    """Candidate plans, the best first.

    Loads of rows overlap with computation, several blocks an SM keep its memory busy, and blocks of small clusters wait
    less for each other.
    """
    wide = backward and heads > 16  # whose sums take 64 registers of each thread
    clusters = [x for x in CLUSTERS if x == 1 or 9 <= capability[0] < (12 if x <= PORTABLE else 10)]
    if capability[0] >= 9 and heads <= 16:
        for stages, blocks, warps in MEASURED[backward]:
            for cluster in clusters:
                constants = RowConstants(dtype, heads, backward, *mixed, True, cluster, warps, blocks)
                yield RowPlan(constants, segment_of(keys, cluster), stages)
    for blocks in (2, 1) if wide else (3, 2, 1):
        for cluster in clusters:
            segment = segment_of(keys, cluster)
            warps = warps_of(segment, heads, blocks, wide)
            constants = RowConstants(dtype, heads, backward, *mixed, capability[0] >= 9, cluster, warps, blocks)
            yield RowPlan(constants, segment, 1)


def segment_of(keys: int, cluster: int) -> int:
    """Columns of a row that each block of a cluster has, in whole units of 64."""
    return -(-(-(-keys // 8) * 8) // (64 * cluster)) * 64


def warps_of(segment: int, heads: int, blocks: int, wide: bool) -> int:
    """Warps that compute: enough that each has about 128 columns of 16 heads, or more."""
    wanted = segment * -(-heads // 16) // 128
    most = 4 if blocks == 3 else 8
    if wide:  # each quarter of an SM has the registers of two of its warps, the copying one among them
        most = 3 if blocks == 2 else 7
    return next((warps for warps in (8, 7, 4, 3, 2) if warps <= min(most, wanted)), 1)


class Matrix(ctypes.Structure):
    """`struct Matrix` of layout.cuh."""

    _fields_ = (("start", c_void_p), *fields(c_int64, "stride_row stride_column"), ("is_float", c_int))

    @classmethod
    def of(cls, mix: Tensor | None) -> Matrix:
        """The mixing `[H, H]`, or none."""
        return cls() if mix is None else cls(mix.data_ptr(), *mix.stride(), mix.dtype == torch.float32)


class RowArguments(ctypes.Structure):
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
    """Replace a chunk's scores by mixed probabilities, and write each row's logsumexp.

    `scores [B, H, R, ld]` is contiguous, fp16 or bf16, at a multiple of 16 bytes, with `ld` a multiple of 8 from `keys`
    on. Row r has position `first_position + r`. It sees the first `keys` columns, with `causal` only up to its
    position, and with `documents [2, N]` (int32: for each position its document's first, and one past its last) only
    its document. Columns that it does not see may be NaN before and are zero after. These zeros go to all columns; with
    `block`, the rows and columns that products read at a time, to all whole blocks that some row of its block sees.
    `pre_mix [H, H]` (out, in) mixes the scores, `post_mix [H, H]` (in, out) the probabilities; each may be None,
    float32 (then rounded) or of the scores' dtype.
    `logsumexp_out [B, H, R]` is float32 of any strides. `plan` and `clusters` override the chosen ones, for
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
    """The backward of `mix_rows`, in place: returns the gradients `[H, H]` (float32) of both mixings, or None for none.

    `scores`, as `mix_rows` takes them, become the mixed probabilities. `grad_probabilities`, their gradients in the
    same layout, become the gradients of the scores. They are times `loss_scale` (float32) of each sequence, or with
    documents of each position; the mixings' gradients are not. `logsumexp [B, H, R]` is the result of `mix_rows`; the
    other arguments and errors are as there. The same call gives the same bits.
    """
    parts = _run(
        scores, grad_probabilities, pre_mix, post_mix, logsumexp, first_position, keys, causal, documents, loss_scale,
        block, plan, clusters,
    )  # fmt: skip
    assert parts is not None
    # Two sums, as results of an operator must not share memory.
    dpre, dpost = (None if mix is None else x.sum(0) for mix, x in ((pre_mix, parts[:, 0]), (post_mix, parts[:, 1])))
    return dpre, dpost


def _run(
    scores: Tensor, gradients: Tensor | None, pre_mix: Tensor | None, post_mix: Tensor | None, logsumexp: Tensor,
    first_position: int, keys: int, causal: bool, documents: Tensor | None, loss_scale: Tensor | None,
    block: int, plan: RowPlan | None, clusters: int | None,
) -> Tensor | None:  # fmt: skip
    """One launch; for a backward returns the warps' parts of both mixings' gradients, `[warps, 2, H, H]`."""
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
    arguments = RowArguments(
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
    """Clusters that run at the same time: each takes rows in turn, so more would only start after the others."""
    constants = plan.constants
    if gpu := planned.gpu_at(device.index):
        shape = constants.cluster, constants.threads, plan.shared_memory
        return planned.clusters_at_once(gpu, *shape, constants.blocks)  # the compiler leaves registers for so many
    loaded = kernel(constants, device)
    if constants.cluster > 1:
        return driver.clusters_at_once(loaded, constants.cluster, constants.threads, plan.shared_memory, device.index)
    from cuda.bindings import driver as cuda

    function = cuda.CUfunction(loaded.value)
    with torch.cuda.device(device):
        found = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, constants.threads, plan.shared_memory)
        return max(1, driver.checked(found) * sm_count(device))
