"""Conv attention and the whole multi-token attention in float64, with the rounding error that right kernels may have.

Written from the definition alone; it shares no code with `mta_kernels`, whose reference is itself checked against it.
`expected` is exact. `errors_allowed` computes the same with every number that a kernel may round changed at random by
as much, forward and backward. What these results scatter is the error allowed. Half of them change all numbers of a
row alike, as equal scores are rounded alike.
Gradients of v and of what follows the softmax take probabilities that a backward makes again from a logsumexp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

FLOAT32_ROUNDING = 8 * 2.0**-24  # relative, of a sum in float32
FAINTEST_GRADIENT = 2.0**-37  # half of fp16's smallest number, over the power of two of bfloat16's gradients
WILD = 0.25  # above such a standard error of a score, probabilities are no longer linear in it, nor gates in theirs
CERTAIN = 8  # standard errors within which an error surely lies; a row that may be zero within them has any direction
NEGLIGIBLE = 20.0  # how far below the largest score another one has a probability next to nothing
OF_ROWS = ("out", "dq", "dk", "dv", "dq_history")  # results [.., D]; all others are gradients of mixers
SAMPLES = 12  # of either half
OF_HEAD = 1 / 3  # of the variance of a mixer's number, which is its head's mean
NUMBERS = 4 << 20  # of the scores of all samples that are worked on at a time
MIXERS = ("pre_conv", "pre_mix", "post_conv", "post_mix")
OVERFLOW = 0.5  # of the dtype's largest number: a sequence with numbers above is not checked
GRADIENT_TERM, GRADIENT = 16.0, 1024.0  # largest magnitudes that kernels scale gradients to, in float16


@dataclass(frozen=True)
class Rounding:
    """How a dtype rounds: `relative` errors up to this, and `absolute` ones where numbers are no longer normal.

    `gradient` is the absolute error of a score's gradient, times the norms of `grad_out` and v. In 16 bits it goes
    through fp16, over a power of two from these norms.
    """

    relative: float
    absolute: float
    gradient: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Rounding:
        absolute = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
        in_fp16 = dtype == torch.float16
        gradient = absolute if in_fp16 else FAINTEST_GRADIENT if dtype == torch.bfloat16 else 0.0
        return cls(torch.finfo(dtype).eps / 2, absolute if in_fp16 else 0.0, gradient)


@dataclass(frozen=True)
class Problem:
    """Sequences, each with its own positions; `tensors` are the parts by name, all float64.

    `q [B, Hq, R, D]`: the last `rows` of them are wanted, those before are looked back on. `k, v [B, Hkv, N, D]`.
    `position [B]` is where a sequence's first row of q stands, maybe before its beginning, and `length [B]` how many
    keys it has. Mixings are `[G, c, c]`; `pads` are the columns of zeros left of scores and of probabilities. `kept
    [B, H, rows, N]` says which mixed probabilities dropout keeps, the others are divided by what it leaves.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    tensors: dict[str, Tensor]
    position: Tensor
    length: Tensor
    rows: int
    causal: bool
    scale: float
    pads: tuple[int, int]
    norm_eps: float
    factor: float
    kept: Tensor | None
    dropout: float
    by_conv_attention: (
        bool  # whose kernels may round scaled queries, and have a backward's sums of rows from the output
    )
    decode: bool  # whose kernels round a row's logsumexp, which is their state, and queries with the taps folded in
    equal_rows: bool = False  # of q and k, or of v, so that scores or outputs of all rows are rounded alike

    @property
    def folds_taps(self) -> bool:
        """Whether kernels may fold the taps before the softmax into the queries, and round one for each key tap."""
        return self.decode and "pre_conv" in self.tensors


def expected(problem: Problem, grad_out: Tensor | None) -> dict[str, Tensor]:
    """ "out" `[B, H, rows, D]` and, with `grad_out` of its shape, the gradients of q, k, v and the parts, as "dq".."""
    found, _ = _computed(_cleaned(problem), None, grad_out)
    return {name: x[0] for name, x in found.items()}


def errors_allowed(
    problem: Problem, rounding: Rounding, largest: float, grad_out: Tensor | None, seed: int, samples: int = SAMPLES
) -> dict[str, Tensor]:
    """The variance of the error of each row of what `expected` gives, summed over its D numbers; of mixers each number.

    `largest` is the dtype's largest number. Where rounding decides which score is the largest, or numbers overflow,
    the variance is infinite.
    """
    problem = _cleaned(problem)
    batch, heads, rows, _ = problem.q.shape
    numbers = 2 * batch * heads * problem.k.shape[2] * max(rows, problem.k.shape[3] // 4)
    at_once = max(1, min(samples, NUMBERS // numbers))
    passes = -(-samples // at_once)
    gradient = _gradient_noise(problem, rounding, grad_out)
    generator = torch.Generator(problem.q.device).manual_seed(seed)
    scatter: dict[str, list[Tensor]] = {}
    rows_lost, all_lost = problem.q.new_zeros((), dtype=torch.bool), problem.q.new_zeros(batch, dtype=torch.bool)
    for _ in range(passes):
        noise = _Noise(rounding, gradient, at_once, generator, alike=2 if problem.equal_rows else 1)
        found, network = _computed(problem, noise, grad_out)
        for name, x in found.items():
            halves = squares(name, x[1:] - x[0]).unflatten(0, (2, at_once)).sum(1)
            scatter.setdefault(name, []).append(halves)
        rows, sequences = network.lost(largest)
        rows_lost, all_lost = rows_lost | rows, all_lost | sequences
    results = {}
    for name, x in found.items():
        variance = torch.stack(scatter[name]).sum(0).amax(0) / (at_once * passes)
        if name not in OF_ROWS:  # so few samples put some of thousands of single numbers far too low
            has_one = variance[0].numel() == 1  # number a head, so that the mean is of all heads
            of_head = variance.mean(tuple(range(not has_one, variance.dim())), keepdim=True)
            variance = (1 - OF_HEAD) * variance + OF_HEAD * of_head
        variance = (variance + rounding.relative**2 / 3 * squares(name, x[0])).nan_to_num(torch.inf)
        if name == "out":
            variance = variance.masked_fill(rows_lost, torch.inf)
        elif name in OF_ROWS:
            variance = variance.masked_fill(all_lost[:, None, None], torch.inf)
        elif all_lost.any():
            variance = torch.full_like(variance, torch.inf)
        results[name] = variance
    return results


def _computed(
    problem: Problem, noise: _Noise | None, grad_out: Tensor | None
) -> tuple[dict[str, Tensor], _Network]:  # fmt: skip
    """Results `[S, ..]` of all samples, the first of which is exact."""
    noise = noise or _Noise(Rounding(0.0, 0.0, 0.0), 0.0, 0, None)
    given = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.tensors}
    samples = 2 * noise.count + 1
    leaves = {
        name: x.expand(samples, *x.shape).detach().requires_grad_(grad_out is not None) for name, x in given.items()
    }
    with torch.set_grad_enabled(grad_out is not None):
        network = _Network(problem, noise, leaves)
        out = network.out()
    found = {"out": out.detach()}
    if grad_out is not None:
        wanted = torch.autograd.grad(out, list(leaves.values()), grad_out.expand(out.shape), materialize_grads=True)
        found |= {f"d{name}": x for name, x in zip(leaves, wanted, strict=True)}
    return found, network


def squares(name: str, value: Tensor) -> Tensor:
    """Of the rows of a result; each number of a mixer's gradient is one."""
    return value.square().sum(-1) if name in OF_ROWS else value.square()


def _cleaned(problem: Problem) -> Problem:
    """The same with zeros outside of the sequences, where anything may stand, NaN included."""
    row = problem.position[:, None] + torch.arange(problem.q.shape[2], device=problem.q.device)
    is_row = (row >= 0) & (row < problem.length[:, None])
    is_key = torch.arange(problem.k.shape[2], device=row.device) < problem.length[:, None]
    q = problem.q.masked_fill(~is_row[:, None, :, None], 0)
    k, v = (x.masked_fill(~is_key[:, None, :, None], 0) for x in (problem.k, problem.v))
    return Problem(**vars(problem) | {"q": q, "k": k, "v": v})


def _gradient_noise(problem: Problem, rounding: Rounding, grad_out: Tensor | None) -> Tensor | float:
    """The absolute error `[B, 1, 1, 1]` of a gradient in float16, whose sequences have a power of two each."""
    if grad_out is None:
        return 0.0
    if problem.by_conv_attention or not rounding.absolute:
        largest, value = (x.norm(dim=-1).flatten(1).amax(1) for x in (grad_out, problem.v))
        found = rounding.gradient * largest * value
    else:
        growth = 1.0
        for name in MIXERS:
            if name in problem.tensors:
                growth *= problem.tensors[name].abs().flatten(-2).sum(-1).amax().clamp(min=1.0)
        largest, value = (x.abs().flatten(1).amax(1) for x in (grad_out, problem.v))
        found = rounding.absolute * 2 * torch.maximum(largest * value * growth / GRADIENT_TERM, largest / GRADIENT)
    return found[:, None, None, None]


class _Noise:
    """Changes of numbers as rounding makes them, of samples along the first dim, of which the first has none."""

    def __init__(
        self, rounding: Rounding, gradient: Tensor | float, count: int, generator: torch.Generator | None,
        alike: int = 1,
    ) -> None:  # fmt: skip
        self.rounding, self.gradient, self.count, self.generator = rounding, gradient, count, generator
        self.alike = alike  # last dims
        self.products: Tensor | None = None  # sizes of grad_out * out of each row, once known

    def uniform(self, x: Tensor) -> Tensor:
        """Between -1 and 1; in the second half of the samples the same along the last dims that are `alike`."""
        numbers = torch.empty_like(x)
        numbers[0] = 0
        numbers[1 : self.count + 1].uniform_(-1, 1, generator=self.generator)
        alike = numbers[self.count + 1 :, ..., :1] if self.alike == 1 else numbers[self.count + 1 :, ..., :1, :1]
        numbers[self.count + 1 :] = torch.empty_like(alike).uniform_(-1, 1, generator=self.generator)
        return numbers

    def rounded(self, x: Tensor, relative: float, absolute: Tensor | float = 0.0) -> Tensor:
        """x with relative errors up to this beside float32's, and with absolute ones but where x is zero."""
        if not self.count:
            return x
        found = x * (1 + (relative + math.sqrt(3) * FLOAT32_ROUNDING) * self.uniform(x))
        if isinstance(absolute, float) and not absolute:
            return found
        return found + absolute * self.uniform(x) * (x != 0)

    def __call__(self, x: Tensor) -> Tensor:
        """As rounded to the dtype, and so is its gradient."""
        if not self.count:
            return x
        return _Rounded.apply(x, self, self.rounding.relative, self.rounding.absolute, True)

    def in_float32(self, x: Tensor) -> Tensor:
        """As sums of float32 have it, and so is its gradient."""
        return _Rounded.apply(x, self, 0.0, 0.0, False) if self.count else x


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: _Noise, relative: float, absolute: float, in_float16: bool) -> Tensor:
        ctx.noise, ctx.relative, ctx.in_float16 = noise, relative, in_float16
        return noise.rounded(x, relative, absolute)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        absolute = ctx.noise.gradient if ctx.in_float16 else 0.0
        return ctx.noise.rounded(gradient, ctx.relative, absolute), None, None, None, None


class _Softmax(torch.autograd.Function):
    """Along the last dim, zeros where nothing is finite; its backward has the rows' sums from a rounded logsumexp."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, noise: _Noise, mismatch: Tensor) -> Tensor:
        probabilities = torch.softmax(logits, -1).nan_to_num(0.0)
        ctx.save_for_backward(probabilities, mismatch)
        ctx.noise = noise
        return probabilities

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities, mismatch = ctx.saved_tensors
        noise = ctx.noise
        again = probabilities * (1 + mismatch * noise.uniform(mismatch)) if noise.count else probabilities
        sums = (again * gradient).sum(-1, keepdim=True)
        if noise.count:
            # Rounded numbers from which a small sum was taken may be rounded back to themselves, all of a row.
            lost = torch.minimum(sums.abs(), noise.rounding.relative * gradient.abs().mean(-1, keepdim=True))
            sums = sums + lost * noise.uniform(lost)
            if (products := noise.products) is not None:
                sums = sums + noise.rounded(products, 2 * noise.rounding.relative) - products
        return again * (gradient - sums), None, None


class _Network:
    """The parts in order, of leaves `[S, ..]` of so many samples."""

    def __init__(self, problem: Problem, noise: _Noise, leaves: dict[str, Tensor]) -> None:
        self.problem, self.noise, self.x = problem, noise, leaves
        rows, keys = problem.q.shape[2], problem.k.shape[2]
        self.row = problem.position[:, None] + torch.arange(rows, device=problem.q.device)  # [B, R]
        column = torch.arange(keys, device=problem.q.device)
        self.seen = ((self.row >= 0) & (self.row < problem.length[:, None]))[:, :, None]
        self.seen = self.seen & (column < problem.length[:, None])[:, None]
        if problem.causal:
            self.seen &= column <= self.row[:, :, None]
        self.seen = self.seen[:, None]  # [B, 1, R, N]
        post = problem.tensors.get("post_conv")
        self.above = 0 if post is None else post.shape[1] - 1  # rows of probabilities above those wanted
        self.sizes = [problem.q.new_zeros(problem.q.shape[0])]  # largest magnitudes [B] of what may be stored
        self.mismatch = problem.q.new_zeros(())
        self.is_wild = self.may_be_zero = self.seen.new_zeros(problem.q.shape[0], problem.q.shape[1], problem.rows)

    def out(self) -> Tensor:
        """`[S, B, H, rows, D]`."""
        problem, noise, x = self.problem, self.noise, self.x
        heads, rows = problem.q.shape[1], problem.rows
        q, k, v = (noise.in_float32(x[name]) for name in ("q", "k", "v"))
        q = noise.rounded(q, noise.rounding.relative) if problem.by_conv_attention else q
        k, v = (y.repeat_interleave(heads // y.shape[2], 2) for y in (k, v))
        scores = self._noted(noise((q @ k.mT * problem.scale).masked_fill(~self.seen, 0)))
        if "pre_conv" in x:
            scores = _convolved(scores, x["pre_conv"], problem.pads[0])
            folds = problem.folds_taps and noise.count
            scores = self._noted(noise(self._with_folded_taps(scores, k) if folds else scores))
        scores = scores[..., -min(rows + self.above, scores.shape[-2]) :, :]
        if "pre_mix" in x:
            scores = self._noted(noise(_mixed(scores, x["pre_mix"].mT)))
        seen = self.seen[:, :, -scores.shape[-2] :]
        if noise.count:
            self._note_logits(scores[0].detach(), seen)
        probabilities = noise(_Softmax.apply(scores.masked_fill(~seen, -torch.inf), noise, self.mismatch))
        if problem.decode and noise.count:
            probabilities = probabilities * (1 + self.mismatch * noise.uniform(self.mismatch))
        # A backward makes them again from a rounded logsumexp: by how much they differ then.
        again = probabilities.detach() * self.mismatch * noise.uniform(self.mismatch) if noise.count else None
        if "post_conv" in x:
            step = partial(_convolved, pad=problem.pads[1])
            probabilities, again = _with_gradient_of(again, step, probabilities, x["post_conv"])
            probabilities = noise(probabilities)
        probabilities, again = (
            y if y is None else y[..., -rows:, :].masked_fill(~seen[:, :, -rows:], 0) for y in (probabilities, again)
        )
        probabilities = self._noted(probabilities)
        if "post_mix" in x:
            probabilities, again = _with_gradient_of(again, _mixed, probabilities, x["post_mix"])
            probabilities = self._noted(noise(probabilities))
        if problem.kept is not None:
            probabilities, again = (
                y if y is None else (y / (1 - problem.dropout)).masked_fill(~problem.kept, 0)
                for y in (probabilities, again)
            )
            probabilities = noise(probabilities)
        out, _ = _with_gradient_of(again, torch.matmul, probabilities, v)
        out = self._noted(out)
        if problem.by_conv_attention and out.requires_grad and noise.count:
            out.register_hook(lambda gradient: self._note_products(gradient, out.detach()))
        rounded = noise(out)
        if rounded.requires_grad and noise.count:
            rounded.register_hook(self._note_gradient)
        return self._after(rounded)

    def _with_folded_taps(self, scores: Tensor, k: Tensor) -> Tensor:
        """Convolved scores with what the rounding of folded queries adds to them, for each key tap another error."""
        problem, noise, taps = self.problem, self.noise, self.x["pre_conv"]
        pads = problem.pads[0], taps.shape[3] - 1 - problem.pads[0]
        for b in range(taps.shape[3]):
            folded = _convolved(self.x["q"], taps[..., b : b + 1], 0)
            error = noise.rounded(folded, noise.rounding.relative) - folded
            products = (error @ k.mT * problem.scale).masked_fill(~self.seen, 0)
            scores = scores + torch.nn.functional.pad(products, pads)[..., b : b + k.shape[3]]
        return scores

    def _note_gradient(self, gradient: Tensor) -> None:
        """What the kernels are given, which a norm of small rows enlarges."""
        self.noise.gradient = _gradient_noise(self.problem, self.noise.rounding, gradient[0])

    def _note_products(self, gradient: Tensor, out: Tensor) -> None:
        self.noise.products = (gradient * out).norm(dim=-1, keepdim=True)

    def _after(self, out: Tensor) -> Tensor:
        noise, x = self.noise, self.x

        def along(name: str) -> Tensor:  # [S, 1, 1, 1, D]
            return x[name][:, None, None, None]

        if "norm_weight" in x:
            # The gradients of both factors cancel each other in part.
            size = out.square().mean(-1, keepdim=True)
            if noise.count:
                spread = (out - out[0]).detach().square().sum(-1).mean(0)
                size2 = out[0].detach().square().sum(-1) + out.shape[-1] * self.problem.norm_eps
                self.may_be_zero = CERTAIN**2 * spread > size2
            normed = noise.in_float32(out) * noise.in_float32(torch.rsqrt(size + self.problem.norm_eps))
            out = noise(normed * along("norm_weight") * self.problem.factor)
        if "gate_weight" in x:
            gate = out @ x["gate_weight"].mT[:, None, None]
            gate = noise(gate + along("gate_bias") if "gate_bias" in x else gate)
            if noise.count:
                closed = torch.nn.functional.logsigmoid(gate.detach())
                self.is_wild = ((closed - closed[0]).square().sum(0) > WILD**2 * 2 * noise.count).any(-1)
            out = noise(out * noise(torch.sigmoid(gate)))
        return out

    def lost(self, largest: float) -> tuple[Tensor, Tensor]:
        """Which rows of the output `[B, H, rows]`, and which sequences' gradients `[B]`, cannot be judged."""
        rows = self.problem.rows
        of_sequence = self.is_undecided.flatten(1).any(1) | (self.mismatch.flatten(2).amax(2)[0] > WILD).any(-1)
        reached = torch.nn.functional.pad(self.is_undecided, (self.above, 0))
        lost = reached.unfold(2, self.above + 1, 1).any(-1)[:, :, -rows:] | self.is_wild
        of_sequence = of_sequence | self.is_wild.flatten(1).any(1)
        if "post_mix" in self.x:
            lost = lost.any(1, keepdim=True).expand_as(lost)
        overflows = torch.stack(self.sizes).amax(0) > OVERFLOW * largest
        return lost | self.may_be_zero | overflows[:, None, None], of_sequence | overflows

    def _noted(self, x: Tensor) -> Tensor:
        """x, whose size is kept in mind."""
        if self.noise.count:
            self.sizes.append(x[0].detach().abs().flatten(1).amax(1))
        return x

    def _note_logits(self, logits: Tensor, seen: Tensor) -> None:
        """Rows that rounding decides, and by how much a backward's sums of rows may be off."""
        problem, relative2 = self.problem, self.noise.rounding.relative**2 / 3 + FLOAT32_ROUNDING**2
        heads = problem.q.shape[1]
        k = problem.k.repeat_interleave(heads // problem.k.shape[1], 1)
        scores = (problem.q @ k.mT * problem.scale).masked_fill(~self.seen, 0)
        size2 = (problem.scale**2 * problem.q.square() @ k.square().mT).masked_fill(~self.seen, 0)
        of_products = relative2 if problem.by_conv_attention or problem.folds_taps else FLOAT32_ROUNDING**2
        variance = relative2 * scores.square() + of_products * size2
        if "pre_conv" in problem.tensors:
            taps = problem.tensors["pre_conv"]
            scores, variance = (
                _convolved(x[None], w[None], problem.pads[0])[0] for x, w in ((scores, taps), (variance, taps.square()))
            )
            variance = variance + relative2 * scores.square()
        variance = variance[:, :, -logits.shape[2] :]
        if "pre_mix" in problem.tensors:
            variance = _mixed(variance[None], problem.tensors["pre_mix"].mT.square()[None])[0]
            variance = variance + relative2 * logits.square()
        logits = logits.masked_fill(~seen, -torch.inf)
        self.is_undecided = undecided(logits, variance.expand_as(logits))
        largest = logits.abs().masked_fill(~seen, 0).amax(-1, keepdim=True)
        self.mismatch = FLOAT32_ROUNDING * (largest + math.log(logits.shape[3] + 1))
        self.mismatch = self.mismatch.expand(2 * self.noise.count + 1, *self.mismatch.shape)


def _with_gradient_of(
    again: Tensor | None, step: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`step(x, weight)`, linear in both, whose gradient of `weight` takes `x + again` for x; and step of `again`."""
    found = step(x, weight)
    if again is None or not found.requires_grad:
        return found, again
    return found + step(again, weight - weight.detach()), step(again, weight.detach())


def _convolved(x: Tensor, taps: Tensor, pad: int) -> Tensor:
    """Each head of `x [S, B, H, R, N]` by its `taps [S, H, cq, ck]`: zeros above the first row, `pad` at the left."""
    query_taps, key_taps = taps.shape[2:]
    samples, batch, heads = x.shape[:3]
    padded = torch.nn.functional.pad(x, (pad, key_taps - 1 - pad, query_taps - 1, 0))
    channels = padded.transpose(0, 1).reshape(batch, samples * heads, *padded.shape[3:])
    found = torch.nn.functional.conv2d(channels, taps.reshape(-1, 1, query_taps, key_taps), groups=samples * heads)
    return found.view(batch, samples, heads, *x.shape[3:]).transpose(0, 1)


def _mixed(x: Tensor, mix: Tensor) -> Tensor:
    """Heads g of `x [S, B, H, R, N]` by `mix [S, G, c, c]`, (in, out) of a group."""
    groups, size = mix.shape[1:3]
    parts = x.unflatten(2, (groups, size))
    return torch.einsum("sbugij,sugh->sbuhij", parts, mix).flatten(2, 3)


def undecided(c: Tensor, variance: Tensor) -> Tensor:
    """Rows `[X, rows]` of whose scores several may be the largest within rounding, and by far."""
    error = CERTAIN * variance.sqrt()
    least = (c - error).amax(-1, keepdim=True)
    in_play = (c + error > least - NEGLIGIBLE) & c.isfinite()
    return ((variance > WILD**2) & in_play).any(-1) & (in_play.sum(-1) > 1)
