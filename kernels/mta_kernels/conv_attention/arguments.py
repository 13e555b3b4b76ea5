"""Checks of the arguments that every backend shares, and the padding rule of the convolution."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor

from mta_kernels.operation import PAGE_SIZES, format_value, key_padding
from mta_kernels.operator_gradients import check_no_tangents
from mta_kernels.torch_compile import statically_true
from mta_kernels.watchers import is_plain

MAY_BE_LEFT_OUT = (
    "q_history", "cu_seqlens", "block_table",
    "pre_conv", "pre_mix", "post_conv", "post_mix", "norm_weight", "gate_weight", "gate_bias",
)  # fmt: skip
MAX_SPLITS = 128
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_are_tensors(**arguments: object) -> None:
    """Raise TypeError for the first of these that is no dense tensor; None passes where it may be left out."""
    for name, given in arguments.items():
        if not isinstance(given, Tensor) and not (given is None and name in MAY_BE_LEFT_OUT):
            raise TypeError(f"{name} is {kind_of(given)}; expected a tensor, as torch.as_tensor makes one")
        if given is not None and (given.layout != torch.strided or given.is_nested):
            kind, makes = ("nested", "torch.nested.to_padded_tensor") if given.is_nested else ("sparse", "to_dense()")
            raise TypeError(f"{name} is a {kind} tensor; expected a dense one, as {makes} makes it")


def kind_of(x: object) -> str:
    """What it is, in words: a sentence does not print the numbers of a tuple of tensors."""
    kind = type(x).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def check_no_overlap(name: str, x: Tensor, instead: str) -> None:
    """Raise ValueError if elements of x, by its `name`, share memory, as expand() makes them: a kernel writes to x."""
    if not x.is_contiguous() and _overlaps(x):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and strides {x.stride()}, so that its places overlap, and it is "
            f"written in place; give {instead}"
        )


def _overlaps(x: Tensor) -> bool:
    sizes = [(stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1]
    if torch.compiler.is_compiling():  # which cannot sort unknown strides
        return any([statically_true(stride == 0) for stride, _ in sizes])
    reach = 0
    for stride, size in sorted(sizes):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def as_int(x: Any) -> Any:
    """A whole number of another library, such as numpy's, as Python's; anything else as it is, for the checks.

    A tensor is none: its number would wait for its device.
    """
    if isinstance(x, int | Tensor) or not hasattr(x, "__index__"):  # a compiler's are ints, and allow no other test
        return x
    try:
        return operator.index(x)
    except TypeError:  # of an array, or of numpy's True
        return x


def as_float(x: Any) -> Any:
    """A whole number, or one of another library such as numpy's, as Python's float; anything else as it is.

    So is a tensor, and what no float holds.
    """
    if isinstance(x, float | bool) or not isinstance(x, Real):
        return x
    try:
        return float(x)
    except OverflowError:
        return x


def check_scale(scale: object) -> None:
    """Raise RuntimeError if `scale` is a tensor with a tangent, which would be lost."""
    check_no_tangents("scale", "multiply q by it instead", scale)


def is_int(x: object) -> TypeGuard[int]:
    """Whether it is Python's or a compiler's whole number: True is an int of Python's, too."""
    return isinstance(x, int) and not isinstance(x, bool)


def check_count(name: str, count: int) -> None:
    """Raise ValueError unless `count`, by its name, is a whole number from 1 on."""
    if not is_int(count) or count < 1:
        raise ValueError(f"{name} is {format_value(count)}; expected a whole number from 1 on")


def check_floating_point(dtype: torch.dtype) -> None:
    """Raise TypeError unless `dtype` is one of `DTYPES`."""
    if dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype!r}; expected {_listed_dtypes()}")


def check_has_floating_point(name: str, x: Tensor) -> None:
    """Raise TypeError, by its `name`, unless x has one of `DTYPES`."""
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {x.dtype}; expected {_listed_dtypes()}")


def _listed_dtypes() -> str:
    return f"{', '.join(map(str, DTYPES[:-1]))} or {DTYPES[-1]}"


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q, k and v have four dimensions, none of them empty, and agree in dtype and device."""
    named = ("q", q), ("k", k), ("v", v)
    for name, tensor in named:
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; expected four dimensions [batch, heads, seq_len, head_dim]"
            )
    for name, tensor in named:
        if 0 in tensor.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; every dimension must be at least 1")
        check_has_floating_point(name, tensor)
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype} and q {q.dtype}; they must be the same")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q on {q.device}; move them to one device")


def check_explained(q: Tensor, k: Tensor, v: Tensor, *, decode: bool) -> None:
    """Raise ValueError or TypeError for q, k and v of no call; with `decode` they may be a window and pages."""
    check_tensors(q, k, v)
    check_values(k, v)
    if not decode:
        check_queries(q, k)
        return
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; head_dim must be the same")
    check_heads(q.shape[1], k.shape[1])


def check_values(k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless there is a value for each key, of as many numbers."""
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; they must be the same")


def check_queries(q: Tensor, k: Tensor) -> None:
    """Raise ValueError unless q may hold the queries of the last positions of k."""
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or q.shape[2] > k.shape[2]:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; batch and head_dim must be the same, "
            "and q has as many rows as k, or fewer: the last ones"
        )
    check_heads(q.shape[1], k.shape[1])


def check_heads(query_heads: int, key_heads: int) -> None:
    """Raise ValueError unless every KV head serves the same number of query heads."""
    if query_heads % key_heads:
        raise ValueError(
            f"{query_heads} query heads cannot share {key_heads} key heads: "
            "the number of query heads must be a multiple of the number of key heads"
        )


def check_weight(weight: Tensor, query_heads: int, q: Tensor, *, name: str = "weight", like: str = "q") -> None:
    """Raise unless `weight`, by its `name`, is `[query_heads, cq, ck]`, and its dtype and device are as q's.

    Its dtype may be float32 as well. `like` is the name of q.
    """
    if weight.dim() != 3 or weight.shape[0] != query_heads or 0 in weight.shape:
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}; expected [query heads, query taps, key taps] "
            f"with {query_heads} query heads and at least one tap each way"
        )
    check_like(name, weight, q, like)


def check_like(name: str, x: Tensor, q: Tensor, like: str = "q") -> None:
    """Raise unless x is on the device of q, whose name is `like`, and of its dtype or float32."""
    if x.dtype not in (q.dtype, torch.float32):
        or_float32 = "" if q.dtype == torch.float32 else ", or torch.float32"
        raise TypeError(f"{name} has dtype {x.dtype}; expected {q.dtype}, as {like}{or_float32}")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and {like} on {q.device}; move them to one device")


def row_range(rows: tuple[int, int] | None, query_rows: int) -> tuple[int, int]:
    """The first of these rows of q and one past the last, None being all; raises ValueError for what is no such two."""
    if rows is None:
        return 0, query_rows
    whole = [as_int(row) for row in rows] if isinstance(rows, tuple | list) else []
    if len(whole) != 2 or not all(map(is_int, whole)) or not 0 <= whole[0] < whole[1] <= query_rows:
        raise ValueError(f"rows is {rows!r}; expected (start, stop) with 0 <= start < stop <= {query_rows}")
    return whole[0], whole[1]


def rows_before(query_rows: int, key_rows: int, query_taps: int) -> int:
    """Queries before the first row of q that the convolution looks back on, when q holds the last positions of k."""
    return min(query_taps - 1, key_rows - query_rows)


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd may need a gradient of what is computed from these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def under_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of x; it does not support "meta"."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast gives x: its own if autocast is off or x is float64."""
    if under_autocast(x) and x.dtype in (torch.float16, torch.bfloat16, torch.float32):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def like_cast(x: Tensor) -> Tensor:
    """x for checks, in the dtype of autocast: if that is another, a tensor with the memory of one number."""
    dtype = autocast_dtype(x)
    return x if x.dtype == dtype else torch.empty((), dtype=dtype, device=x.device).expand(x.shape)


def cast_for_autocast(weight: Tensor, *others: Tensor | None) -> tuple:
    """Weight and others in the dtype of autocast; a weight in float32 stays as it is."""
    return cast_unless_float32(weight), *(None if x is None else x.to(autocast_dtype(x)) for x in others)


def cast_unless_float32(x: Any) -> Any:
    """A tensor in the dtype of autocast, unless it is float32; anything else as it is."""
    return x.to(autocast_dtype(x)) if isinstance(x, Tensor) and x.dtype != torch.float32 else x


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor, pad_key: str, convolutions: Mapping[str, Tensor | None], *,
    q_history: Tensor | None = None, cu_seqlens: Tensor | None = None, head_chunk: int | None = None,
) -> None:  # fmt: skip
    """Raise ValueError or TypeError, in one sentence, unless these fit each other; `convolutions` are by name."""
    check_tensors(q, k, v)
    check_values(k, v)
    check_queries(q, k)
    key_padding(1, pad_key)
    query_taps = 1
    for name, weight in convolutions.items():
        if weight is not None:
            check_weight(weight, q.shape[1], q, name=name)
            query_taps += weight.shape[1] - 1
    if cu_seqlens is not None:
        check_packing(cu_seqlens, q, k.shape[2], q_history)
    elif q_history is not None or q.shape[2] != k.shape[2]:
        check_history(q_history, q, k.shape[2], query_taps)
    if head_chunk is not None:
        check_head_chunk(head_chunk, q.shape[1] // k.shape[1])


def check_history(q_history: Tensor | None, q: Tensor, key_rows: int, query_taps: int) -> None:
    """Raise unless `q_history` is `[B, Hq, H, D]` with the queries before q that are needed; None if none are."""
    batch, heads, query_rows, head_dim = q.shape
    before = rows_before(query_rows, key_rows, query_taps)
    wanted = f"[{batch}, {heads}, {before} or more, {head_dim}], the queries just before q, oldest first"
    if q_history is None:
        if before:
            raise ValueError(
                f"q has {query_rows} rows and k {key_rows}, and the convolution looks back on "
                f"{query_taps - 1} queries: give q_history {wanted}"
            )
        return
    fits = q_history.dim() == 4 and q_history.shape[:2] == q.shape[:2] and q_history.shape[3] == head_dim
    if not fits or q_history.shape[2] < before:
        raise ValueError(f"q_history has shape {tuple(q_history.shape)}; expected {wanted}")
    if q_history.dtype != q.dtype or q_history.device != q.device:
        raise TypeError(
            f"q_history is {q_history.dtype} on {q_history.device} and q {q.dtype} on {q.device}; they must be the same"
        )


def check_packing(cu_seqlens: Tensor, q: Tensor, key_rows: int, q_history: Tensor | None) -> None:
    """Raise ValueError unless `cu_seqlens [S + 1]` divides the rows of q and k into documents.

    Its values are read on a CPU alone: on a GPU that would wait for the device.
    """
    batch, _, rows, _ = q.shape
    if q_history is not None:
        raise ValueError("cu_seqlens and q_history are both given; packed documents are whole: leave out q_history")
    if rows != key_rows:
        raise ValueError(
            f"cu_seqlens packs whole documents, and q has {rows} rows and k {key_rows}; give both the same"
        )
    if batch != 1:
        raise ValueError(
            f"cu_seqlens is given and q has batch {batch}; "
            "lay the documents end to end, q [1, heads, tokens of all documents, head_dim]"
        )
    fits = cu_seqlens.dim() == 1 and cu_seqlens.shape[0] > 1
    check_whole_numbers("cu_seqlens", cu_seqlens, fits, ("documents + 1",), q.device)
    if can_be_read(cu_seqlens):
        bounds = cu_seqlens.tolist()
        ordered = sorted(bounds)
        if bounds != ordered or bounds[0] != 0 or bounds[-1] != rows:
            raise ValueError(
                f"cu_seqlens goes from {bounds[0]} to {bounds[-1]}{', not in order' if bounds != ordered else ''}; "
                f"expected the bounds of the documents in order, from 0 to the {rows} rows of q"
            )


def documents_of(cu_seqlens: Tensor) -> list[slice]:
    """The rows of each document that has some, read on the host: for the references.

    Raises ValueError while a CUDA graph is captured. torch.compile breaks its graph here, which `fullgraph` refuses.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            msg="the reference reads cu_seqlens on the host; leave out fullgraph=True, or take a fused backend on a GPU"
        )
    elif cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "the reference reads cu_seqlens on the host, which a CUDA graph cannot capture; "
            'take a fused backend, as "auto" does, or call it outside of the graph'
        )
    return [slice(start, stop) for start, stop in pairwise(cu_seqlens.tolist()) if start < stop]


def can_be_read(x: Tensor) -> bool:
    """Whether reading x's numbers waits for no device; under a compiler or vmap, or if x is fake, it has none."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and is_plain(x)


def check_whole_numbers(
    name: str, x: Tensor, fits: bool, shape: tuple, device: torch.device,
    dtypes: Sequence[torch.dtype] = (torch.int32, torch.int64),
) -> None:  # fmt: skip
    """Raise ValueError unless x, whose shape `fits` the one expected, has one of these dtypes and is on the device."""
    if not fits or x.dtype not in dtypes or x.device != device:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, dtype {x.dtype}, on {x.device}; "
            f"expected [{', '.join(map(str, shape))}], {' or '.join(map(str, dtypes))}, on {device}"
        )


def check_head_chunk(head_chunk: int, group: int) -> None:
    """Raise ValueError unless `head_chunk` divides the `group` of heads of a KV head, or is a multiple of it."""
    if not is_int(head_chunk) or head_chunk < 1 or (group % head_chunk and head_chunk % group):
        raise ValueError(
            f"head_chunk is {format_value(head_chunk)}; expected a whole number that divides the {group} query heads "
            f"of a KV head, or a multiple of {group}"
        )


def head_parts(heads: int, kv_heads: int, head_chunk: int) -> list[tuple[slice, slice]]:
    """Query heads that are worked on together, and the KV heads that serve them."""
    group, chunk = heads // kv_heads, head_chunk or heads
    return [
        (slice(h, min(h + chunk, heads)), slice(h // group, (min(h + chunk, heads) - 1) // group + 1))
        for h in range(0, heads, chunk)
    ]


def check_block_table(block_table: Tensor, q_window: Tensor, k_cache: Tensor) -> None:
    """Raise ValueError unless `block_table` and the size of the cache's pages fit."""
    batch, page_size = q_window.shape[0], k_cache.shape[2]
    fits = block_table.dim() == 2 and block_table.shape[0] == batch and block_table.shape[1] > 0
    shape = batch, "pages a sequence"
    check_whole_numbers("block_table", block_table, fits, shape, q_window.device, (torch.int32,))
    if page_size not in PAGE_SIZES:
        raise ValueError(f"the cache has pages of {page_size} keys; expected one of {', '.join(map(str, PAGE_SIZES))}")


def check_splits(splits: int | str) -> None:
    """Raise ValueError unless `splits` is "auto" or a count from 1 to 128."""
    if splits != "auto" and not (is_int(splits) and 1 <= splits <= MAX_SPLITS):
        raise ValueError(f"splits is {format_value(splits)}; expected 'auto' or a whole number from 1 to {MAX_SPLITS}")
