"""Checks without timing: errors against float64, and the properties that any correct implementation has.

On a machine without a GPU the Triton kernels run in Triton's interpreter, on small shapes, in fp32 and fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from mta_kernels.operation import PAGE_SIZES, Operation
from mtabench.checking.judge import Judge, results_of
from mtabench.checking.oracle import Check, Oracle
from mtabench.environment import let_triton_interpret
from mtabench.errors import UnsupportedError
from mtabench.measuring.failures import WrongResultError
from mtabench.problem.case import Case
from mtabench.problem.inputs import SEED, Inputs, make_inputs
from mtabench.problem.operations import PLAIN, Taps, group_sizes, make_operation, op_of
from mtabench.registry import Implementation, every, implementation_of, names

OTHER_SCALE = 0.4  # times the usual one


@dataclass(frozen=True, slots=True)
class CheckedShape:
    """A shape to check: heads share KV heads, and head dims need not be powers of two."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    head_dim: int
    query_taps: int
    key_taps: int
    causal: bool = True
    # Of the whole multi-token attention: mixings, norm and gate as typed, the taps after the softmax, and whether there
    # is a convolution before it.
    mix: str = ""
    post_conv: Taps | None = None
    convolved: bool = True
    norm: str = ""
    gate: str = ""

    def operation(self, op: str) -> Operation:
        """The operation of this shape for an implementation of `op`; without the steps that `op` lacks."""
        conv = (self.query_taps, self.key_taps) if self.convolved and op != PLAIN else None
        more = (self.mix, self.post_conv, self.norm, self.gate) if op == "mta" else ("", None)
        return make_operation(conv, *more, heads=self.heads, head_dim=self.head_dim, causal=self.causal)


@dataclass(frozen=True, slots=True)
class CheckFilter:
    """What is checked, where a person says it: entries of one `op`, and steps and sizes in the place of the shapes'.

    Of each kind all values are checked; None keeps the shapes' values. Values are as `axes` parses them. A shape
    keeps its number of heads a KV head.
    """

    op: str | None = None
    convs: Sequence[Taps | None] | None = None
    mixes: Sequence[str] | None = None
    post_convs: Sequence[Taps | None] | None = None
    norms: Sequence[str] | None = None
    gates: Sequence[str] | None = None
    head_dims: Sequence[int] | None = None
    kv_heads: Sequence[int] | None = None
    seqs: Sequence[int] | None = None
    causal: bool | None = None

    def shapes(self, shapes: Iterable[CheckedShape], op: str) -> list[CheckedShape]:
        """The shapes with these steps, each once; without those whose heads cannot be mixed so, or that are no `op`."""
        made: dict[tuple, CheckedShape] = {}
        for shape in shapes:
            own = None if not shape.convolved else (shape.query_taps, shape.key_taps)
            kinds = (
                [own] if self.convs is None else self.convs, self.mixes or [shape.mix],
                [shape.post_conv] if self.post_convs is None else self.post_convs, self.norms or [shape.norm],
                self.gates or [shape.gate], self.head_dims or [shape.head_dim], self.kv_heads or [shape.kv_heads],
                self.seqs or [shape.seq],
            )  # fmt: skip
            for conv, mix, post_conv, norm, gate, head_dim, kv_heads, seq in product(*kinds):
                taps = conv or (shape.query_taps, shape.key_taps)
                other = replace(
                    shape, query_taps=taps[0], key_taps=taps[1], convolved=conv is not None, mix=mix,
                    post_conv=post_conv, norm=norm, gate=gate, head_dim=head_dim, kv_heads=kv_heads,
                    heads=shape.heads // shape.kv_heads * kv_heads, seq=seq,
                    causal=shape.causal if self.causal is None else self.causal,
                )  # fmt: skip
                if all(other.heads % (size or 1) == 0 for size in group_sizes(mix)):
                    operation = other.operation(op)
                    if op_of(operation) == op:
                        made.setdefault((operation, other.batch, other.kv_heads, other.heads, other.seq), other)
        return list(made.values())


SHAPES = {
    "cuda": (
        CheckedShape(2, 4, 2, 1025, 64, 6, 11),
        CheckedShape(2, 4, 4, 512, 128, 6, 11),
        CheckedShape(1, 6, 2, 257, 96, 3, 3),
        CheckedShape(1, 2, 1, 333, 40, 11, 3, causal=False),
    ),
    "cpu": (
        CheckedShape(1, 4, 2, 65, 32, 6, 11),
        CheckedShape(2, 2, 1, 33, 40, 4, 6),
        CheckedShape(1, 2, 2, 33, 16, 11, 3, causal=False),
    ),
}
# Beyond the chunks of 2048 rows that kernels keep; on a CPU what it does in seconds, and an interpreter in a minute.
LONG_SHAPES = {
    "cuda": (CheckedShape(1, 4, 2, 4353, 64, 6, 11), CheckedShape(1, 2, 1, 4261, 160, 4, 2)),
    "cpu": (CheckedShape(1, 2, 1, 1153, 16, 4, 3),),
    "interpreter": (CheckedShape(1, 1, 1, 321, 16, 3, 2),),
}
# The whole multi-token attention: on a small shape every combination of steps that is more than conv attention. Then
# norms and gates, groups of heads, ten heads and long taps.
SMALL = CheckedShape(1, 4, 2, 29, 16, 4, 3)
EVERY_STEP = tuple(
    replace(SMALL, convolved=convolved, mix=mix, post_conv=post_conv)
    for convolved, mix, post_conv in product((False, True), ("", "heads+none", "none+heads", "heads"), (None, (3, 5)))
    if mix or post_conv
)
FINISHED = (
    replace(SMALL, convolved=False, norm="rms"),
    replace(SMALL, gate="one"),
    replace(SMALL, mix="heads", convolved=False, norm="rms", gate="one"),
    replace(SMALL, mix="2", post_conv=(3, 5), norm="depth3", gate="full"),
)
MTA_SHAPES = {
    "cuda": (
        *(replace(shape, batch=2, seq=333, head_dim=64) for shape in (*EVERY_STEP, *FINISHED)),
        CheckedShape(1, 10, 10, 1025, 128, 6, 11, mix="heads", post_conv=(6, 11), norm="rms", gate="one"),
        CheckedShape(1, 16, 4, 513, 96, 6, 11, mix="heads+4", post_conv=(6, 11)),
        CheckedShape(1, 4, 1, 129, 40, 11, 3, causal=False, mix="2", post_conv=(2, 2), norm="depth1", gate="full"),
    ),
    "cpu": (
        *EVERY_STEP,
        *FINISHED,
        CheckedShape(2, 10, 5, 21, 16, 3, 3, mix="5+heads", post_conv=(4, 4)),
        CheckedShape(1, 4, 1, 21, 16, 11, 3, causal=False, mix="2", post_conv=(2, 2)),
    ),
    "interpreter": (
        replace(SMALL, mix="heads", convolved=False),
        replace(SMALL, mix="heads+none", post_conv=(3, 5)),
        CheckedShape(2, 6, 3, 21, 16, 3, 3, causal=False, mix="none+2", post_conv=(2, 2)),
    ),
}
MTA_LONG_SHAPES = {
    "cuda": (
        CheckedShape(1, 4, 2, 4353, 64, 6, 11, mix="heads", post_conv=(6, 11), norm="rms", gate="one"),
        CheckedShape(1, 2, 1, 4261, 160, 1, 1, mix="heads", convolved=False),
    ),
    "cpu": (CheckedShape(1, 2, 1, 321, 16, 4, 3, mix="heads", post_conv=(3, 5), norm="rms", gate="one"),),
    "interpreter": (CheckedShape(1, 2, 1, 321, 16, 3, 2, mix="heads", post_conv=(2, 3)),),
}
DTYPES_CHECKED = {"cuda": ("bf16", "fp16", "fp32"), "cpu": ("fp32", "fp16")}


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One line of `mtabench verify`. `rel_error` and `tolerance` are None where the check is bit for bit."""

    implementation: str
    check: str
    shape: str
    ok: bool
    rel_error: float | None
    tolerance: float | None
    reason: str = ""


def run_checks(
    implementations: Sequence[str] | None = None,
    device: str = "cpu",
    seed: int = SEED,
    dtypes: Sequence[str] | None = None,
    asked: CheckFilter = CheckFilter(),
) -> Iterator[CheckRow]:
    """Check the named implementations (all, if None) on "cuda" or "cpu"; one row a check, as it ends.

    `dtypes` are checked, all of DTYPES_CHECKED if None; problems of one are the same whatever the others.
    `asked` chooses the operations.

    `seed` draws the inputs, and what is checked of long results. An implementation that cannot run there yields one row
    "not checked" with the reason. What raises is wrong.
    """
    let_triton_interpret(device)
    for name in names() if implementations is None else implementations:
        for implementation in every(name):
            if not implementation.of_models and asked.op in (None, implementation.op):
                yield from _of_implementation(implementation, device, seed, dtypes, asked)


def _problems(
    implementation: Implementation, device: str, dtypes: Sequence[str] | None, wanted: CheckFilter
) -> Iterator[tuple[Case, Checks, str | None]]:
    """Each shape and dtype, with its checks or why it cannot be run."""
    where = "interpreter" if device == "cpu" and implementation.interpreted else device
    small, long = (MTA_SHAPES, MTA_LONG_SHAPES) if implementation.op == "mta" else (SHAPES, LONG_SHAPES)
    for shapes, checks_of in ((small.get(where, small[device]), _checks), (long[where], _long_checks)):
        problems = product(wanted.shapes(shapes, implementation.op), dtypes or DTYPES_CHECKED[device])
        for shape, dtype in islice(problems, 1 if implementation.slow_to_compile else None):
            case = _case(implementation, shape, dtype, device)
            why_not = _cannot_run(case)
            yield case, [] if why_not else checks_of(implementation, case), why_not


def _of_implementation(
    implementation: Implementation, device: str, seed: int, dtypes: Sequence[str] | None, wanted: CheckFilter
) -> Iterator[CheckRow]:
    """Every check that can be made there, or the row that says why there is none."""
    checked, unchecked, reason = False, set[str](), "none of the shapes that are checked can have these steps"
    for case, checks, why_not in _problems(implementation, device, dtypes, wanted):
        reason = why_not or reason
        if why_not is None:
            checked = True
            for row in _rows(case, checks, seed):
                if row.shape or row.check not in unchecked:
                    yield row
                if not row.shape:
                    unchecked.add(row.check)
    if not checked:
        yield _not_checked(implementation, f"{implementation.op}: {reason}" if implementation.op == "mta" else reason)
    elif implementation.no_expanded_dout:
        yield _not_checked(implementation, f"dout of one row expanded over all: {implementation.no_expanded_dout}")


def _not_checked(implementation: Implementation, reason: str | None) -> CheckRow:
    return CheckRow(implementation.name, f"not checked: {reason}", "", True, None, None, reason or "")


Checks = list[tuple[str, Callable[[Case, int], Iterable[Check]]]]


def _checks(implementation: Implementation, case: Case) -> Checks:
    """Every check that suits the implementation, for one shape and dtype."""
    passes = _passes(implementation, case)
    checks: Checks = []
    for pass_ in passes:
        checks += [(f"error {pass_}", _of_pass(pass_, _judged)), (f"strided {pass_}", _of_pass(pass_, _strided))]
        checks += [(f"another scale {pass_}", _of_pass(pass_, _scaled))] if pass_ != "bwd" else []
    if "decode" in passes:
        checks.append(("decode is forward's row", _decode_rows))
        checks += [("decode in pages", _of_pass("decode", _paged))] if implementation.pages else []
    if "fwd" in passes and not case.mixings:
        checks.append(("batch and heads apart", _independence))
    elif "fwd" in passes and case.batch > 1:
        checks.append(("batch apart", _independence))
    return checks


def _long_checks(implementation: Implementation, case: Case) -> Checks:
    """The same as before a sweep times a cell, in every pass, for one long shape and dtype."""
    return [(f"long {pass_}", _of_pass(pass_, _judged)) for pass_ in _passes(implementation, case)]


def _passes(implementation: Implementation, case: Case) -> list[str]:
    """The passes of an implementation that can be checked here; a decode step is causal."""
    possible = [pass_ for pass_ in implementation.passes if pass_ != "decode" or case.operation.causal]
    return [pass_ for pass_ in possible if _cannot_run(replace(case, pass_=pass_)) is None]


def _of_pass(pass_: str, check: Callable[[Case, int], Iterable[Check]]) -> Callable[[Case, int], Iterable[Check]]:
    return lambda case, seed: check(replace(case, pass_=pass_), seed)


def _rows(case: Case, checks: Checks, seed: int) -> Iterator[CheckRow]:
    """The result of each check."""
    for name, check in checks:
        try:
            found = list(check(case, seed))
        except UnsupportedError as error:
            yield CheckRow(case.impl, f"not checked: {error}", "", True, None, None, str(error))
            continue
        except WrongResultError as error:
            found = [Check(False, None, 0.0, str(error))]
        except Exception as error:
            text = " ".join(str(error).split())
            notes = "".join(f" ({note})" for note in getattr(error, "__notes__", [])[:1])
            found = [Check(False, None, 0.0, f"{type(error).__name__}: {text}{notes}")]
        if not found:
            continue
        worst = min(found, key=lambda check: (check.ok, -(check.rel_error or 0.0)))
        tolerance = None if worst.rel_error is None else worst.tolerance
        yield CheckRow(case.impl, name, _text(case), worst.ok, worst.rel_error, tolerance, worst.reason)


def _against_float64(case: Case, inputs: Inputs, seed: int) -> Check:
    return Oracle(case, inputs, seed).check(results_of(_build(case, inputs), case, inputs))


def _judged(case: Case, seed: int) -> Iterable[Check]:
    """All that a sweep checks before it times a cell: the error against float64, and the probes."""
    inputs = make_inputs(case, seed)
    yield Judge(case, inputs, seed).first_of(_build(case, inputs), case)


def _strided(case: Case, seed: int) -> Iterable[Check]:
    """Tensors that are views of others: tokens before heads, and all heads or rows at the same memory."""
    inputs = make_inputs(case, seed)
    for views in (tokens_first(inputs), expanded(inputs, with_dout=not implementation_of(case).no_expanded_dout)):
        yield _against_float64(case, views, seed)


def _scaled(case: Case, seed: int) -> Iterable[Check]:
    """Another scale than usual, a negative one where the project defines the operation. A state has the usual one."""
    factor = OTHER_SCALE if case.op == PLAIN else -OTHER_SCALE
    scaled = replace(case, operation=replace(case.operation, scale=factor * case.operation.scale))
    inputs = make_inputs(case, seed)
    if inputs.state is None:
        yield _against_float64(scaled, inputs, seed)


def _paged(case: Case, seed: int) -> Iterable[Check]:
    """Caches in small and in large pages."""
    inputs = make_inputs(case, seed)
    for size in (PAGE_SIZES[0], PAGE_SIZES[-1]):
        paged = replace(case, page_size=size)
        yield Oracle(case, inputs, seed).check(results_of(_build(paged, inputs), paged, inputs))


def _decode_rows(case: Case, seed: int) -> Iterable[Check]:
    """A decode step after `t` tokens equals row `t - 1` of the forward, early and late: of float64's and of its own."""
    case = replace(case, pass_="fwd")
    inputs = make_inputs(case, seed)
    forward = _build(case, inputs)() if "fwd" in implementation_of(case).passes else None
    for tokens in (1, 4, case.seq):
        step = replace(case, pass_="decode", seq=tokens)
        if case.op == "attention" and implementation_of(case).why_not(step):
            continue  # a single key, for cuDNN
        decode = replace(
            inputs,
            q=inputs.q[:, :, tokens - step.window : tokens].contiguous(),
            k=inputs.k[:, :, :tokens].contiguous(),
            v=inputs.v[:, :, :tokens].contiguous(),
            lengths=torch.full((case.batch,), tokens, dtype=torch.int32, device=case.device),
        ).with_state()
        oracle = Oracle(step, decode, seed)
        yield oracle.check(_build(step, decode)())
        if forward is not None:
            yield oracle.check(forward[:, :, tokens - 1 : tokens])


def _independence(case: Case, seed: int) -> Iterable[Check]:
    """Other sequences change nothing, nor do other KV heads, unless heads are mixed."""
    inputs = make_inputs(case, seed)
    before = _output(case, inputs)
    if case.batch > 1:
        after = _output(case, _changed(inputs, first_sequence=case.batch - 1))
        yield _exactly(torch.equal(before[:-1], after[:-1]), "a sequence changes the outputs of others")
    if case.kv_heads > 1 and not case.mixings:
        after = _output(case, _changed(inputs, first_kv_head=case.kv_heads - 1))
        others = slice(None, -(case.heads // case.kv_heads))
        yield _exactly(torch.equal(before[:, others], after[:, others]), "a KV head changes the outputs of others")


def _changed(inputs: Inputs, first_sequence: int = 0, first_kv_head: int = 0) -> Inputs:
    """Other values of q, k and v from that sequence and KV head (and its query heads) on."""

    def change(x: Tensor) -> Tensor:
        first_head = first_kv_head * (x.shape[1] // inputs.k.shape[1])
        changed = x.clone()
        changed[first_sequence:, first_head:].neg_().add_(1)
        return changed

    return replace(inputs, q=change(inputs.q), k=change(inputs.k), v=change(inputs.v))


def _exactly(ok: bool, reason: str) -> Check:
    return Check(ok, None, 0.0, "" if ok else reason)


def _build(case: Case, inputs: Inputs) -> Callable[[], Tensor]:
    return implementation_of(case).build(case, inputs)


def _output(case: Case, inputs: Inputs) -> Tensor:
    """The output of a forward. Raises WrongResultError for another shape, whose parts cannot be compared."""
    out = _build(case, inputs)()
    if out.shape != inputs.q.shape:
        raise WrongResultError(f"out is {list(out.shape)}; expected {list(inputs.q.shape)}")
    return out


def _cannot_run(case: Case) -> str | None:
    """Why a case cannot be checked here. What an interpreter runs is not to be timed, but it can be checked."""
    implementation = implementation_of(case)
    if implementation.interpreted and case.device == "cpu":
        return implementation.interpreted(case)
    if case.device not in implementation.devices:
        return f"{case.impl} runs on {', '.join(implementation.devices)}, not on {case.device}"
    return implementation.why_not(case)


def _case(implementation: Implementation, shape: CheckedShape, dtype: str, device: str) -> Case:
    """A case of the first pass that the implementation has."""
    return Case(
        pass_=implementation.passes[0],
        impl=implementation.name,
        operation=shape.operation(implementation.op),
        dtype=dtype,
        **{name: getattr(shape, name) for name in ("batch", "heads", "kv_heads", "seq", "head_dim")},
        splits=None,
        device=device,
    )


def _text(case: Case) -> str:
    heads = f"{case.heads}" if case.heads == case.kv_heads else f"{case.heads}/{case.kv_heads}"
    words = [case.dtype, f"{case.batch} x {heads} x {case.seq} x {case.head_dim}", case.steps]
    return " ".join(word for word in words if word) + ("" if case.operation.causal else " full")


def tokens_first(inputs: Inputs) -> Inputs:
    """The same values, where q, k, v and dout lie as `[B, N, H, D]`, mixers transposed, lengths two apart."""

    def moved(x: Tensor) -> Tensor:
        if x.dim() == 1:
            apart = torch.stack([x.detach(), torch.zeros_like(x)], 1)[:, 0]
            return apart.requires_grad_(x.requires_grad)
        dims = (1, 2) if x.dim() > 2 else (0, 1)
        return x.detach().transpose(*dims).contiguous().transpose(*dims).requires_grad_(x.requires_grad)

    dout, lengths = inputs.dout, inputs.lengths
    leaves: dict[str, Any] = {name: moved(x) for name, x in inputs.differentiable.items()}
    return Inputs(
        **leaves,
        dout=None if dout is None else moved(dout),
        lengths=None if lengths is None else torch.stack([lengths, torch.zeros_like(lengths)], 1)[:, 0],
    ).with_state()


def expanded(inputs: Inputs, with_dout: bool = True) -> Inputs:
    """All KV heads with the keys and values of the first, and all rows with its dout, which lie in memory once.

    Unless `with_dout`, each row's dout is in memory of its own.
    """

    def expand(x: Tensor, dim: int) -> Tensor:
        return x.detach().narrow(dim, 0, 1).clone().expand_as(x).requires_grad_(x.requires_grad)

    dout = None if inputs.dout is None else expand(inputs.dout, 2)
    if dout is not None and not with_dout:
        dout = dout.contiguous()
    return replace(inputs, k=expand(inputs.k, 1), v=expand(inputs.v, 1), dout=dout).with_state()
