"""The public face of conv attention: one function, one module, and the question which backend would run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mta_kernels.conv_attention import repeated
from mta_kernels.conv_attention.arguments import (
    autocast_dtype,
    cast_for_autocast,
    check_are_tensors,
    check_arguments,
    check_shared_cache,
    check_whole_sequence,
    key_padding,
    softmax_scale,
    under_autocast,
    wants_gradient,
)
from mta_kernels.conv_attention.cuda_decode.decode import decode_unsupported
from mta_kernels.conv_attention.hopper.forward import hopper_unsupported, launches_for
from mta_kernels.conv_attention.operators import (
    conv_attention_decode_op,
    conv_attention_op,
    launch_again,
    triton_unsupported,
)
from mta_kernels.conv_attention.reference import (
    check_decode_arguments,
    conv_attention_decode_reference,
    conv_attention_reference,
)
from mta_kernels.gpu_limits import absent, capability
from mta_kernels.torch_compile import asked_once, known

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Caches = tuple[Tensor, Tensor]  # of keys and of values
BACKENDS = ("reference", "triton", "hopper", "cuda")
FUSED_BACKENDS = ("hopper", "triton")  # that "auto" takes, the faster first
# Where up to so many query heads share a KV head, Triton's decode is faster than CUDA's on short caches, if the copy
# engine reads them: up to so many keys for each number of a row, of all sequences and KV heads, and times the heads
# that share one (measured on an H200: decode-auto.csv).
FEW_SHARING, FEW_KEYS = 8, 4096


@dataclass(frozen=True)
class Choice:
    """The backend that a call takes, and why."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def unsupported(
    backend: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    query_taps: int,
    key_taps: int,
    backward: bool = False,
) -> str | None:
    """Why `backend` cannot run conv attention with these on this machine, or None if it can.

    `device` is a torch device or its type, "cuda" or "cpu"; `backward` is whether gradients are wanted as well. For
    "cuda" the answer is about decode, which is all that it has. Raises ValueError for an unknown backend.
    """
    if backend == "reference":
        return None
    if backend in BACKENDS:
        shape: dict[str, Any] = {"device": device, "dtype": dtype, "head_dim": head_dim}
        shape |= {"query_taps": query_taps, "key_taps": key_taps}
        if backend == "hopper":
            return absent(device) or hopper_unsupported(**shape, backward=backward)
        return absent(device) or {"triton": triton_unsupported, "cuda": decode_unsupported}[backend](**shape)
    raise ValueError(f"backend is {backend!r}; expected 'auto' or one of {', '.join(map(repr, BACKENDS))}")


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    backend: str = "auto",
    decode: bool = False,
    group: ProcessGroup | None = None,
) -> Choice:
    """Which backend `conv_attention`, or `conv_attention_decode`, takes for these arguments, and why.

    No other argument changes the choice; autocast does, and whether a gradient may be asked for. Raises ValueError for
    an unknown backend, or a named one that cannot run them, and TypeError for what is no tensor.
    """
    check_are_tensors(q=q, k=k, v=v, weight=weight)
    shared = _over_ranks(group)
    backward = wants_gradient(q, k, v, weight)
    caches = (k, v) if decode else None
    if backend == "auto":
        return Choice(*_fastest(q, weight, autocast_dtype(q), caches, shared, backward))
    return Choice(_resolve(backend, q, weight, autocast_dtype(q), caches, shared, backward), "asked for")


def _over_ranks(group: ProcessGroup | None) -> bool:
    """Whether there are other ranks to work with; raises TypeError for what is no process group."""
    if group is None:
        return False
    from mta_kernels.conv_attention.context_parallel.agreement import check_group

    check_group(group)
    return group.size() > 1


def _fastest(
    q: Tensor, weight: Tensor, dtype: torch.dtype, caches: Caches | None, shared: bool, backward: bool
) -> tuple[str, str]:
    """The fastest backend that can run them in a dtype, or else the reference; and why. A decode has caches."""
    backends: tuple[str, ...] = FUSED_BACKENDS
    if caches is not None:
        backends = ("triton",) if shared else _decode_backends(q, caches, weight, dtype)
    reason: str | None = ""
    for backend in backends:
        reason = _why_not(backend, q, weight, dtype, caches, backward)
        if reason is None:
            return backend, "the fastest backend for these arguments"
    return "reference", f"{backends[-1]} cannot run this: {reason}"


def _decode_backends(q: Tensor, caches: Caches, weight: Tensor, dtype: torch.dtype) -> tuple[str, ...]:
    """The backends of a decode, the faster first: CUDA's where query heads share KV heads, but not for few keys."""
    k, _ = caches
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return ("cuda", "triton") if _lie_apart(caches) else ("triton",)
    keys = k.shape[0] * k.shape[1] * k.shape[2]
    few = group <= FEW_SHARING and known(keys * group <= FEW_KEYS * q.shape[3])
    # Of another number of batches these are pages, which the copy engine does not read.
    if few and known(k.shape[0] == q.shape[0]) and _why_not("triton", q, weight, dtype, caches) is None:
        from mta_kernels.conv_attention.triton.decode_plan import bulk_pays

        if bulk_pays(q.shape[3], group, dtype.itemsize, _capability(q.device)):
            return ("triton", "cuda")
    return ("cuda", "triton")


_capability = asked_once(capability)


def _lie_apart(caches: Caches) -> bool:
    """Whether the numbers of a key do; Triton 3.6 compiles such tiles to reads beyond a block's shared memory."""
    return any(known(x.stride(3) != 1) for x in caches)


def _why_not(
    backend: str, q: Tensor, weight: Tensor, dtype: torch.dtype, caches: Caches | None, backward: bool = False
) -> str | None:
    """Why the backend cannot run these, or None if it can."""
    if backend == "triton" and caches is not None and _lie_apart(caches):
        strides = " and ".join(str(tuple(x.stride())) for x in caches)
        return f"the caches have strides {strides}, and it needs the numbers of a key side by side (stride 1)"
    return unsupported(
        backend,
        device=q.device,
        dtype=dtype,
        head_dim=q.shape[-1],
        query_taps=weight.shape[-2],
        key_taps=weight.shape[-1],
        backward=backward,
    )


def _resolve(
    backend: str,
    q: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    caches: Caches | None,
    shared: bool,
    backward: bool = False,
) -> str:
    """The backend that runs these in a dtype; raises ValueError if it is a named one that cannot."""
    if backend == "auto":
        return _fastest(q, weight, dtype, caches, shared, backward)[0]
    if shared and caches is not None and backend in ("hopper", "cuda"):
        raise ValueError(
            f"backend {backend!r} does not share a cache over ranks: its kernels give no part of a softmax; "
            "use 'triton', or 'auto', which picks it"
        )
    if caches is not None and backend == "hopper":
        raise ValueError("backend 'hopper' has no decode; use 'cuda' or 'triton', or 'auto', which picks one")
    if caches is None and backend == "cuda":
        raise ValueError("backend 'cuda' has decode alone; use 'triton' or 'hopper', or 'auto', which picks one")
    if reason := _why_not(backend, q, weight, dtype, caches, backward):
        raise ValueError(f"backend {backend!r} cannot run this: {reason}; backend='auto' picks one that can")
    return backend


def conv_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor,
    *,
    q_history: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    pad_key: str = "both",
    head_chunk: int | None = None,
    backend: str = "auto",
    group: ProcessGroup | None = None,
) -> Tensor:
    """Multi-Token Attention (arXiv 2504.00927): attention whose scores are convolved before the softmax.

    `q [B, Hq, M, D]`, `k, v [B, Hkv, N, D]` with `Hq` a multiple of `Hkv` and `M <= N`, `weight [Hq, cq, ck]` in q's
    dtype or float32; returns `[B, Hq, M, D]`. `scale` is the factor on `q . k`, `1 / sqrt(D)` unless given;
    `pad_key` places the key taps ("both", "left" or "right"). Differentiable in every floating-point tensor: the fused
    backends once, by a backward; the reference in all ways, forward mode (`torch.func.jvp`) and twice.

    - With `M < N` (a chunk of a prompt) q holds the last `M` positions, and `q_history [B, Hq, H, D]` the queries just
      before them, oldest first, `H >= min(cq - 1, N - M)`; more are ignored.
    - `cu_seqlens [S + 1]`, int32 or int64, packs S documents into one row of tokens, `B = 1` and `M = N`: document s is
      rows `cu_seqlens[s]` to `cu_seqlens[s + 1]`, and neither attention nor convolution crosses a bound. Documents may
      be empty. It starts at 0 and ends at N, which is checked on a CPU alone: nothing waits for a GPU.
    - `head_chunk` query heads are worked on at a time, which bounds the memory; it divides the heads that share a KV
      head, or is a multiple of them. Hopper's forward has next to no scratch and works on all heads at once.
    - With `group` the ranks of a process group share the sequence: every rank of it calls this with its rows of q, k
      and v, as `context_parallel.shard_sequence` gives them, M = N, and gets its rows of the result. The weight is the
      same on all ranks, and its gradient the sum over them. Without q_history and cu_seqlens.

    `backend` is "auto" (`explain` says which that is), "reference", "triton" or "hopper" (H100 and H200; with
    gradients up to head dim 128); a named one never falls back. Under autocast q, k and v are cast to its
    dtype, and so is the weight unless it is float32; float64 stays as it is.
    A row depends on no later token and on no other document, for every finite input. Infinity or NaN in q, k, v or the
    weight leaves no row of the heads that read it defined, in any backend, nor a gradient; nor is a row defined whose
    `scale * q . k` overflows float32.
    Raises ValueError or TypeError, in one sentence, for arguments that do not fit or a backend that cannot run, and
    RuntimeError for a derivative that the backend does not have.
    """
    like: tuple | None = None  # an earlier call that this one may be like
    if q_history is None and cu_seqlens is None and head_chunk is None and group is None:
        like = causal, scale, pad_key, backend, False
        if (seen := repeated.earlier(q, k, v, weight, *like)) is not None:
            return launch_again(seen, q, k, v, weight)
    check_are_tensors(q=q, k=k, v=v, weight=weight, q_history=q_history, cu_seqlens=cu_seqlens)
    if under_autocast(q):
        weight, q, k, v, q_history = cast_for_autocast(weight, q, k, v, q_history)
        if like is not None:
            like = (*like[:-1], True)
            if (seen := repeated.earlier(q, k, v, weight, *like)) is not None:
                return launch_again(seen, q, k, v, weight)
    check_arguments(q, k, v, weight, pad_key, q_history=q_history, cu_seqlens=cu_seqlens, head_chunk=head_chunk)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "pad_key": pad_key, "head_chunk": head_chunk}
    shared = _over_ranks(group)
    backward = wants_gradient(q, k, v, weight, q_history)
    chosen = _resolve(backend, q, weight, q.dtype, None, shared, backward)
    if group is not None and shared:
        from mta_kernels.conv_attention.context_parallel.attention import conv_attention_over_ranks

        check_whole_sequence(q, k, q_history, cu_seqlens)
        return conv_attention_over_ranks(q, k, v, weight, group=group, backend=chosen, **options)
    options |= {"q_history": q_history, "cu_seqlens": cu_seqlens}
    if chosen == "reference":
        return conv_attention_reference(q, k, v, weight, **options)
    if like is not None and repeated.may_repeat(q, k, v, weight):
        numbers = causal, softmax_scale(scale, q.shape[3]), key_padding(weight.shape[2], pad_key)
        launches = _launches(chosen, q, k, v, weight, *numbers)
        if launches is not None:
            repeated.remember(q, k, v, weight, *like, launches=launches)
    return conv_attention_op(q, k, v, weight, backend=chosen, **options)


def _launches(
    backend: str, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, causal: bool, scale: float, pad: int
) -> repeated.Launches | None:
    """The forward for calls like this one, without operator and checks; None where the operator is all there is."""
    if backend == "hopper":
        return launches_for(q, k, v, weight, causal, scale, pad, False)
    from mta_kernels.conv_attention.triton import forward_again

    return forward_again.Launches(q, causal, scale, pad) if forward_again.can_launch_again() else None


def conv_attention_decode(
    q_window: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    weight: Tensor,
    *,
    lengths: Tensor,
    scale: float | None = None,
    pad_key: str = "both",
    backend: str = "auto",
    splits: int | str = "auto",
    block_table: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """One decode step: the newest row of causal conv attention, `[B, Hq, 1, D]`, from the KV cache.

    `q_window [B, Hq, W, D]` holds the last `W >= min(cq, tokens so far)` queries, oldest first, the new one
    last; `k_cache, v_cache [B, Hkv, S, D]`; `lengths [B]`, int32 or int64, counts each sequence's tokens, the new one
    included, and is at most `S`, which the reference checks on a CPU. A sequence of length 0 gives zeros. What lies in
    a cache beyond a length, and in q_window before a sequence's first token, may be anything, NaN included.
    With `block_table [B, max_pages]` int32 the caches are pages, `[pages, Hkv, page_size, D]` of 16 to 256 keys, and
    key `y` of sequence `b` is row `y % page_size` of page `block_table[b, y // page_size]`; entries past a sequence's
    length may be anything. `backend` is "auto" (`explain` says which that is), "reference", "triton" (caches whose last
    stride is 1) or "cuda" (any NVIDIA GPU from sm_80 on, float16 and bfloat16); `splits`, the programs that share the
    keys of a head, is for the last two. Derivatives through those two raise RuntimeError, the reference is
    differentiable; nothing waits for the device.
    With `group` the ranks of a process group share the caches: each holds the positions that
    `context_parallel.cache_positions` says, contiguous and not in pages; all else, and the result, is the same on every
    rank, and has no gradient.
    Raises ValueError or TypeError as `conv_attention`.
    """
    check_are_tensors(
        q_window=q_window, k_cache=k_cache, v_cache=v_cache, weight=weight, lengths=lengths, block_table=block_table
    )
    if under_autocast(q_window):
        weight, q_window, k_cache, v_cache = cast_for_autocast(weight, q_window, k_cache, v_cache)
    check_decode_arguments(q_window, k_cache, v_cache, weight, lengths, pad_key, block_table)
    options: dict[str, Any] = {"lengths": lengths, "scale": scale, "pad_key": pad_key}
    shared = _over_ranks(group)
    chosen = _resolve(backend, q_window, weight, q_window.dtype, (k_cache, v_cache), shared)
    if chosen == "reference" and splits != "auto":
        raise ValueError(f"splits is {splits!r}; the reference backend does not split the keys: leave it at 'auto'")
    if shared:
        from mta_kernels.conv_attention.context_parallel.decode import conv_attention_decode_over_ranks

        check_shared_cache(block_table, q_window, k_cache, v_cache, weight)
        options |= {"group": group, "backend": chosen, "splits": splits}
        return conv_attention_decode_over_ranks(q_window, k_cache, v_cache, weight, **options)
    options["block_table"] = block_table
    if chosen != "reference":
        return conv_attention_decode_op(q_window, k_cache, v_cache, weight, splits=splits, backend=chosen, **options)
    return conv_attention_decode_reference(q_window, k_cache, v_cache, weight, **options)


def identity_weight(
    heads: int,
    query_taps: int,
    key_taps: int,
    *,
    pad_key: str = "both",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """`[heads, query_taps, key_taps]`: the convolution that changes nothing, so that plain attention remains.

    Raises ValueError for counts that are no whole numbers from 1 on, and for an unknown pad_key.
    """
    for name, count in (("heads", heads), ("query_taps", query_taps), ("key_taps", key_taps)):
        if not hasattr(count, "__index__") or count < 1:  # not int alone: numpy's and a compiler's will do
            raise ValueError(f"{name} is {count!r}; expected a whole number from 1 on")
    weight = torch.zeros(heads, query_taps, key_taps, dtype=dtype, device=device)
    weight[:, query_taps - 1, key_padding(key_taps, pad_key)] = 1
    return weight


class ConvAttention(nn.Module):
    """`conv_attention` with its weight as a parameter `[heads, query_taps, key_taps]`, the identity at first.

    Takes `q [B, heads, M, D]`, `k, v [B, Hkv, N, D]`; options as those of `conv_attention`.
    """

    def __init__(
        self,
        heads: int,
        query_taps: int = 6,
        key_taps: int = 11,
        *,
        causal: bool = True,
        scale: float | None = None,
        pad_key: str = "both",
        head_chunk: int | None = None,
        backend: str = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.causal, self.scale, self.pad_key = causal, scale, pad_key
        self.head_chunk, self.backend = head_chunk, backend
        self.weight = nn.Parameter(
            identity_weight(heads, query_taps, key_taps, pad_key=pad_key, dtype=dtype, device=device)
        )

    def reset_parameters(self) -> None:
        """Make the convolution the identity again: plain attention."""
        with torch.no_grad():
            self.weight.copy_(identity_weight(*self.weight.shape, pad_key=self.pad_key))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        q_history: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        group: ProcessGroup | None = None,
    ) -> Tensor:
        """`[B, heads, M, D]`, as `conv_attention`.

        `q_history` is for a chunk of a prompt, `cu_seqlens` for documents, `group` for a sequence shared by ranks.
        """
        return conv_attention(
            q,
            k,
            v,
            self.weight,
            q_history=q_history,
            cu_seqlens=cu_seqlens,
            causal=self.causal,
            scale=self.scale,
            pad_key=self.pad_key,
            head_chunk=self.head_chunk,
            backend=self.backend,
            group=group,
        )

    def extra_repr(self) -> str:
        heads, query_taps, key_taps = self.weight.shape
        return (
            f"{heads}, {query_taps}, {key_taps}, causal={self.causal}, scale={self.scale}, "
            f"pad_key={self.pad_key!r}, head_chunk={self.head_chunk}, backend={self.backend!r}"
        )
