"""The whole multi-token attention in float64 and its gradients, with the rounding error that right kernels may have.

Written from the definition alone, as `definition` is. Beside the exact result it computes the same with every number
that a kernel may round changed at random by as much, forward and backward. What these results scatter is the error
allowed. Half of them change all numbers of a row alike, as equal scores are rounded alike.
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

from mtabench.fuzzing.definition import FLOAT32_ROUNDING, OF_ROWS, WILD, Expected, Rounding, squares, undecided

FEWEST_SAMPLES, MOST_SAMPLES = 12, 32  # of either half
NUMBERS = 4 << 20  # of a matrix of all samples' scores, beyond which there are fewer samples
OVERFLOW = 0.5  # of the dtype's largest number: a sequence with numbers above is not checked
GRADIENT_TERM, GRADIENT = 16.0, 1024.0  # largest magnitudes that kernels scale gradients to, in float16


@dataclass(frozen=True)
class MtaProblem:
    """Sequences, each with its own positions, as in `Problem`; `tensors` are the parts by name, all float64.

    Mixings are `[G, c, c]`; `pads` are the columns of zeros left of scores and of probabilities. `kept [B, H, rows, N]`
    says which mixed probabilities dropout keeps, the others are divided by what it leaves, `1 - dropout`.
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

    @property
    def folds_taps(self) -> bool:
        """Whether kernels may fold the taps before the softmax into the queries, and round one for each key tap."""
        return self.decode and "pre_conv" in self.tensors


def expected_of_mta(
    problem: MtaProblem, rounding: Rounding, largest: float, grad_out: Tensor | None, seed: int
) -> dict[str, Expected]:
    """ "out" and, with `grad_out [B, H, rows, D]`, the gradients of q, k, v and the parts, as "dq" and so on.

    `largest` is the dtype's largest number. Where rounding decides which score is the largest, or numbers overflow,
    the variance is infinite.
    """
    problem = _cleaned(problem)
    batch, heads, rows, _ = problem.q.shape
    scores = batch * heads * rows * problem.k.shape[2]
    count = max(FEWEST_SAMPLES, min(MOST_SAMPLES, NUMBERS // (2 * scores)))
    noise = _Noise(rounding, _gradient_noise(problem, rounding, grad_out), count, problem.q.device, seed)
    given = {"q": problem.q, "k": problem.k, "v": problem.v, **problem.tensors}
    leaves = {name: x.expand(2 * count + 1, *x.shape).clone().requires_grad_() for name, x in given.items()}
    with torch.set_grad_enabled(grad_out is not None):
        network = _Network(problem, noise, leaves)
        out = network.out()
    found = {"out": out.detach()}
    if grad_out is not None:
        wanted = torch.autograd.grad(out, list(leaves.values()), grad_out.expand(out.shape), materialize_grads=True)
        found |= {f"d{name}": x for name, x in zip(leaves, wanted, strict=True)}
    rows_lost, all_lost = network.lost(largest)
    results = {}
    for name, x in found.items():
        value = x[0]
        scatter = squares(name, x[1:] - value)
        variance = torch.maximum(scatter[:count].mean(0), scatter[count:].mean(0))
        variance = (variance + rounding.relative**2 / 3 * squares(name, value)).nan_to_num(torch.inf)
        if name == "out":
            variance = variance.masked_fill(rows_lost, torch.inf)
        elif name in OF_ROWS:
            variance = variance.masked_fill(all_lost[:, None, None], torch.inf)
        elif all_lost.any():
            variance = torch.full_like(variance, torch.inf)
        results[name] = Expected(value, variance)
    return results


def _cleaned(problem: MtaProblem) -> MtaProblem:
    """The same with zeros outside of the sequences, where anything may stand, NaN included."""
    row = problem.position[:, None] + torch.arange(problem.q.shape[2], device=problem.q.device)
    is_row = (row >= 0) & (row < problem.length[:, None])
    is_key = torch.arange(problem.k.shape[2], device=row.device) < problem.length[:, None]
    q = problem.q.masked_fill(~is_row[:, None, :, None], 0)
    k, v = (x.masked_fill(~is_key[:, None, :, None], 0) for x in (problem.k, problem.v))
    return MtaProblem(**vars(problem) | {"q": q, "k": k, "v": v})


def _gradient_noise(problem: MtaProblem, rounding: Rounding, grad_out: Tensor | None) -> float:
    """The absolute error of a gradient in float16, which kernels scale by one power of two for all heads."""
    if grad_out is None:
        return 0.0
    if not rounding.absolute:
        return rounding.gradient * grad_out.norm(dim=-1).max().item() * problem.v.norm(dim=-1).max().item()
    growth = 1.0
    for name in ("pre_conv", "pre_mix", "post_conv", "post_mix"):
        if name in problem.tensors:
            growth *= max(1.0, problem.tensors[name].abs().flatten(-2).sum(-1).max().item())
    largest, value = grad_out.abs().max().item(), problem.v.abs().max().item()
    return rounding.absolute * 2 * max(largest * value * growth / GRADIENT_TERM, largest / GRADIENT)


class _Noise:
    """Changes of numbers as rounding makes them, of samples along the first dim, of which the first has none."""

    def __init__(self, rounding: Rounding, gradient: float, count: int, device: torch.device, seed: int) -> None:
        self.rounding, self.gradient, self.count = rounding, gradient, count
        self.generator = torch.Generator(device).manual_seed(seed)
        self.products: Tensor | None = None  # sizes of grad_out * out of each row, once known

    def uniform(self, x: Tensor) -> Tensor:
        """Between -1 and 1, the same along the last dim in the second half of the samples."""
        numbers = torch.empty_like(x)
        numbers[0] = 0
        numbers[1 : self.count + 1].uniform_(-1, 1, generator=self.generator)
        alike = numbers[self.count + 1 :, ..., :1]
        numbers[self.count + 1 :] = torch.empty_like(alike).uniform_(-1, 1, generator=self.generator)
        return numbers

    def rounded(self, x: Tensor, relative: float, absolute: float = 0.0) -> Tensor:
        """x with relative errors up to this beside those of float32, and with absolute ones but where x is zero."""
        found = x * (1 + (relative + math.sqrt(3) * FLOAT32_ROUNDING) * self.uniform(x))
        return found + absolute * self.uniform(x) * (x != 0) if absolute else found

    def __call__(self, x: Tensor) -> Tensor:
        """As rounded to the dtype, and so is its gradient."""
        return _Rounded.apply(x, self, self.rounding.relative, self.rounding.absolute, self.gradient)

    def in_float32(self, x: Tensor) -> Tensor:
        """As sums of float32 have it, and so is its gradient."""
        return _Rounded.apply(x, self, 0.0, 0.0, 0.0)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: _Noise, relative: float, absolute: float, of_gradient: float) -> Tensor:
        ctx.noise, ctx.numbers = noise, (relative, of_gradient)
        return noise.rounded(x, relative, absolute)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.noise.rounded(gradient, *ctx.numbers), None, None, None, None


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
        again = probabilities * (1 + mismatch * ctx.noise.uniform(mismatch))
        sums = (again * gradient).sum(-1, keepdim=True)
        # Rounded numbers from which a small sum was taken may be rounded back to themselves, all of a row.
        lost = torch.minimum(sums.abs(), ctx.noise.rounding.relative * gradient.abs().mean(-1, keepdim=True))
        sums = sums + lost * ctx.noise.uniform(lost)
        if (products := ctx.noise.products) is not None:
            sums = sums + ctx.noise.rounded(products, 2 * ctx.noise.rounding.relative) - products
        return again * (gradient - sums), None, None


class _Network:
    """The parts in order, of leaves `[S, ..]` of so many samples."""

    def __init__(self, problem: MtaProblem, noise: _Noise, leaves: dict[str, Tensor]) -> None:
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
            scores = self._noted(noise(self._with_folded_taps(scores, k) if problem.folds_taps else scores))
        scores = scores[..., -min(rows + self.above, scores.shape[-2]) :, :]
        if "pre_mix" in x:
            scores = self._noted(noise(_mixed(scores, x["pre_mix"].mT)))
        seen = self.seen[:, :, -scores.shape[-2] :]
        self._note_logits(scores[0].detach(), seen)
        probabilities = noise(_Softmax.apply(scores.masked_fill(~seen, -torch.inf), noise, self.mismatch))
        if problem.decode:
            probabilities = probabilities * (1 + self.mismatch * noise.uniform(self.mismatch))
        # A backward makes them again from a rounded logsumexp: by how much they differ then.
        again = probabilities.detach() * self.mismatch * noise.uniform(self.mismatch)
        if "post_conv" in x:
            step = partial(_convolved, pad=problem.pads[1])
            probabilities, again = _with_gradient_of(again, step, probabilities, x["post_conv"])
            probabilities = noise(probabilities)
        probabilities, again = (y[..., -rows:, :].masked_fill(~seen[:, :, -rows:], 0) for y in (probabilities, again))
        probabilities = self._noted(probabilities)
        if "post_mix" in x:
            probabilities, again = _with_gradient_of(again, _mixed, probabilities, x["post_mix"])
            probabilities = self._noted(noise(probabilities))
        if problem.kept is not None:
            probabilities, again = (
                (y / (1 - problem.dropout)).masked_fill(~problem.kept, 0) for y in (probabilities, again)
            )
            probabilities = noise(probabilities)
        out, _ = _with_gradient_of(again, torch.matmul, probabilities, v)
        out = self._noted(out)
        if problem.by_conv_attention and out.requires_grad:
            out.register_hook(lambda gradient: self._note_products(gradient, out.detach()))
        return self._after(noise(out))

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

    def _note_products(self, gradient: Tensor, out: Tensor) -> None:
        self.noise.products = (gradient * out).norm(dim=-1, keepdim=True)

    def _after(self, out: Tensor) -> Tensor:
        noise, x = self.noise, self.x

        def along(name: str) -> Tensor:  # [S, 1, 1, 1, D]
            return x[name][:, None, None, None]

        if "norm_weight" in x:
            # The gradients of both factors cancel each other in part.
            size = out.square().mean(-1, keepdim=True)
            normed = noise.in_float32(out) * noise.in_float32(torch.rsqrt(size + self.problem.norm_eps))
            out = noise(normed * along("norm_weight") * self.problem.factor)
        if "gate_weight" in x:
            gate = out @ x["gate_weight"].mT[:, None, None]
            gate = noise(gate + along("gate_bias") if "gate_bias" in x else gate)
            out = noise(out * noise(torch.sigmoid(gate)))
        return out

    def lost(self, largest: float) -> tuple[Tensor, Tensor]:
        """Of which rows of the output `[B, H, rows]`, and of which sequences' gradients `[B]`, nothing can be said."""
        rows = self.problem.rows
        of_sequence = self.is_undecided.flatten(1).any(1) | (self.mismatch.flatten(2).amax(2)[0] > WILD).any(-1)
        reached = torch.nn.functional.pad(self.is_undecided, (self.above, 0))
        lost = reached.unfold(2, self.above + 1, 1).any(-1)[:, :, -rows:]
        if "post_mix" in self.x:
            lost = lost.any(1, keepdim=True).expand_as(lost)
        overflows = torch.stack(self.sizes).amax(0) > OVERFLOW * largest
        return lost | overflows[:, None, None], of_sequence | overflows

    def _noted(self, x: Tensor) -> Tensor:
        """x, whose size is kept in mind."""
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
    again: Tensor, step: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """`step(x, weight)`, linear in both, whose gradient of `weight` takes `x + again` for x; and step of `again`."""
    found = step(x, weight)
    if not found.requires_grad:
        return found, again
    return found + step(again, weight - weight.detach()), step(again, weight.detach())


def _convolved(x: Tensor, taps: Tensor, pad: int) -> Tensor:
    """Each head of `x [S, B, H, R, N]` by its `taps [S, H, cq, ck]`: zeros above the first row, `pad` at the left."""
    query_taps, key_taps = taps.shape[2:]
    rows, keys = x.shape[3:]
    padded = torch.nn.functional.pad(x, (pad, key_taps - 1 - pad, query_taps - 1, 0))
    found = torch.zeros_like(x)
    for a in range(query_taps):
        for b in range(key_taps):
            found = found + padded[..., a : a + rows, b : b + keys] * taps[:, None, :, a, b, None, None]
    return found


def _mixed(x: Tensor, mix: Tensor) -> Tensor:
    """Heads g of `x [S, B, H, R, N]` by `mix [S, G, c, c]`, (in, out) of a group."""
    groups, size = mix.shape[1:3]
    parts = x.unflatten(2, (groups, size))
    return torch.einsum("sbugij,sugh->sbuhij", parts, mix).flatten(2, 3)
