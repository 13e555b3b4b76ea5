"""Other inputs at the addresses of the first ones, of whose result enough is known without a reference.

A probe changes a case's inputs in place, is shown what the same closure gives then, and changes them back. Together
they check all rows of all heads at the timed length, which no float64 reference could. They also find closures that
remember earlier results.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from mtabench.checking.oracle import MIXER_GRADIENTS, finished, row_errors
from mtabench.checking.sample import border_near
from mtabench.problem.case import Case
from mtabench.problem.inputs import FINISHERS, Inputs, unnoticed

FEWEST_TOKENS = 3  # after which what comes is changed, in one call or several
HEADS_AT_ONCE = 8
KEY_ROWS = 64  # queries that are turned to the first key
KEY_SCORE = 64.0  # of them with it, where those with others are about 1
# Of convolutions and mixings, beside an identity: of scores, and of probabilities, where all that is mixed in shows.
OTHER_SCORES, OTHER_PROBABILITIES = 0.05, 0.005
# Of a gate's weight: by a whole one, the sigmoid of a large sum changes many times as much as what goes into it.
GATE_SHARE = 1 / 16
# Whether the key counts, not how exactly. Of 64 short heads, 16 x 31 taps behind the softmax mix in 0.06 of a
# value, and 0.035 of its dv. An output without the key is off by 1. Of dv it is the root of the share of rows without.
KEY_ERRORS = {"fwd": 0.25, "decode": 0.25, "bwd": 0.1}
BEYOND_LENGTH = 64.0  # how much longer keys are made that must not count

Results = Sequence[Tensor]


class Probe(Protocol):
    """One change of inputs, and what it does to a right result: `[out]`, or gradients of q, k, v and the mixers."""

    @property
    def alters(self) -> bool:
        """Whether a right result is another than before."""

    def change(self, inputs: Inputs) -> Inputs:
        """Change q, k, v, the mixers and lengths in place; the inputs returned may have another dout."""

    def undo(self, inputs: Inputs) -> None:
        """Change them back, bit for bit."""

    def fault(self, first: Results, results: Results) -> str:
        """What is wrong with `results` of the changed inputs, `first` being of those before; or an empty text."""


def make_probes(case: Case, inputs: Inputs, seed: int, row_tolerances: Mapping[str, float]) -> list[Probe]:
    """The probes that suit a case, drawn from the run's seed; `row_tolerances` are the oracle's."""
    random = Random(f"probes {seed} {case.problem_key}")
    probes: list[Probe] = []
    if case.operation.causal and case.pass_ != "decode" and case.seq > 1:
        probe = _Future if case.pass_ == "fwd" else _FutureGradients
        probes += [probe(tokens.to(case.device)) for tokens in _tokens(case, random)]
    heads = _Heads(case, random, row_tolerances)
    if heads.moves:
        probes.append(heads)
    return [*probes, _FirstKey(case, inputs, random)]


@contextmanager
def changed(probe: Probe, inputs: Inputs) -> Iterator[Inputs]:
    """Within, the inputs as the probe changes them."""
    with torch.no_grad():
        other = probe.change(inputs)
        inputs.refresh()
    try:
        yield other
    finally:
        with torch.no_grad():
            probe.undo(inputs)
            inputs.refresh()


def _tokens(case: Case, random: Random) -> Iterator[Tensor]:
    """Tokens `[B, Hkv]` after which each head's inputs change: the last but one, before borders, and any.

    Heads that are mixed change after the same token.
    """
    heads = 1 if case.mixings else case.kv_heads
    groups, most = case.batch * heads, case.seq - 2
    tokens = [most, min(most, border_near(case.seq, random) - 1)]
    tokens += [random.randint(0, most) for _ in range(max(FEWEST_TOKENS, groups) - len(tokens))]
    for start in range(0, len(tokens), groups):
        of_call = (tokens[start : start + groups] * groups)[:groups]
        random.shuffle(of_call)
        yield torch.tensor(of_call).view(case.batch, heads).expand(-1, case.kv_heads)


def _after(tokens: Tensor, x: Tensor) -> Tensor:
    """Where `x [B, H, N, D]` lies after the tokens of its KV heads: `[B, H, N]`."""
    of_heads = tokens.repeat_interleave(x.shape[1] // tokens.shape[1], dim=1)
    return torch.arange(x.shape[2], device=x.device) > of_heads[..., None]


def _first_leak(leaked: Tensor, tokens: Tensor) -> tuple[list[int], int]:
    """The first place of `leaked [B, H, N]`, and the token of its KV head."""
    sequence, head, row = leaked.nonzero()[0].tolist()
    return [sequence, head, row], int(tokens[sequence, head * tokens.shape[1] // leaked.shape[1]])


@dataclass(frozen=True, slots=True, eq=False)
class _Future:
    """q, k and v are negated after a token of each KV head: no output up to there may change, and the next one must."""

    alters: ClassVar[bool] = True
    tokens: Tensor

    def change(self, inputs: Inputs) -> Inputs:
        for x in (inputs.q, inputs.k, inputs.v):
            unnoticed(x).mul_(torch.where(_after(self.tokens, x), -1, 1)[..., None])
        return inputs

    def undo(self, inputs: Inputs) -> None:
        self.change(inputs)

    def fault(self, first: Results, results: Results) -> str:
        (before,), (out,) = first, results
        after, same = _after(self.tokens, out), (before == out).all(-1)
        leaked = ~same & ~after
        if leaked.any():
            place, token = _first_leak(leaked, self.tokens)
            return f"tokens after {token} change the output of row {place}: it is not causal"
        unchanged = same & after & ~_after(self.tokens + 1, out)
        if unchanged.any():
            row = unchanged.nonzero()[0].tolist()
            return f"another query, key and value of its own change nothing of row {row}"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class _FutureGradients:
    """dout is zero after a token of each KV head: so are then the gradients of all that comes after it, exactly."""

    alters: ClassVar[bool] = True
    tokens: Tensor

    def change(self, inputs: Inputs) -> Inputs:
        assert inputs.dout is not None
        return replace(inputs, dout=inputs.dout * ~_after(self.tokens, inputs.dout)[..., None])

    def undo(self, inputs: Inputs) -> None:
        """Nothing was changed in place."""

    def fault(self, first: Results, results: Results) -> str:
        for name, gradient in zip(("dq", "dk", "dv"), results, strict=False):
            leaked = (gradient != 0).any(-1) & _after(self.tokens, gradient)
            if leaked.any():
                place, token = _first_leak(leaked, self.tokens)
                return f"{name} is not zero at {place}, though only outputs up to token {token} have gradients"
        return ""


class _Heads:
    """Sequences, KV heads and the query heads of each take other places: so do all results, whatever the head."""

    alters = True

    def __init__(self, case: Case, random: Random, row_tolerances: Mapping[str, float]) -> None:
        group = case.heads // case.kv_heads
        self._batch = _rolled(case.batch, random).to(case.device)
        # Groups of heads that are mixed among themselves move as wholes, of so many KV heads.
        sizes = [case.heads // mix.groups for mix in case.mixings if mix.groups > 1]
        whole = math.lcm(group, *sizes) // group if sizes else 1
        blocks = _rolled(case.kv_heads // whole, random)
        self._kv_heads = (blocks[:, None] * whole + torch.arange(whole)).flatten().to(case.device)
        in_group = (torch.arange(group) if sizes else _rolled(group, random)).to(case.device)
        self._heads = (self._kv_heads[:, None] * group + in_group).flatten()
        self.moves = case.batch > 1 or not torch.equal(self._heads, self._heads.sort()[0])
        self._allowed = {name: 2 * tolerance for name, tolerance in row_tolerances.items()}

    def change(self, inputs: Inputs) -> Inputs:
        self._move(inputs, self._batch, self._heads, self._kv_heads)
        return inputs

    def undo(self, inputs: Inputs) -> None:
        self._move(inputs, *map(torch.argsort, (self._batch, self._heads, self._kv_heads)))

    def fault(self, first: Results, results: Results) -> str:
        for (name, allowed), before, after in zip(self._allowed.items(), first, results, strict=True):
            heads = self._kv_heads if name in ("dk", "dv") else self._heads
            of_mixer = name in MIXER_GRADIENTS
            if of_mixer:
                moved = before if name[1:] in FINISHERS else _moved(before, heads)
                before, after = (x.reshape(len(x), 1, -1) for x in (moved, after))
                place = torch.arange(len(after), device=after.device)
            else:
                place = (self._batch[:, None] * before.shape[1] + heads).flatten()
                before, after = before.flatten(0, 1), after.flatten(0, 1)
            errors = _moved_errors(before, after, place)
            error, worst = errors.flatten().max(0)
            if not error <= allowed:
                head, row = divmod(int(worst), errors.shape[1])
                where = f"head {head}" if of_mixer else f"row {[*divmod(head, len(heads)), row]}"
                return (
                    f"{name} of {where} is off by {error:.2g} of what the same inputs gave as those of another head; "
                    f"allowed is {allowed:.2g}"
                )
        return ""

    def _move(self, inputs: Inputs, batch: Tensor, heads: Tensor, kv_heads: Tensor) -> None:
        for x, of_heads in ((inputs.q, heads), (inputs.k, kv_heads), (inputs.v, kv_heads), (inputs.dout, heads)):
            if x is not None:
                unnoticed(x).copy_(x[batch[:, None], of_heads])
        for name, x in inputs.mixers.items():
            if name not in FINISHERS:
                x.copy_(_moved(x, heads))


def _moved(mixer: Tensor, heads: Tensor) -> Tensor:
    """A mixer, or its gradient, whose heads have taken other places: groups of heads that are mixed as wholes."""
    if mixer.dim() == 2:
        return mixer[heads][:, heads]
    size = len(heads) // len(mixer)  # heads of a group, 1 for a convolution
    return mixer[heads[::size] // size]


def _rolled(count: int, random: Random) -> Tensor:
    """The numbers below `count`, each at another place if there are several."""
    return torch.arange(count).roll(random.randrange(1, count) if count > 1 else 0)


def _moved_errors(before: Tensor, after: Tensor, place: Tensor) -> Tensor:
    """Errors `[H, R]` of the rows of `after [H, R, D]` against `before[place]`, a few heads at a time."""
    errors = []
    for start in range(0, len(place), HEADS_AT_ONCE):
        here = slice(start, start + HEADS_AT_ONCE)
        expected = before[place[here]].float()
        norms, differences = (x.norm(dim=-1).double() for x in (expected, after[here].float() - expected))
        errors.append(row_errors(differences.flatten(), norms.flatten()).view_as(differences))
    return torch.cat(errors)


class _FirstKey:
    """Some queries, late ones among them, and the first key point the same way: their output is the first value.

    The mixers are nearly the identity then. Norm and gate follow, the gate with a small weight. Backward, dv of the
    first value is the sum of those rows' dout, taken back through them. In a decode step with lengths some tokens lie
    beyond them, whose keys would win if they counted.
    """

    def __init__(self, case: Case, inputs: Inputs, random: Random) -> None:
        self._case, self._undone = case, ExitStack()
        gate = inputs.gate_weight
        self._finishers = replace(inputs, gate_weight=None if gate is None else gate.detach() * GATE_SHARE)
        self._v, self._dout = inputs.v, inputs.dout
        generator = torch.Generator().manual_seed(random.getrandbits(32))
        code = torch.randint(0, 2, (case.head_dim,), generator=generator) * 2.0 - 1
        self._code = code.to(case.device, inputs.q.dtype)
        self._rows = torch.tensor(_key_rows(inputs.q.shape[2], random), device=case.device)
        self._key = self._code * (KEY_SCORE / math.sqrt(case.head_dim))
        self._lengths: list[int] = []
        window = inputs.q.shape[2]
        if case.pass_ == "decode" and case.op == "conv-attention" and case.seq > window:
            self._lengths = [random.randint(window, case.seq - 1) for _ in range(case.batch)]

    @property
    def alters(self) -> bool:
        return self._case.seq > 1  # the output of a row that sees one key is its value, whatever query and key are

    def change(self, inputs: Inputs) -> Inputs:
        everywhere = (slice(None), slice(None))
        self._overwrite(unnoticed(inputs.q), (*everywhere, self._rows), self._code)
        self._overwrite(unnoticed(inputs.k), (*everywhere, 0), self._key)
        operation = self._case.operation
        taps = {"weight": operation.pre_conv, "post_conv": operation.post_conv}
        for name, x in inputs.mixers.items():
            if name in FINISHERS:
                continue
            others = x * (OTHER_SCORES if name in ("weight", "pre_mix") else OTHER_PROBABILITIES)
            if step := taps.get(name):
                others[:, -1, step.pad] += 1
            else:
                others.diagonal(dim1=-2, dim2=-1).add_(1)
            self._overwrite(x, (slice(None),), others)
        if inputs.gate_weight is not None and self._finishers.gate_weight is not None:
            self._overwrite(inputs.gate_weight, (slice(None),), self._finishers.gate_weight)
        for sequence, length in enumerate(self._lengths):
            assert inputs.lengths is not None
            self._overwrite(inputs.lengths, (sequence,), length)
            inputs.k[sequence, :, length:] *= BEYOND_LENGTH
            self._overwrite(inputs.k, (sequence, slice(None), length), 2 * self._key)
        if inputs.dout is None:
            return inputs
        dout = torch.zeros_like(inputs.dout)
        dout[:, :, self._rows] = inputs.dout[:, :, self._rows]
        return replace(inputs, dout=dout)

    def undo(self, inputs: Inputs) -> None:
        self._undone.close()
        for sequence, length in enumerate(self._lengths):
            inputs.k[sequence, :, length:] /= BEYOND_LENGTH

    def _overwrite(self, x: Tensor, place: tuple, value: Tensor | float) -> None:
        self._undone.callback(x.__setitem__, place, x[place].clone())
        x[place] = value

    def fault(self, first: Results, results: Results) -> str:
        if self._dout is not None:
            return self._gradient_fault(results)
        out = results[0][:, :, self._rows if self._case.pass_ == "fwd" else slice(None)].float()
        value = self._v[:, :, :1].detach().float().repeat_interleave(out.shape[1] // self._v.shape[1], dim=1)
        value = finished(self._case, self._finishers, value)
        errors = (out - value).norm(dim=-1) / value.norm(dim=-1)
        error, worst = errors.flatten().max(0)
        if error <= KEY_ERRORS[self._case.pass_]:
            return ""
        sequence, rest = divmod(int(worst), errors.shape[1] * errors.shape[2])
        head, row = divmod(rest, errors.shape[2])
        where = [sequence, head] + ([self._rows[row].item()] if self._case.pass_ == "fwd" else [])
        why = "the first key does not count"
        why += ", or one beyond the sequence's length does" if self._lengths else ""
        return f"out at {where} is off by {error:.2g} of the first value, to whose key its query points: {why}"

    def _gradient_fault(self, results: Results) -> str:
        assert self._dout is not None
        dv = results[2][:, :, 0].float()
        of_heads = self._dout[:, :, self._rows].float().sum(2, keepdim=True)
        with torch.enable_grad():
            value = self._v[:, :, :1].detach().float().repeat_interleave(of_heads.shape[1] // dv.shape[1], dim=1)
            value.requires_grad_()
            (of_values,) = torch.autograd.grad(finished(self._case, self._finishers, value), value, of_heads)
        expected = of_values[:, :, 0].unflatten(1, (dv.shape[1], -1)).sum(2)
        error = ((dv - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
        if error <= KEY_ERRORS["bwd"]:
            return ""
        return (
            f"dv of the first token is off by {error:.2g} of the sum of dout of the queries that point to its key: the "
            "first key does not count"
        )


def _key_rows(rows: int, random: Random) -> list[int]:
    """All rows of a few; else the first, the last, those at a border, and any, the late ones twice as often."""
    if rows <= KEY_ROWS:
        return list(range(rows))
    border = border_near(rows, random)
    chosen = {0, border - 1, border, rows - 2, rows - 1}
    late = random.sample(range(rows // 2, rows), KEY_ROWS // 2)
    return sorted(chosen | {*late, *random.sample(range(rows), KEY_ROWS // 4)})
