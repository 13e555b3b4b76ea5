"""Conv attention in float64 and its gradients, tap by tap, with the rounding error that a right kernel may have.

Written from the definition of the operation alone; it shares no code with `mta_kernels`, whose reference is itself
checked against it. Beside each value stands the variance of its error: where a kernel rounds the scores, the
probabilities or the gradients of the scores to its dtype, what these relative errors, taken as independent, add up to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT32_ROUNDING = 8 * 2.0**-24  # relative, of a sum in float32
FAINTEST_GRADIENT = 2.0**-37  # half of fp16's smallest number, over the power of two of bfloat16's gradients
WILD = 0.25  # above such a standard error of a score, probabilities are no longer linear in it
CERTAIN = 8  # standard errors within which an error surely lies
NEGLIGIBLE = 20.0  # how far below the largest score another one has a probability next to nothing
OF_ROWS = ("out", "dq", "dk", "dv", "dq_history")  # results [.., D]; all others are gradients of mixers
ELEMENTS = {"cuda": 1 << 24, "cpu": 1 << 22}  # of a matrix of scores that are worked on at a time


@dataclass(frozen=True)
class Expected:
    """What a result should be.

    `value [.., D]` float64, `variance [..]` of the error of each row, summed over its D numbers; infinite where
    rounding alone decides the row.
    """

    value: Tensor
    variance: Tensor


@dataclass(frozen=True)
class Rounding:
    """How a dtype rounds: `relative` errors up to this, and `absolute` ones where numbers are no longer normal.

    `gradient` is the absolute error of a score's gradient, times the norms of `grad_out` and v: in 16 bits it goes
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
    """Sequences, each with its own positions.

    `q [B, Hq, R, D]`: the last `rows` of them are wanted, those before are looked back on. `k, v [B, Hkv, N, D]`,
    `weight [Hq, cq, ck]`, all float64; `position [B]` is where a sequence's first row of q stands, maybe before its
    beginning, and `length [B]` how many keys it has. `pad` is the number of columns of zeros left of the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    position: Tensor
    length: Tensor
    rows: int
    causal: bool
    scale: float
    pad: int


def expected_results(problem: Problem, rounding: Rounding, grad_out: Tensor | None = None) -> dict[str, Expected]:
    """ "out" `[B, Hq, rows, D]` and, with `grad_out` in float64, "dq", "dk", "dv" and "dweight" in float64.

    Some heads are worked on at a time, so that memory is bounded.
    """
    q, k, v, weight = problem.q, problem.k, problem.v, problem.weight
    batch, heads, all_rows, head_dim = q.shape
    kv_heads, keys = k.shape[1:3]
    shapes: dict[str, tuple[int, ...]] = {"out": (batch, heads, problem.rows, head_dim)}
    if grad_out is not None:
        shapes |= {"dq": tuple(q.shape), "dk": tuple(k.shape), "dv": tuple(v.shape), "dweight": (*weight.shape, 1)}
    totals = {name: Expected(q.new_zeros(shape), q.new_zeros(shape[:-1])) for name, shape in shapes.items()}
    at_once = max(1, ELEMENTS[q.device.type] // (all_rows * keys))
    flat = torch.arange(batch * heads, device=q.device)
    for part in flat.split(at_once):
        sequence, head = part // heads, part % heads
        kv_head = head // (heads // kv_heads)
        scores = _Scores(
            problem, rounding, q[sequence, head], k[sequence, kv_head], v[sequence, kv_head], weight[head],
            problem.position[sequence], problem.length[sequence],
        )  # fmt: skip
        where = {"out": (sequence, head), "dq": (sequence, head), "dweight": (head,)}
        where |= {"dk": (sequence, kv_head), "dv": (sequence, kv_head)}
        found = {"out": scores.output()}
        if grad_out is not None:
            found |= scores.gradients(grad_out[sequence, head])
        for name, (value, variance) in found.items():
            totals[name].value.index_put_(where[name], value, accumulate=True)
            totals[name].variance.index_put_(where[name], variance, accumulate=True)
    if "dweight" in totals:
        totals["dweight"] = Expected(totals["dweight"].value[..., 0], totals["dweight"].variance)
    return {
        name: Expected(found.value, found.variance + rounding.relative**2 / 3 * squares(name, found.value))
        for name, found in totals.items()
    }


def squares(name: str, value: Tensor) -> Tensor:
    """Of the rows of a result; each number of a mixer's gradient is one."""
    return value.square().sum(-1) if name in OF_ROWS else value.square()


class _Scores:
    """The scores of some heads `[X, ..]`, one sequence and query head each, and what follows from them."""

    def __init__(
        self, problem: Problem, rounding: Rounding, q: Tensor, k: Tensor, v: Tensor, weight: Tensor,
        position: Tensor, length: Tensor,
    ) -> None:  # fmt: skip
        self.scale, self.pad, self.rows, self.weight = problem.scale, problem.pad, problem.rows, weight
        self.relative2 = rounding.relative**2 / 3 + FLOAT32_ROUNDING**2
        self.absolute2, self.gradient2 = rounding.absolute**2, rounding.gradient**2
        row = position[:, None] + torch.arange(q.shape[1], device=q.device)  # [X, R], absolute
        keys = k.shape[1]
        column = torch.arange(keys, device=q.device)
        is_key = column < length[:, None]
        is_row = (row >= 0) & (row < length[:, None])
        # What stands outside a sequence may be anything, NaN included.
        self.q = q.masked_fill(~is_row[:, :, None], 0)
        self.k, self.v = (x.masked_fill(~is_key[:, :, None], 0) for x in (k, v))
        self.seen = is_row[:, :, None] & is_key[:, None, :]  # [X, R, N]
        if problem.causal:
            self.seen &= column <= row[:, :, None]
        wanted = self.seen[:, -self.rows :]
        self.s = (self.scale * self.q @ self.k.mT).masked_fill(~self.seen, 0)
        magnitude2 = (self.scale**2 * self.q.square() @ self.k.square().mT).masked_fill(~self.seen, 0)
        self.s_variance = self.relative2 * (magnitude2 + self.s.square())
        c, c_variance = self._convolved(torch.stack((weight, weight.square())), torch.stack((self.s, self.s_variance)))
        c_variance += self.relative2 * c.square()
        # A backward computes scores again, and takes the forward's logsumexp from them: both rounded to float32.
        mismatch = FLOAT32_ROUNDING * (c.abs().amax(-1, keepdim=True) + math.log(keys + 1))
        c = c.masked_fill(~wanted, -torch.inf)
        self.p = torch.softmax(c, -1).nan_to_num(0.0)  # of a row that sees nothing: zeros
        self.undecided = undecided(c, c_variance)
        c_variance = c_variance.masked_fill(~wanted, 0).clamp(max=WILD**2)
        # The error of a probability: that of its own score, and that of the sum that it is divided by.
        p2 = self.p.square()
        of_row = (p2 * c_variance).sum(-1, keepdim=True)
        self.c_variance = c_variance
        self.p_variance = p2 * (c_variance * (1 - 2 * self.p) + of_row).clamp(min=0) + p2 * (
            self.relative2 + mismatch.square()
        )
        self.p_variance += self.absolute2 * wanted
        self.lost = (self.undecided | (mismatch[..., 0] > WILD)).any(1)  # heads without gradients worth the name

    def output(self) -> tuple[Tensor, Tensor]:
        """Values `[X, rows, D]` and the variances of their rows."""
        self.out = self.p @ self.v
        v2, out2 = self.v.square().sum(-1), self.out.square().sum(-1)
        moved = self.p.square() * self.c_variance
        distance2 = v2[:, None, :] - 2 * self.out @ self.v.mT + out2[:, :, None]  # of v[j] and out[i]
        variance = (moved * distance2.clamp(min=0)).sum(-1) + self.relative2 * (self.p.square() @ v2[:, :, None])[
            ..., 0
        ]
        variance += self.absolute2 * v2.sum(-1, keepdim=True) + self.absolute2 * self.v.shape[2]
        self.out_variance = variance + self.relative2 * out2
        return self.out, self.out_variance.masked_fill(self.undecided, torch.inf)

    def gradients(self, grad_out: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Of `grad_out [X, rows, D]`, by name; `output` comes before."""
        p, p_variance = self.p, self.p_variance
        grad2 = grad_out.square().sum(-1)
        dp = grad_out @ self.v.mT
        delta = (grad_out * self.out).sum(-1, keepdim=True)
        dp_variance = self.relative2 * (grad_out.square() @ self.v.square().mT + dp.square())
        # The kernel's delta has the output in it as it was rounded.
        delta_variance = self.relative2 * (grad_out.square() * self.out.square()).sum(-1) + (
            grad_out.square().mean(-1) * self.out_variance
        )
        dc = p * (dp - delta)
        dc_variance = p_variance * (dp - delta).square() + p.square() * dp_variance + self.relative2 * dc.square()
        dc_variance += self.gradient2 * (grad2.amax(-1) * self.v.square().sum(-1).amax(-1))[:, None, None]
        dc_variance = dc_variance.masked_fill(~self.seen[:, -self.rows :], 0)
        common = delta_variance[:, :, None]
        # An error of delta moves all of a row's gradients the same way: `shared`.
        ds, ds_variance, shared = self._transposed(
            torch.stack((self.weight, self.weight.square(), self.weight)),
            torch.stack((dc, dc_variance + p.square() * common, p * common.sqrt())),
        )
        ds_variance = ds_variance + self.relative2 * ds.square()
        s2, q2, k2 = self.scale**2, self.q.square().sum(-1), self.k.square().sum(-1)
        ds2 = ds.square()
        found = {
            "dq": (
                self.scale * ds @ self.k,
                s2 * ((ds_variance + self.relative2 * ds2) @ k2[:, :, None])[..., 0]
                + s2 * (shared @ self.k).square().sum(-1),
            ),
            "dk": (
                self.scale * ds.mT @ self.q,
                s2 * ((ds_variance + self.relative2 * ds2).mT @ q2[:, :, None])[..., 0],
            ),
            "dv": (p.mT @ grad_out, (p_variance.mT @ grad2[:, :, None])[..., 0]),
        }
        value, variance = self._weight_gradient(dc, dc_variance, delta_variance)
        found["dweight"] = (value[..., None], variance)
        return {
            name: (value, variance.masked_fill(self.lost.view(-1, *[1] * (variance.dim() - 1)), torch.inf))
            for name, (value, variance) in found.items()
        }

    def _weight_gradient(self, dc: Tensor, dc_variance: Tensor, delta_variance: Tensor) -> tuple[Tensor, Tensor]:
        """Values and variances `[X, cq, ck]`; the four products are one tensor, since a tap costs its launches."""
        s = self.s
        left = torch.stack((dc, dc_variance, dc.square(), self.p))
        right = torch.stack((s, s.square(), self.s_variance, s))
        sums = s.new_zeros(*self.weight.shape[1:], 4, s.shape[0], self.rows)
        for a, b, to, of in self._taps():
            sums[a, b, :, :, to[1]] = (left[:, *to] * right[:, *of]).sum(-1)
        sums = sums.permute(2, 3, 0, 1, 4)  # [4, X, cq, ck, rows]
        together = (sums[3].square() * delta_variance[:, None, None]).sum(-1)
        value, by_gradient, by_score = sums[:3].sum(-1)
        return value, by_gradient + by_score + together

    def _taps(self) -> Iterator[tuple[int, int, tuple, tuple]]:
        """Each tap with the part of the outputs `[X, rows, N]` it acts on, and the part of the scores it reads."""
        query_taps, key_taps = self.weight.shape[1:]
        all_rows, keys = self.s.shape[1:]
        for a in range(query_taps):
            down = all_rows - self.rows - (query_taps - 1) + a
            to_rows = slice(max(0, -down), max(0, min(self.rows, all_rows - down)))
            of_rows = slice(to_rows.start + down, to_rows.stop + down)
            for b in range(key_taps):
                right = b - self.pad
                to_columns = slice(max(0, -right), min(keys, keys - right))
                of_columns = slice(to_columns.start + right, to_columns.stop + right)
                if to_rows.start < to_rows.stop and to_columns.start < to_columns.stop:
                    yield a, b, (slice(None), to_rows, to_columns), (slice(None), of_rows, of_columns)

    def _convolved(self, weight: Tensor, x: Tensor) -> Tensor:
        """`[K, X, R, N]` to `[K, X, rows, N]`, each with its own weight `[K, X, cq, ck]`."""
        found = x.new_zeros(*x.shape[:-2], self.rows, x.shape[-1])
        for a, b, to, of in self._taps():
            found[:, *to].addcmul_(x[:, *of], weight[..., a, b, None, None])
        return found

    def _transposed(self, weight: Tensor, x: Tensor) -> Tensor:
        """`[K, X, rows, N]` to `[K, X, R, N]`: the gradient of `_convolved`, zero where no score is seen."""
        found = x.new_zeros(*x.shape[:-2], *self.s.shape[-2:])
        for a, b, to, of in self._taps():
            found[:, *of].addcmul_(x[:, *to], weight[..., a, b, None, None])
        return found.masked_fill(~self.seen, 0)


def undecided(c: Tensor, variance: Tensor) -> Tensor:
    """Rows `[X, rows]` of whose scores several may be the largest within rounding, and by far."""
    error = CERTAIN * variance.sqrt()
    least = (c - error).amax(-1, keepdim=True)
    in_play = (c + error > least - NEGLIGIBLE) & c.isfinite()
    return ((variance > WILD**2) & in_play).any(-1) & (in_play.sum(-1) > 1)
