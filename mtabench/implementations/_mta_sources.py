"""What `mtabench inspect` compiles of the whole multi-token attention: stages, row kernels, decode, norm and gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mta_kernels.operation import Operation
from mtabench.problem.operations import make_operation
from mtabench.static.limits import Limits
from mtabench.static.shapes import Shape
from mtabench.static.sources import CudaKernel, Source, compiled, need_compiler, qkv_and_weight, spans

if TYPE_CHECKING:
    from torch import Tensor

    from mta_kernels.multi_token_attention.mixers import Mixers

MOST_TAPS = (8, 17)
INSPECTED_TOKENS = 1024  # a few chunks: the kernels of more are the same


def forward_source(shape: Shape, limits: Limits) -> None:
    """The forward of a layer that mixes heads alone, and of one with all steps."""
    from mta_kernels.multi_token_attention.triton.forward import mixed_attention_forward

    shape = _short(shape)
    for operation, (q, k, v), mixers in _layers(shape):
        mixed_attention_forward(operation, q, k, v, mixers, documents=spans(shape))


def backward_source(shape: Shape, limits: Limits) -> None:
    """The backward of the same; what the forward runs too is the forward's."""
    import torch

    from mta_kernels.multi_token_attention.triton.backward import mixed_attention_backward
    from mtabench.static.absent_gpu import tensor

    shape = _short(shape)
    for operation, (q, k, v), mixers in _layers(shape):
        logsumexp = tensor(*q.shape[:3], dtype=torch.float32)
        mixed_attention_backward(operation, q, k, v, mixers, logsumexp, q, documents=spans(shape))


def decode_source(shape: Shape, limits: Limits) -> None:
    """A decode step of the same, with as many splits as a call takes on its own."""
    import torch

    from mta_kernels.multi_token_attention.arguments import NormGate
    from mta_kernels.multi_token_attention.decode.state import DecodeState
    from mta_kernels.multi_token_attention.decode.triton import newest_row
    from mtabench.static.absent_gpu import tensor

    lengths, table = tensor(1, dtype=torch.int32), None
    for operation, (q, k, v), mixers in _layers(shape):
        if shape.page_size:
            pages = -(-shape.seq // shape.page_size)
            k = v = tensor(pages, shape.kv_heads, shape.page_size, shape.head_dim, dtype=q.dtype)
            table = tensor(1, pages, dtype=torch.int32)
        slots, state = shape.conv[0], None
        if operation.post_conv is not None:
            logits = tensor(1, shape.heads, slots, shape.seq, dtype=q.dtype)
            state = DecodeState(logits, tensor(1, shape.heads, slots, dtype=torch.float32), lengths)
        newest_row(operation, q[:, :, : shape.conv[0]], k, v, mixers, NormGate(), lengths, state, table)


def norm_gate_source(shape: Shape, limits: Limits) -> None:
    """Norm and gate behind the output, forward and backward: a gate a row, and a gate a number."""
    import torch

    from mta_kernels.multi_token_attention.norm_gate import run_backward, run_forward
    from mtabench.static.absent_gpu import tensor

    out, *_ = qkv_and_weight(_short(shape))
    norm = tensor(shape.head_dim, dtype=torch.float32)
    for numbers in (1, shape.head_dim):
        gate = tensor(numbers, shape.head_dim, dtype=torch.float32), tensor(numbers, dtype=torch.float32)
        run_forward(out, norm, 1e-5, 1.0, *gate)
        run_backward(out, out, norm, 1e-5, 1.0, *gate)


def rows_source(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """CUDA's row kernels, for rows of all tokens or, where these do not fit, of fewer. Raises SkippedError."""
    from mta_kernels.multi_token_attention.rows_cuda.plan import MOST_HEADS, plan_on
    from mta_kernels.nvrtc.structures import ELEMENTS
    from mtabench.problem.inputs import DTYPES

    dtype = DTYPES[shape.dtype]
    for backward, name in ((False, "mix_rows"), (True, "mix_rows_backward")):
        if dtype not in ELEMENTS or shape.heads > MOST_HEADS[backward]:
            continue
        gpu = limits.capability, limits.shared_per_block
        plans = (
            plan_on(*gpu, dtype, shape.heads, keys, backward=backward) for keys in (shape.seq, INSPECTED_TOKENS)
        )  # fmt: skip
        plan = next(filter(None, plans), None)
        if plan is None:
            continue
        need_compiler()
        constants = plan.constants
        code = compiled(constants.source(limits.target + ("a" if limits.capability[0] == 9 else "")))
        label = f"rows_cuda_{'backward' if backward else 'forward'}"
        yield CudaKernel(name, code, constants.threads // 32, plan.shared_memory, label)


def bands_source(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """CUDA's convolution kernels of a layer with all steps. Raises SkippedError."""
    from mta_kernels.multi_token_attention.bands_cuda import plan
    from mta_kernels.nvrtc.structures import ELEMENTS
    from mtabench.problem.inputs import DTYPES

    dtype = DTYPES[shape.dtype]
    if dtype not in ELEMENTS or _too_many_taps(shape):
        return
    need_compiler()
    conv = shape.operation.conv
    for gradients, name in ((False, "convolve_rows"), (True, "convolution_gradients")):
        sizes = plan.GRADIENTS if gradients else plan.CONVOLVE
        constants = plan.BandConstants(gradients, dtype, conv, gradients, shape.causal, shape.packed, sizes)
        code = compiled(constants.source(limits.target + ("a" if limits.capability[0] == 9 else "")))
        yield CudaKernel(name, code, plan.THREADS // 32, constants.shared_memory)


def heads_source(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """CUDA's kernels of a layer with all steps in which heads meet. Raises SkippedError."""
    from mta_kernels.multi_token_attention.heads_cuda import forward, heads, plan
    from mtabench.problem.inputs import DTYPES

    dtype, conv, packed = DTYPES[shape.dtype], shape.operation.conv, shape.packed
    target = limits.target + ("a" if limits.capability[0] == 9 else "")
    for name in plan.WALKS:
        if heads.shape_unsupported(limits.shared_per_block, dtype, shape.heads, {name: conv}) is not None:
            continue
        need_compiler()
        walk = plan.walk_sizes(name, limits.capability)
        constants = plan.WalkConstants(name, dtype, shape.heads, conv, shape.causal, packed, walk)
        code = compiled(constants.source(target))
        kernel, *merge = heads.KERNELS[name]
        yield CudaKernel(kernel, code, constants.threads // 32, constants.shared_memory)
        yield from (
            CudaKernel(of_pieces, code, forward.MERGE_THREADS // 32, forward.MERGE_BYTES) for of_pieces in merge
        )
    if heads.shape_unsupported(limits.shared_per_block, dtype, shape.heads, {"heads": conv}) is not None:
        return
    for name, sizes in plan.TILES.items():
        tiles = plan.TileConstants(name, dtype, shape.heads, shape.causal, packed, sizes)
        yield CudaKernel(heads.KERNELS[name][0], compiled(tiles.source(target)), 1, tiles.shared_memory)


def mix_source(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """Hopper's kernels of the forward of a layer that mixes heads alone. Raises SkippedError."""
    from mta_kernels.multi_token_attention.mix_cuda import logits, values_plan
    from mta_kernels.multi_token_attention.mix_cuda.shapes import shape_unsupported
    from mtabench.problem.inputs import DTYPES

    unsupported = shape_unsupported(DTYPES[shape.dtype], shape.heads, shape.head_dim)
    if limits.capability[0] != 9 or shape.packed or unsupported:
        return
    need_compiler()
    kept = logits.constants_for(shape.heads, shape.head_dim)
    code = compiled(kept.source)
    yield CudaKernel("mix_logits", code, logits.THREADS // 32, kept.shared_memory)
    yield CudaKernel("finish_logits", code, logits.FINISH_THREADS // 32, 0)
    values = values_plan.constants_for(shape.heads, shape.head_dim)
    yield CudaKernel("mix_values", compiled(values.source), values_plan.THREADS // 32, values.shared_memory)


def decode_cuda_source(shape: Shape, limits: Limits) -> Iterator[CudaKernel]:
    """CUDA's kernels of a decode step of a layer with all steps. Raises SkippedError."""
    from mta_kernels.multi_token_attention.decode_cuda.plan import (
        MERGE_THREADS,
        SHARED_BYTES,
        StepConstants,
        heads_unsupported,
    )
    from mtabench.problem.inputs import DTYPES

    operation, dtype = shape.operation, DTYPES[shape.dtype]
    if limits.shared_per_block < SHARED_BYTES:
        return
    if heads_unsupported(operation, dtype, shape.heads, shape.kv_heads, shape.head_dim):
        return
    need_compiler()
    conv = operation.conv
    constants = StepConstants(
        dtype, shape.heads, shape.head_dim, shape.page_size > 0, conv, True, conv, True, norm=True, gate=1
    )  # fmt: skip
    for name in ("keys", "values", "merge"):
        threads = MERGE_THREADS if name == "merge" else constants.threads
        code = compiled(constants.source(name, limits.target))
        yield CudaKernel(f"mta_decode_{name}", code, threads // 32, constants.bytes_of(name), f"decode_cuda_{name}")


def _too_many_taps(shape: Shape) -> bool:
    return any(taps > most for taps, most in zip(shape.conv, MOST_TAPS, strict=True))


def _short(shape: Shape) -> Shape:
    return replace(shape, seq=min(shape.seq, INSPECTED_TOKENS))


def _layers(shape: Shape) -> Iterator[tuple[Operation, tuple[Tensor, Tensor, Tensor], Mixers]]:
    """The operation, the tensors and the mixers of both layers of a model, without memory."""
    from mta_kernels.multi_token_attention.mixers import Mixers
    from mtabench.static.absent_gpu import tensor

    if _too_many_taps(shape):
        return
    *qkv, taps = qkv_and_weight(shape)
    mix = tensor(shape.heads, shape.heads, dtype=taps.dtype)
    for conv, mixers in ((None, Mixers(None, mix, None, mix)), (shape.conv, Mixers(taps, mix, taps, mix))):
        operation = make_operation(conv, "heads", conv, heads=shape.heads, head_dim=shape.head_dim, causal=shape.causal)
        yield operation, (qkv[0], qkv[1], qkv[2]), mixers


SOURCES = (
    Source("mta_forward", forward_source, (
        "score_product", "mix_rows", "mix_heads", "convolution", "row_product",
    ), order=70),
    Source("mta_backward", backward_source, (
        "mix_rows", "mix_rows_backward", "mix_heads", "row_product", "transposed_product", "taps_gradient",
    ), order=80),
    Source("mta_decode", decode_source, (
        "mta_decode_convolved", "mta_decode_early", "mta_decode_logits",
        "mta_decode_values", "mta_decode_merge",
    ), order=90),
    Source("mta_norm_gate", norm_gate_source, (
        "norm_gate", "norm_gate_backward", "gate_of_dims_backward",
    ), order=91),
    Source("mta_rows_cuda", rows_source, ("rows_cuda_forward", "rows_cuda_backward"), order=92),
    Source("mta_mix_cuda", mix_source, ("mix_logits", "finish_logits", "mix_values"), order=94),
    Source("mta_bands_cuda", bands_source, ("convolve_rows", "convolution_gradients"), order=95),
    Source("mta_heads_cuda", heads_source, (
        "pre_heads", "merge_pieces", "post_heads", "rebuild_probabilities", "mix_probabilities", "convolve_heads",
        "differentiate_logits",
    ), order=96),
    Source("mta_decode_cuda", decode_cuda_source, (
        "decode_cuda_keys", "decode_cuda_values", "decode_cuda_merge",
    ), order=97),
)  # fmt: skip
