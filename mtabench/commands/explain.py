"""The command `explain`: the kernels of a cell, and the least time of its work."""

import math
from dataclasses import replace

from rich.console import Console

from mta_kernels.plan import KernelCall
from mtabench.console import make_console, say, significant
from mtabench.errors import UsageError
from mtabench.prediction.devices import Device, Rates, find_device, rates_of
from mtabench.prediction.memory import expected_memory_bytes, input_bytes, longest_seq
from mtabench.prediction.predict import Prediction, predict, unpredicted
from mtabench.problem.axes import short
from mtabench.problem.case import Case
from mtabench.registry import implementation_of
from mtabench.sweeps.plan import Options, make_plan
from mtabench.tables import Cell, Column, as_columns, print_columns, print_prose

MOST_CELLS = 40
RULE = (
    "rule: a call takes at least max(FLOPs at the rate of products, bytes at the rate of copies) + 2 us a launch; "
    "bytes are those of the tensors that its kernels take"
)
HEADINGS = ("kernel", "language", "launches", "blocks", "threads", "shared\nKiB", "MB")


def run(options: Options, device_name: str | None) -> int:
    """Print the prediction of each cell of the axes; raises UsageError for what there is no prediction of."""
    cases = make_plan(replace(options, impl=options.impl or "auto"), device="cuda").cases
    if len(cases) > MOST_CELLS:
        raise UsageError(f"these axes have {len(cases)} cells, and explain takes at most {MOST_CELLS}; name fewer")
    device = _device(device_name)
    rates = rates_of(device)
    console = make_console()
    print_prose(console, RULE)
    print_prose(console, _limits(device, rates))
    for case in cases:
        say(console, "")
        print_prose(console, _title(case), style="bold")
        if reason := unpredicted(case, device):
            print_prose(console, f"no prediction: {reason}")
        else:
            _explain(console, case, device, rates)
    return 0


def _explain(console: Console, case: Case, device: Device, rates: Rates) -> None:
    prediction = predict(case, device, rates)
    if prediction.calls:
        print_columns(console, _kernels_table(prediction))
    work = implementation_of(case).work
    print_prose(
        console, f"{prediction.flops / 1e9:.4g} GFLOP, {prediction.moved_bytes / 1e6:.4g} MB through memory: "
        f"at least {significant(prediction.seconds * 1e3)} ms, by {prediction.bound_by}",
    )  # fmt: skip
    needed = input_bytes(case) + expected_memory_bytes(case, work)
    longest = longest_seq(case, work, device.memory_bytes)
    print_prose(
        console,
        f"memory: {needed / 1e9:.3g} GB with its inputs; at most {short(longest)} tokens a sequence fit in "
        f"{device.memory_bytes / 1e9:.4g} GB",
    )


def _limits(device: Device, rates: Rates) -> str:
    products, copies = f"{2 * rates.macs / 1e12:.4g} TFLOP/s", f"{rates.memory_bytes / 1e9:.4g} GB/s"
    return f"on {device.name}: products at {products}, copies at {copies}, {rates.source}"


def _kernels_table(prediction: Prediction) -> list[Column]:
    """A row a kernel in the order of their first launches: of the largest launch, and the bytes of all."""
    launches: dict[tuple[str, str], list[KernelCall]] = {}
    for call in prediction.calls:
        launches.setdefault((call.name.removeprefix("_").removesuffix("_kernel"), call.language), []).append(call)
    rows: list[list[Cell]] = []
    for (name, language), calls in launches.items():
        largest = max(calls, key=lambda call: math.prod(call.grid))
        blocks = f"{math.prod(largest.grid):,}" if largest.grid else ""
        shared = significant(largest.shared_memory / 1024, 3) if largest.shared_memory else ""
        megabytes = significant(sum(call.bytes for call in calls) / 1e6, 3)
        rows.append([name, language, str(len(calls)), blocks, str(largest.threads or ""), shared, megabytes])
    found = as_columns(HEADINGS, rows, ("kernel", "language"))
    return [column for column in found if any(map(str, column.texts))]


def _device(name: str | None) -> Device:
    """The named device, or this machine's GPU."""
    if name is not None:
        return find_device(name)
    import torch

    if not torch.cuda.is_available():
        raise UsageError("explain plans for a GPU, and PyTorch finds none here; name one: --device-name h200")
    return find_device(torch.cuda.get_device_name())


def _title(case: Case) -> str:
    grouped = f" (KV {case.kv_heads})" if case.kv_heads != case.heads else ""
    steps = f", {case.steps}" if case.steps else ""
    causal = "" if case.operation.causal else ", not causal"
    return (
        f"{case.pass_} {case.label}: {case.dtype} {case.batch} x {case.heads} heads{grouped} of {case.head_dim}, "
        f"seq {short(case.seq)}{steps}{causal}"
    )
