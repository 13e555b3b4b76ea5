"""Which CUDA kernels a call runs, as `stages` decides it, for `explain`; those that add up sums are not named."""

from __future__ import annotations

from torch import Tensor

from mta_kernels.gpu_limits import has_large_memory
from mta_kernels.multi_token_attention import stages
from mta_kernels.operation import Operation
from mta_kernels.score_chunks import chunk_rows, halo_rows

FORWARD = {"mix": ("mix_logits", "mix_values"), "heads": ("pre_heads", "post_heads")}
BACKWARD_HEADS = ("convolve_heads", "differentiate_logits")  # behind what makes probabilities


def of_forward(operation: Operation, q: Tensor, key_rows: int, documents: bool) -> tuple[str, ...]:
    """By name, in their order; none where Triton's kernels run alone."""
    gpu, (_, heads, _, head_dim) = stages.cuda_gpu(q.device), q.shape
    sequences, rows = _chunk(operation, q, key_rows, backward=False)
    by = stages.forward(
        operation, gpu, q.dtype, heads, head_dim, documents=documents, key_rows=key_rows,
        rows=rows + halo_rows(operation), sequences=sequences,
    )  # fmt: skip
    if by != "stages":
        return FORWARD[by]
    convolutions = [conv for conv in (operation.pre_conv, operation.post_conv) if conv]
    convolved = any(stages.convolves(conv, gpu, q.dtype) for conv in convolutions)
    return ("convolve_rows",) * convolved + ("mix_rows",) * _mixes_rows(operation, q, key_rows, backward=False)


def of_backward(operation: Operation, q: Tensor, key_rows: int) -> tuple[str, ...]:
    """By name, in their order; none where Triton's kernels run alone."""
    gpu, before, after = stages.cuda_gpu(q.device), operation.pre_conv, operation.post_conv
    by_heads = stages.heads_meet_backward(operation, gpu, q.dtype, q.shape[1])
    rebuilds = stages.rebuilds(operation, gpu, q.dtype, q.shape[1])
    forth = [conv for conv in (None if rebuilds else before, None if by_heads else after) if conv]
    convolved = any(stages.convolves(conv, gpu, q.dtype) for conv in forth)
    differentiated = any(stages.convolves(conv, gpu, q.dtype) for conv in (before, after) if conv)
    return (
        *(("convolve_rows",) * convolved),
        *((("rebuild_probabilities" if rebuilds else "mix_probabilities"), *BACKWARD_HEADS) if by_heads else ()),
        *(("mix_rows_backward",) * _mixes_rows(operation, q, key_rows, backward=True)),
        *(("convolution_gradients",) * differentiated),
    )


def _mixes_rows(operation: Operation, q: Tensor, key_rows: int, *, backward: bool) -> bool:
    """Whether CUDA's kernels mix rows of the first chunk, which has the fewest keys."""
    if operation.is_convolved:
        return False
    _, rows = _chunk(operation, q, key_rows, backward=backward)
    keys = key_rows - q.shape[2] + rows if operation.causal else key_rows
    return stages.mixes_rows(stages.cuda_gpu(q.device), q.dtype, q.shape[1], keys, backward=backward)


def _chunk(operation: Operation, q: Tensor, key_rows: int, *, backward: bool) -> tuple[int, int]:
    """Sequences and own rows of a pass's first chunk."""
    batch, heads, query_rows, _ = q.shape
    large = has_large_memory(q.device)
    sequences, rows = chunk_rows(
        operation, batch, heads, key_rows, q.element_size(), backward=backward, large=large
    )  # fmt: skip
    return sequences, min(rows, query_rows)
