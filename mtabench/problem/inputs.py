"""The tensors of a case, drawn from a seed: the same queries, keys and values for all implementations of a shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mta_kernels.operation import Convolution, HeadMix
from mtabench.problem.axes import MAX_QUERY_TAPS
from mtabench.problem.case import Case

if TYPE_CHECKING:
    from mta_kernels.multi_token_attention import DecodeState

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
WEIGHT_SCALE, MIX_SCALE = 0.3, 0.2
NORM_SCALE, GATE_SCALE = 0.1, 0.2
FINISHERS = ("norm_weight", "gate_weight", "gate_bias")  # one for all heads
MIXERS = ("weight", "pre_mix", "post_conv", "post_mix", *FINISHERS)
SEED = 20504


@dataclass(frozen=True, slots=True)
class Inputs:
    """Forward and backward: `q [B, Hq, N, D]`, `k, v [B, Hkv, N, D]`.

    The mixers are None where the operation has no such step. Convolutions: `weight [Hq, cq, ck]` of the scores and
    `post_conv` of the probabilities. Mixings of heads: `pre_mix`, `post_mix`, `[Hq, Hq]` or of groups `[G, c, c]`. Of
    each head's output: `norm_weight [D]`, and a gate, `gate_weight [1, D]` or `[D, D]` with `gate_bias [1]` or `[D]`.

    Decode: `q` is the window `[B, Hq, W, D]`, `k` and `v` the caches, `lengths [B]` int32. `state` is what the step
    before left for the convolution of probabilities. With a `block_table [B, pages of a sequence]` int32 the caches are
    pages `[pages, Hkv, page size, D]`. `dout`, shaped as `q`, exists in backward alone, where the others require
    gradients. `seed` drew them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor | None = None
    dout: Tensor | None = None
    lengths: Tensor | None = None
    pre_mix: Tensor | None = None
    post_conv: Tensor | None = None
    post_mix: Tensor | None = None
    state: DecodeState | None = None
    norm_weight: Tensor | None = None
    gate_weight: Tensor | None = None
    gate_bias: Tensor | None = None
    block_table: Tensor | None = None
    seed: int = SEED
    _copies: list[Inputs] = field(default_factory=list, init=False, repr=False, compare=False)
    _stacks: list[Inputs] = field(default_factory=list, init=False, repr=False, compare=False)
    _paged: dict[int, Inputs] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def differentiable(self) -> dict[str, Tensor]:
        """What gradients are taken of, by name."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.mixers}

    @property
    def mixers(self) -> dict[str, Tensor]:
        """The convolutions, mixings, norm and gate that there are, by name."""
        return {name: tensor for name in MIXERS if (tensor := getattr(self, name)) is not None}

    def copies(self, count: int) -> list[Inputs]:
        """The same values elsewhere in memory, as far as a decode step reads them in bulk: keys and values.

        Each call gives the same copies, so that many cells of a shape need no more memory than one. They are parts of
        one tensor, which a single kernel changes.
        """
        if (more := count - len(self._copies)) > 0:
            k, v = (x.expand(more, *x.shape).clone() for x in (self.k, self.v))
            self._stacks.append(replace(self, k=k, v=v))
            self._copies.extend(replace(self, k=of_k, v=of_v) for of_k, of_v in zip(k, v, strict=True))
        return self._copies[:count]

    def given_to(self, case: Case) -> Inputs:
        """The inputs of a case's implementation: these, or with the same keys and values in pages of its size.

        Each call gives the same pages, which `refresh` and `flip` keep equal to the caches here.
        """
        size = case.page_size
        if size is None or self.block_table is not None:
            return self
        if size not in self._paged:
            paged = self._in_pages(size)
            self._fill_pages(paged)
            self._paged[size] = paged.with_state()
        return self._paged[size]

    @property
    def elsewhere(self) -> dict[str, Tensor]:
        """The copied and paged caches and block tables that were made of these inputs, by name."""
        return {
            name + words: tensor
            for words, x in self._everywhere()
            for name, tensor in (("k", x.k), ("v", x.v), ("block_table", x.block_table))
            if words and tensor is not None
        }

    def _in_pages(self, size: int) -> Inputs:
        """Room for the caches in pages; page 0 is no sequence's, so that no kernel finds keys without the table."""
        batch, heads, keys, head_dim = self.k.shape
        of_sequence = -(-keys // size)
        table = torch.empty(batch, of_sequence, dtype=torch.int32, device=self.k.device)
        k, v = (x.new_empty(1 + batch * of_sequence, heads, size, head_dim) for x in (self.k, self.v))
        return replace(self, k=k, v=v, block_table=table)

    def _fill_pages(self, paged: Inputs) -> None:
        """Scatter the caches over pages, in an order drawn from the seed; what no sequence has is NaN."""
        table, size = paged.block_table, paged.k.shape[2]
        assert table is not None
        generator = torch.Generator().manual_seed(self.seed)
        unnoticed(table).copy_(1 + torch.randperm(table.numel(), generator=generator).view_as(table))
        whole, rest = divmod(self.k.shape[2], size)
        for cache, x in ((unnoticed(paged.k), self.k), (unnoticed(paged.v), self.v)):
            cache.fill_(float("nan"))
            cache[table[:, :whole].long()] = x[:, :, : whole * size].unflatten(2, (whole, size)).transpose(1, 2)
            if rest:
                cache[table[:, -1].long(), :, :rest] = x[:, :, whole * size :]

    def with_state(self) -> Inputs:
        """The same with the state of a decode step, made of the tokens before the newest, where it needs one."""
        if self.lengths is None or self.post_conv is None:
            return self
        return replace(self, state=self._state_before())

    def refresh(self) -> None:
        """Remake copies, state and pages, if any, from the other inputs as they are now, at the same addresses."""
        for stack in self._stacks:
            unnoticed(stack.k).copy_(self.k)
            unnoticed(stack.v).copy_(self.v)
        for paged in self._paged.values():
            self._fill_pages(paged)
            paged.refresh()
        if self.state is not None:
            now = self._state_before()
            for name in ("logits", "logsumexp", "lengths"):
                getattr(self.state, name).copy_(getattr(now, name))

    def _state_before(self) -> DecodeState:
        from mta_kernels.multi_token_attention import DecodeState, prefill_state

        assert self.lengths is not None
        assert self.post_conv is not None
        if self.q.shape[2] == 1:  # the newest is the first, or no row looks back
            keys = self.k.shape[2] * (1 if self.block_table is None else self.block_table.shape[1])
            size = (*self.q.shape[:2], self.post_conv.shape[1], keys)
            return DecodeState.empty(*size, dtype=self.q.dtype, device=self.q.device)
        return prefill_state(
            self.q[:, :, :-1], self.k, lengths=self.lengths - 1, post_conv=self.post_conv, pre_conv=self.weight,
            pre_mix=self.pre_mix, block_table=self.block_table,
        )  # fmt: skip

    def flip(
        self, keys: Tensor | int | None = None, values: Tensor | int | None = None, dout: Tensor | int | None = None
    ) -> None:  # fmt: skip
        """Change signs of columns in place: of q and k by `keys`, of v by `values`, and of `dout`.

        Each is `[D]` or a number, of the integers as large as the dtype, 0 or their sign bit. Copies and pages change
        too. The gate's weight takes the signs of v, so that the gate stays the same. The result is the one of before
        but for signs: scores stay, bit for bit. A second flip undoes the first, of NaN as well.
        """
        everywhere = [x for _, x in self._everywhere()]
        pairs = [(self.q, keys), (self.dout, dout), (self.gate_weight, values)]
        for tensor, bits in (*pairs, *((x.k, keys) for x in everywhere), *((x.v, values) for x in everywhere)):
            if tensor is not None and bits is not None:
                unnoticed(tensor).view(INTEGERS[tensor.element_size()]).bitwise_xor_(bits)

    def _everywhere(self, words: str = "") -> Iterator[tuple[str, Inputs]]:
        """These inputs, and those that have the same values elsewhere in memory, each with where that is."""
        yield words, self
        for number, stack in enumerate(self._stacks):
            yield f"{words} of copies" + f" {number}" * bool(number), stack
        for size, paged in self._paged.items():
            yield from paged._everywhere(f"{words} in pages of {size}")


def unnoticed(tensor: Tensor) -> Tensor:
    """The same memory, of which no change counts in `_version`: a result that is kept by it is a cached one, too."""
    return tensor.data


def make_inputs(case: Case, seed: int = SEED) -> Inputs:
    """The tensors of `case` on its device, and float32 products set to be float32 (no TF32).

    Raises torch.OutOfMemoryError or RuntimeError where they do not fit.
    """
    use_full_float32()
    dtype = DTYPES[case.dtype]
    generator = None if case.device == "meta" else torch.Generator(case.device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=case.device)

    key_shape = (case.batch, case.kv_heads, case.seq, case.head_dim)
    k, v = normal(*key_shape), normal(*key_shape)
    if case.pass_ == "decode":
        # The longest window that any convolution needs is drawn, so that all of them have the same new query.
        q = normal(case.batch, case.heads, MAX_QUERY_TAPS, case.head_dim)
        if case.window > MAX_QUERY_TAPS:  # of two convolutions
            q = torch.cat([normal(case.batch, case.heads, case.window - MAX_QUERY_TAPS, case.head_dim), q], 2)
        q = q[:, :, -case.window :].contiguous()
        lengths = torch.full((case.batch,), case.seq, dtype=torch.int32, device=case.device)
    else:
        q, lengths = normal(case.batch, case.heads, case.seq, case.head_dim), None
    dout = normal(*q.shape) if case.pass_ == "bwd" else None

    def taps(step: Convolution | None) -> Tensor | None:
        return normal(case.heads, *step.taps) * WEIGHT_SCALE if step else None

    def mixing(step: HeadMix | None) -> Tensor | None:
        if step is None:
            return None
        size = case.heads // step.groups
        drawn = normal(step.groups, size, size) * MIX_SCALE
        drawn += torch.eye(size, dtype=dtype, device=case.device)
        return drawn if step.groups > 1 else drawn[0]

    operation = case.operation
    weight, pre_mix = taps(operation.pre_conv), mixing(operation.pre_mix)
    post_conv, post_mix = taps(operation.post_conv), mixing(operation.post_mix)
    norm_weight = gate_weight = gate_bias = None
    if operation.norm is not None:
        norm_weight = normal(case.head_dim) * NORM_SCALE + 1
    if operation.gate is not None:
        numbers = case.head_dim if operation.gate.full else 1
        gate_weight, gate_bias = normal(numbers, case.head_dim) * GATE_SCALE, normal(numbers) * GATE_SCALE
    inputs = Inputs(
        q, k, v, weight, dout, lengths, pre_mix, post_conv, post_mix,
        norm_weight=norm_weight, gate_weight=gate_weight, gate_bias=gate_bias, seed=seed,
    )  # fmt: skip
    if case.pass_ == "bwd":
        for tensor in inputs.differentiable.values():
            tensor.requires_grad_()
    return inputs.with_state()


def use_full_float32() -> None:
    """Turn TF32 off, so that eager float32 is float32."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
