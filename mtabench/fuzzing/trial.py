"""One case: its calls and all checks of their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mta_kernels.conv_attention import unsupported
from mtabench.environment import device_works
from mtabench.fuzzing import checks
from mtabench.fuzzing.calls import BACKENDS, PUBLIC, Call, Operation, Results
from mtabench.fuzzing.cases import FuzzCase
from mtabench.fuzzing.checks import Wrong
from mtabench.fuzzing.inputs import Inputs, expected, make_inputs
from mtabench.fuzzing.mta_calls import backend_of
from mtabench.fuzzing.poison import fill_free_blocks
from mtabench.fuzzing.probes import probe_of
from mtabench.problem.inputs import DTYPES, use_full_float32

LONGEST_REFUSAL = 500


@dataclass
class Outcome:
    """What became of a case: wrong if anything is in `wrong`; `broken` if the GPU's context is lost as well."""

    case: FuzzCase
    wrong: list[Wrong] = field(default_factory=list)
    refused: bool = False
    broken: bool = False


def prepare(device: str) -> None:
    """Once a process: products in full float32, and one thread for PyTorch where processes share the cores."""
    use_full_float32()
    torch.set_num_threads(1)
    if device == "cuda":
        torch.backends.cudnn.benchmark = False  # which would time each shape once


def try_case(case: FuzzCase, operation: Operation = PUBLIC) -> Outcome:
    """Run a case and check it; whatever its call raises is an outcome."""
    outcome = Outcome(case)
    try:
        inputs = make_inputs(case)
        reason, has_kernel = _refusal(case, inputs), _has_kernel(case, inputs)
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
        outcome.wrong += _checked(inputs, call, results, operation, has_kernel)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:LONGEST_REFUSAL]
        outcome.wrong.append(Wrong("crash", f"{type(error).__name__}: {text}"))
        outcome.broken = not device_works(case.device)
    return outcome


def _checked(inputs: Inputs, call: Call, results: Results, operation: Operation, has_kernel: bool) -> Iterator[Wrong]:
    case, want = inputs.case, expected(inputs)

    def errors(results: Results) -> Iterator[Wrong]:
        return checks.errors(results, want, DTYPES[case.dtype], lambda: _eager(inputs))

    if has_kernel:
        yield from errors(results)
    for name in call.changed():
        yield Wrong("argument written", f"the call writes into the memory of {name}")
    if case.twice and _promises_the_same_bits(case):
        repeated = _again(inputs, operation)
        yield from checks.same(results, repeated, "same bits twice", "another call with the same numbers")
    probe = probe_of(inputs)
    if probe is not None:
        changed = _again(inputs, operation, probe.values)
        yield from checks.same(results, changed, probe.check, probe.text, probe.rows)
        close = {
            name: torch.where(probe.close[name], x, results[name]) for name, x in changed.items() if name in probe.close
        }
        for wrong in errors(close) if has_kernel else ():
            yield Wrong(probe.check, f"with {probe.text} changed, {wrong.text}")


def _again(inputs: Inputs, operation: Operation, values: Mapping[str, Tensor] | None = None) -> Results:
    """A second call, plainly: on a CPU without the backward, which takes the interpreter long."""
    case = inputs.case
    if case.way in ("again", "stream", "graph"):
        case = replace(case, way="plain")
    return Call(Inputs(case, inputs.values), operation, values).run(gradients=case.device != "cpu")


def _eager(inputs: Inputs) -> Results:
    """By the reference in the case's dtype, called plainly."""
    case = replace(inputs.case, backend="eager", way="plain", splits="auto", layouts=(), head_chunk=None)
    return Call(Inputs(case, inputs.values)).run_plainly()


def _has_kernel(case: FuzzCase, inputs: Inputs) -> bool:
    """Whether "auto" finds a kernel for it, and is not eager; Triton's take all that others do."""
    if case.backend != "auto":
        return True
    if case.parts is not None:
        return backend_of(case, Call(inputs).tensors, "auto") != "reference"
    return _conv_refusal(case, "triton") is None


def _refusal(case: FuzzCase, inputs: Inputs) -> str | None:
    """Why its backend says that it cannot run it."""
    if case.backend == "auto":
        return None
    if case.parts is None:
        return _conv_refusal(case, case.backend)
    try:
        backend_of(case, Call(inputs).tensors, BACKENDS.get(case.backend, case.backend))
    except ValueError as error:
        return str(error)
    return None


def _conv_refusal(case: FuzzCase, backend: str) -> str | None:
    return unsupported(
        BACKENDS.get(backend, backend),
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
