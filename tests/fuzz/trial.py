"""One case: its calls and all checks of their results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fuzz import checks
from fuzz.calls import BACKENDS, PUBLIC, Call, Operation, Results, backend_of
from fuzz.cases import FuzzCase
from fuzz.checks import Wrong
from fuzz.inputs import Inputs, Wanted, make_inputs
from fuzz.poison import fill_free_blocks
from fuzz.probes import probe_of
from mta_kernels.conv_attention import unsupported
from mta_kernels.nvrtc.compiler import Source
from mtabench.environment import device_works
from mtabench.problem.inputs import DTYPES, use_full_float32

LONGEST_REFUSAL = 500
THOROUGH = 20  # cases, of which one has all its errors compared with what rounding may leave
# Numbers that rounding throws far are of one draw of the values, and wrong kernels are wrong for others, too.
REPEATS = 3


@dataclass
class Outcome:
    """What became of a case: wrong if anything is in `wrong`; `broken` if the GPU's context is lost as well."""

    case: FuzzCase
    wrong: list[Wrong] = field(default_factory=list)
    refused: bool = False
    close_look: bool = False
    marginal: bool = False  # errors were beyond their bounds, but less than twice, and not again with other values
    broken: bool = False


def prepare(device: str, worker: int = 0) -> None:
    """Once a process: full float32, one thread for PyTorch where processes share the cores, a GPU of several."""
    use_full_float32()
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(worker % torch.cuda.device_count())
        torch.backends.cudnn.benchmark = False  # which would time each shape once
        _note_kernels()


_kernels: set[str] = set()


def _note_kernels() -> None:
    """From now on note the name of what Triton or NVRTC compiles, or finds compiled."""
    import triton

    file_name = Source.file_name.fget

    def noted(source: Source) -> str:
        name = file_name(source)
        _kernels.add(name)
        return name

    Source.file_name = property(noted)  # type: ignore[method-assign]
    triton.knobs.compilation.listener = lambda metadata, **_: _kernels.add(metadata["hash"])


def new_kernels() -> tuple[str, ...]:
    """The kernels that this process has run first since the last call."""
    found = tuple(sorted(_kernels - _reported))
    _reported.update(found)
    return found


_reported: set[str] = set()


def try_case(case: FuzzCase, operation: Operation = PUBLIC, *, thorough: bool = False) -> Outcome:
    """Run a case and check it, again with other values if errors alone are just beyond their bounds.

    A `thorough` trial compares the gradients of a probe's call on a CPU, too.
    """
    outcome = _tried_until_it_fits(case, operation, thorough)
    if outcome.wrong and all(wrong.marginal for wrong in outcome.wrong):
        again = (_tried_until_it_fits(replace(case, repeat=1 + i), operation, thorough) for i in range(REPEATS))
        if all(wrong.slight for repeated in again for wrong in repeated.wrong):
            return replace(outcome, wrong=[], marginal=True)
    return outcome


def _tried_until_it_fits(case: FuzzCase, operation: Operation, thorough: bool) -> Outcome:
    """Whatever its call raises is an outcome, but for memory that other processes have."""
    for wait_s in (1, 5, 20):
        try:
            return _tried(case, operation, thorough)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            time.sleep(wait_s)
    with torch.backends.cudnn.flags(enabled=False):  # whose workspace for a definition's convolution may be 96 GiB
        return _tried(case, operation, thorough)


def _tried(case: FuzzCase, operation: Operation, thorough: bool) -> Outcome:
    outcome = Outcome(case)
    try:
        inputs = make_inputs(case)
        reason = _refusal(inputs)
        has_kernel = case.backend != "auto" or _refusal(inputs, "triton") is None
        if case.way == "graph" and not has_kernel:  # the reference asks for numbers on the host
            inputs = Inputs(replace(case, way="plain"), inputs.values)
        call = Call(inputs, operation)
        call.keep()
        if case.device == "cuda":
            fill_free_blocks()
        try:
            results = call.run()
        except (ValueError, TypeError) as error:
            outcome.refused = True
            text = str(error)
            if reason is None:
                outcome.wrong.append(Wrong("refused", f"refused, though it can run: {text}"))
            elif "\n" in text or len(text) > LONGEST_REFUSAL:
                outcome.wrong.append(Wrong("refused", f"refused in more than a sentence: {text[:LONGEST_REFUSAL]}"))
            return outcome
        if reason is not None:
            outcome.wrong.append(Wrong("refused", f"ran, though it says that it cannot: {reason}"))
        want = Wanted(inputs)
        outcome.wrong += _checked(inputs, call, results, want, operation, has_kernel, thorough)
        outcome.close_look = "variance" in vars(want)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:LONGEST_REFUSAL]
        outcome.wrong.append(Wrong("crash", f"{type(error).__name__}: {text}"))
        outcome.broken = not device_works(case.device)
    return outcome


def _checked(
    inputs: Inputs, call: Call, results: Results, want: Wanted, operation: Operation, has_kernel: bool, thorough: bool
) -> Iterator[Wrong]:  # fmt: skip
    case = inputs.case
    if has_kernel:
        yield from checks.errors(results, want, DTYPES[case.dtype], lambda: _eager(inputs), case.number % THOROUGH == 0)
    for name in call.changed():
        yield Wrong("argument written", f"the call writes into the memory of {name}")
    if case.twice and _promises_the_same_bits(case):
        beside = case.device == "cuda" and case.way == "plain" and case.number % 2 > 0
        repeated = _again(inputs, operation, way="stream" if beside else "plain")
        yield from checks.same(results, repeated, "same bits twice", "another call with the same numbers")
    probe = probe_of(inputs)
    if probe is not None and (has_kernel or case.device == "cpu"):
        changed = _again(inputs, operation, probe.values, gradients=thorough and {*probe.rows} > {"out"})
        yield from checks.same(results, changed, probe.check, probe.text, probe.rows)


def _again(
    inputs: Inputs, operation: Operation, values: Mapping[str, Tensor] | None = None, way: str = "plain",
    gradients: bool = False,
) -> Results:  # fmt: skip
    """A second call, at other addresses: in Triton's interpreter a backward, which takes long, only for `gradients`."""
    case = inputs.case
    if case.way in ("again", "stream", "graph", "plain"):
        case = replace(case, way=way)
    return Call(Inputs(case, inputs.values), operation, values).run(
        gradients=gradients or case.device == "cuda" or case.backend == "eager"
    )


def _eager(inputs: Inputs) -> Results:
    """By the reference in the case's dtype, called plainly."""
    case = replace(inputs.case, backend="eager", way="plain", splits="auto", layouts=(), head_chunk=None)
    return Call(Inputs(case, inputs.values)).run_plainly()


def _refusal(inputs: Inputs, backend: str | None = None) -> str | None:
    """Why its backend, or another one, says that it cannot run it."""
    case = inputs.case
    name = backend or BACKENDS.get(case.backend, case.backend)
    if name == "auto":
        return None
    if case.parts is not None:
        try:
            backend_of(case, inputs.values, name)
        except ValueError as error:
            return str(error)
        return None
    return unsupported(
        name,
        device=case.device,
        dtype=DTYPES[case.dtype],
        head_dim=case.head_dim,
        query_taps=case.query_taps,
        key_taps=case.key_taps,
        backward=case.pass_ == "bwd",
        decode=case.pass_ == "decode",
    )


def _promises_the_same_bits(case: FuzzCase) -> bool:
    """The fused kernels add in an order of their own; on a GPU eager PyTorch does not promise that."""
    return case.device == "cpu" or case.backend in ("triton", "hopper", "cuda")
