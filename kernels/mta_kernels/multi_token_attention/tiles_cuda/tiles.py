"""Launches the tile kernels: which constants a shape takes, how blocks share the steps, and the kernels' arguments."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from mta_kernels.gpu_limits import Gpu, gpu_of, shared_memory_limit, sm_count
from mta_kernels.multi_token_attention.tiles_cuda.plan import MOST_HEADS, MOST_TAPS, TileConstants, plan_on
from mta_kernels.nvrtc import driver
from mta_kernels.nvrtc.compiler import machine_code
from mta_kernels.nvrtc.structures import ELEMENTS, fields
from mta_kernels.operation import ONE_TAP, Convolution

ZERO_BLOCK = 128  # rows and columns of the tiles in which a product reads what `post_tiles` stores
MERGE_THREADS = 128


class Numbers(ctypes.Structure):
    """`struct Numbers` of layout.cuh."""

    _fields_ = (("start", c_void_p), *fields(c_int64, "batch head row"))

    @classmethod
    def of(cls, x: Tensor) -> Numbers:
        return cls(x.data_ptr(), *x.stride()[:3])


class Arguments(ctypes.Structure):
    """`struct Arguments` of layout.cuh."""

    _fields_ = (
        ("input", Numbers), ("output", Numbers), *fields(c_void_p, "taps mix"), *fields(c_int, "mix_out mix_in"),
        ("documents", c_void_p), *fields(c_int, "batch rows_in rows above columns first_position first_query keys"),
        *fields(c_int, "row_blocks steps run zero_block"), *fields(c_void_p, "partial statistics logsumexp"),
        *fields(c_int64, "logsumexp_batch logsumexp_head logsumexp_row"),
    )  # fmt: skip


def shape_unsupported(
    gpu: Gpu, dtype: torch.dtype, heads: int, pre_conv: Convolution | None, post_conv: Convolution | None,
    *, documents: bool = False,
) -> str | None:  # fmt: skip
    """Why no plan for these heads and convolutions fits a GPU, or None."""
    if dtype not in ELEMENTS:
        return f"dtype {dtype} is not float16 or bfloat16"
    if heads > MOST_HEADS:
        return f"{heads} heads are more than the {MOST_HEADS} of the CUDA tile kernels"
    for post, conv in ((False, pre_conv or ONE_TAP), (True, post_conv or ONE_TAP)):
        if conv.query_taps > MOST_TAPS[0] or conv.key_taps > MOST_TAPS[1]:
            return f"{conv} taps are more than the {MOST_TAPS[0]}x{MOST_TAPS[1]} of the CUDA tile kernels"
        if plan_on(gpu.shared_memory, post, dtype, heads, conv, True, True, documents) is None:
            return f"{heads} heads with {conv} taps do not fit into this GPU's shared memory"
    return None


def pre_tiles(
    scores: Tensor, pre_conv: Tensor | None, pad: int, pre_mix: Tensor | None, logits: Tensor, logsumexp: Tensor, *,
    above: int, first_position: int, keys: int, causal: bool, first_query: int = 0, documents: Tensor | None = None,
    plan: TileConstants | None = None,
) -> Tensor:  # fmt: skip
    """Stored scores of a chunk of rows to logits, and the sums of each row's softmax.

    - `scores [B, H, R + above, ld]`, fp16 or bf16: scaled and rounded scores. What a row does not see may be anything,
      NaN too. Row 0 is of position `first_position - above`.
    - `pre_conv [H, cq, ck]` and `pad`, the columns of zeros left of column 0; None leaves the convolution out.
    - `pre_mix [H, H]` (out, in) or None.
    - `logits [B, H, R, ld]`, of the same dtype: written. Row r is of position `first_position + r`. Steps of 32 columns
      in which no row of a block of 32 sees a key are not written. What is written where a row sees no key is arbitrary.
    - `logsumexp [B, H, R]`, float32 of any strides: written, natural, over the visible keys; -inf where there are none.
    - `keys`: positions of keys, N. `ld >= keys` unless `causal`, and then more than the last row's position.
    - Row i sees key j if `j <= i` or not `causal`, and of `documents [2, N]` (int32, contiguous: for each position the
      first of its document and one past its last) its own. Rows before position `first_query`, from position `keys` on
      and above row 0 of `scores` count as zeros: `above` should be `cq - 1` where there are so many queries.

    All but `logsumexp` have contiguous columns and rows of a multiple of 8 numbers, at multiples of 16 bytes. Mixers of
    another dtype than the scores' are rounded to it. Returns what `post_tiles` takes for `statistics`: `[B, H, R, 2]`
    float32, a number r near the maximum of a row's visible logits, and the binary logarithm of the sum of
    `exp(logit - r)`, of the logits as stored. `plan` overrides what would be chosen, for measurements. Raises
    ValueError where `shape_unsupported` has a reason, or for a layout that does not fit. Nothing waits for the GPU; the
    same call gives the same bits.
    """
    arguments, constants, kept = _arguments(
        False, scores, pre_conv, pad, pre_mix, logits, above, first_position, first_query, keys, causal, documents, plan
    )
    batch, heads, rows, _ = logits.shape
    statistics = torch.empty(batch, heads, rows, 2, dtype=torch.float32, device=scores.device)
    if not logits.numel():
        return statistics
    most = _steps(constants, keys, rows, first_position, arguments.row_blocks - 1)  # the last block sees the most
    parts = (most - 1) // arguments.run + 2
    shape = parts, batch, arguments.row_blocks, constants.rows, heads, 2
    partial = torch.empty(shape, dtype=torch.float32, device=scores.device)
    arguments.partial, arguments.statistics = partial.data_ptr(), statistics.data_ptr()
    arguments.logsumexp = logsumexp.data_ptr()
    arguments.logsumexp_batch, arguments.logsumexp_head, arguments.logsumexp_row = logsumexp.stride()
    _launch("pre_tiles", arguments, constants, scores.device)
    merge, blocks = kernel("merge_statistics", constants, scores.device), -(-batch * heads * rows // MERGE_THREADS)
    driver.launch(merge, (blocks, 1), MERGE_THREADS, 0, scores.device.index, arguments)
    del kept
    return statistics


def post_tiles(
    logits: Tensor, statistics: Tensor, post_conv: Tensor | None, pad: int, post_mix: Tensor | None, out: Tensor, *,
    above: int, first_position: int, keys: int, causal: bool, first_query: int = 0, documents: Tensor | None = None,
    zero_block: int = ZERO_BLOCK, plan: TileConstants | None = None,
) -> None:  # fmt: skip
    """Logits of a chunk of rows to mixed probabilities, ready for the product with the values.

    `logits [B, H, R + above, ld]` and `statistics [B, H, R + above, 2]` (contiguous) are as `pre_tiles` gives them; row
    0 is of position `first_position - above`. `out [B, H, R, ld]` is written, row 0 of position `first_position`: what
    a row does not see is zero, from column 0 on, and at least to the last column that a product reads whose tiles are
    `zero_block` rows from row 0 on, and whole blocks of `zero_block` columns: of row r the columns before
    `(first_position + r // zero_block * zero_block + zero_block)` rounded up to `zero_block`; all columns unless
    `causal`. `post_mix [H, H]` is (in, out). All else, and errors, as `pre_tiles`.
    """
    mix = None if post_mix is None else post_mix.t()
    arguments, constants, kept = _arguments(
        True, logits, post_conv, pad, mix, out, above, first_position, first_query, keys, causal, documents, plan,
        zero_block,
    )  # fmt: skip
    if statistics.shape != (*logits.shape[:3], 2) or not statistics.is_contiguous():
        raise ValueError(f"statistics is {list(statistics.shape)}; expected {[*logits.shape[:3], 2]}, contiguous")
    arguments.statistics = statistics.data_ptr()
    if out.numel():
        _launch("post_tiles", arguments, constants, logits.device)
    del kept


def _arguments(
    post: bool, source: Tensor, weight: Tensor | None, pad: int, mix: Tensor | None, out: Tensor, above: int,
    first_position: int, first_query: int, keys: int, causal: bool, documents: Tensor | None,
    plan: TileConstants | None, zero_block: int = ZERO_BLOCK,
) -> tuple[Arguments, TileConstants, Any]:  # fmt: skip
    """What both kernels take, the constants, and tensors to keep until the launch."""
    batch, heads, rows, columns = out.shape
    device, dtype = source.device, source.dtype
    if source.shape[:3] != (batch, heads, rows + above):
        raise ValueError(f"{list(source.shape)} to {list(out.shape)} with {above} rows above; expected as many rows")
    for x in (source, out):
        if x.stride(3) != 1 or any(stride % 8 for stride in x.stride()[:3]) or x.shape[3] % 8 or x.data_ptr() % 16:
            raise ValueError(
                f"a tensor of {list(x.shape)} has strides {x.stride()}; expected contiguous rows of a multiple of 8 "
                "columns, at a multiple of 16 bytes"
            )
    most = min(keys, first_position + rows) if causal else keys
    if min(columns, source.shape[3]) < most:
        raise ValueError(f"rows of {min(columns, source.shape[3])} columns; expected {most} or more")
    conv = ONE_TAP if weight is None else Convolution(weight.shape[1], weight.shape[2], pad)
    if weight is None:
        weight = torch.ones(heads, 1, 1, dtype=dtype, device=device)
    weight = weight.to(dtype).contiguous()
    mix = None if mix is None else mix.to(dtype)
    plan = plan or choose_plan(device, post, dtype, heads, conv, mix is not None, causal, documents is not None)
    if plan is None:
        raise ValueError(shape_unsupported(gpu_of(device), dtype, heads, conv, conv, documents=documents is not None))
    arguments = Arguments(
        input=Numbers.of(source), output=Numbers.of(out), taps=weight.data_ptr(), batch=batch, rows_in=rows + above,
        rows=rows, above=above, columns=columns, first_position=first_position, first_query=first_query, keys=keys,
        row_blocks=-(-rows // plan.rows), zero_block=zero_block,
    )  # fmt: skip
    if mix is not None:
        arguments.mix, arguments.mix_out, arguments.mix_in = mix.data_ptr(), *mix.stride()
    if documents is not None:
        documents = documents.contiguous()
        arguments.documents = documents.data_ptr()
    arguments.steps = _all_steps(plan, keys, rows, first_position)
    total = batch * arguments.steps
    arguments.run = -(-total // max(1, min(total, sm_count(device))))
    return arguments, plan, (weight, mix, documents)


@functools.lru_cache(1024)
def _all_steps(constants: TileConstants, keys: int, rows: int, first_position: int) -> int:
    """Of all blocks of rows."""
    return sum(_steps(constants, keys, rows, first_position, i) for i in range(-(-rows // constants.rows)))


def _steps(constants: TileConstants, keys: int, rows: int, first_position: int, row_block: int) -> int:
    """Of a block of rows, as steps.cuh has it."""
    end = keys
    if constants.causal:
        last = min(row_block * constants.rows + constants.rows, rows) - 1
        end = max(min(end, first_position + last + 1), 1)
    return -(-end // constants.columns) + constants.post


def _launch(name: str, arguments: Arguments, constants: TileConstants, device: torch.device) -> None:
    blocks = -(-arguments.batch * arguments.steps // arguments.run)
    compiled = kernel(name, constants, device)
    driver.launch(compiled, (blocks, 1), constants.threads, constants.shared_memory, device.index, arguments)


@functools.cache
def choose_plan(
    device: torch.device, post: bool, dtype: torch.dtype, heads: int, conv: Convolution, mix: bool, causal: bool,
    documents: bool,
) -> TileConstants | None:  # fmt: skip
    """`plan_on` a device."""
    return plan_on(shared_memory_limit(device), post, dtype, heads, conv, mix, causal, documents)


@functools.cache
def kernel(name: str, constants: TileConstants, device: torch.device) -> Any:
    """A kernel on a device, compiled at the first call: seconds, unless the disk has it."""
    code = machine_code(constants.source(driver.architecture(device.index)))
    return driver.load(code, name, constants.shared_memory, device.index)
