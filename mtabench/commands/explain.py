"""The command `explain`: what the model says of a cell, term by term, beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mtabench.commands import RESULTS_FOLDER
from mtabench.console import make_console, say, significant
from mtabench.errors import UsageError
from mtabench.measuring.kept_ceilings import FILE_NAME, ceilings_of_device
from mtabench.model.devices import Device, Rates, find_device, rates_of
from mtabench.model.kernel import BESIDE, IN_TURN
from mtabench.prediction.memory import expected_memory_bytes, input_bytes, longest_seq
from mtabench.prediction.predict import Prediction, predict, tiles_on, unmodelled
from mtabench.problem.axes import short
from mtabench.problem.case import Case
from mtabench.registry import implementation_of
from mtabench.results.results_file import key_of, key_of_row, read_file
from mtabench.sweeps.plan import Options, make_plan
from mtabench.tables import Cell, Column, as_columns, print_columns, print_prose

MOST_CELLS = 40
RULE = (
    "rule: a kernel takes max(tensor cores + exponentials + CUDA cores, shared memory, L2, memory) + start-up + launch "
    "gaps; kernels follow each other; a call takes at least what the host needs to launch it"
)
# Terms by the headings of their columns.
HEADINGS = ("tensor", "exp", "CUDA\ncores", "shared", "L2", "memory", "start\nup", "gaps")
COUNTS = (
    "what each\nkernel does", "launches", "GMAC", "exp\n1e9", "shared\nmemory GB", "L2\nGB", "memory\nGB"
)  # fmt: skip
TERMS = dict(zip(HEADINGS, (*IN_TURN, *BESIDE, "start-up", "launch gaps"), strict=True))
Measured = dict[tuple[str, ...], tuple[float, Path]]


def run(options: Options, device_name: str | None, results: Sequence[Path], ceilings: Path | None) -> int:
    """Print the prediction of each cell of the axes; raises UsageError for what there is no prediction of."""
    cases = make_plan(replace(options, impl=options.impl or "triton"), device="cuda").cases
    if len(cases) > MOST_CELLS:
        raise UsageError(f"these axes have {len(cases)} cells, and explain takes at most {MOST_CELLS}; name fewer")
    device = _device(device_name)
    measured = _measured(results)
    kept = _kept_ceilings(ceilings, device)
    console = make_console()
    print_prose(console, RULE)
    said = ""  # of the device; the same for all cells, unless ceilings of their dtypes were measured
    for case in cases:
        rates = rates_of(device, *kept.get(case.dtype, ()))
        reason = unmodelled(case, device)
        if not reason and (limits := _limits(device, rates)) != said:
            print_prose(console, limits)
            said = limits
        say(console, "")
        print_prose(console, _title(case), style="bold")
        if reason:
            print_prose(console, f"no prediction: {reason}")
        else:
            _explain(console, case, device, rates, measured)
    return 0


def _explain(console: Console, case: Case, device: Device, rates: Rates, measured: Measured) -> None:
    prediction = predict(case, device, rates, tiles_on(case, device))
    if prediction.tiles:
        print_prose(console, _tiles_line(case, prediction))
    print_columns(console, _counts_table(prediction))
    print_columns(console, _times_table(prediction))
    if beside := [time.kernel.name for time in prediction.kernels if time.kernel.overlapped]:
        print_prose(console, f"exponentials of {' and '.join(beside)} run beside the products, and are not added")
    print_prose(console, _verdict(prediction, measured.get(key_of(case))))
    kernel, term, seconds = prediction.largest
    print_prose(
        console,
        f"largest term: {term} of {kernel}, {_ms(seconds)} ({seconds / prediction.gpu_s:.0%} of the GPU's time)",
    )
    work = implementation_of(case).work
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


def _verdict(prediction: Prediction, found: tuple[float, Path] | None) -> str:
    """Predicted beside measured."""
    text = f"predicted: {_ms(prediction.seconds)}"
    if prediction.host_s:
        waits = ", and the GPU waits for it" if prediction.host_s > prediction.gpu_s else ""
        host = f"the host needs about {_ms(prediction.host_s)} to launch it{waits}"
        text += f" ({_ms(prediction.gpu_s)} on the GPU; {host})"
    if found is None:
        return text
    measured_ms, path = found
    off = prediction.seconds * 1e3 / measured_ms - 1
    return f"{text}; measured: {significant(measured_ms)} ms ({path}), predicted {off:+.1%}"


def _counts_table(prediction: Prediction) -> list[Column]:
    """A row a kernel: what all its launches do, without the columns that are empty."""
    rows = []
    for time in prediction.kernels:
        kernel = time.kernel
        counts = (kernel.macs, kernel.exponentials, kernel.shared_bytes, kernel.l2_bytes, kernel.memory_bytes)
        numbers = (significant(n / 1e9, 3) if n else "" for n in counts)
        rows.append([kernel.name, str(kernel.launches or ""), *numbers])
    return [column for column in as_columns(COUNTS, rows) if any(column.texts)]


def _times_table(prediction: Prediction) -> list[Column]:
    """A row a kernel: what its terms come to, and the terms; "?" where a limit of the device is not known."""
    terms = {
        heading: name
        for heading, name in TERMS.items()
        if any(time.terms[name] or time.terms[name] is None for time in prediction.kernels)
    }
    rows: list[list[Cell]] = [
        [time.kernel.name, _us(time.seconds), time.bound_by[0], *(_us(time.terms[name]) for name in terms.values())]
        for time in prediction.kernels
    ]
    rows.append(["all", Text(_us(prediction.gpu_s), style="bold"), *[""] * (len(terms) + 1)])
    return as_columns(("microseconds", "predicted", "bound by", *terms), rows, ("microseconds", "bound by"))


def _tiles_line(case: Case, prediction: Prediction) -> str:
    tiles = prediction.tiles
    assert tiles is not None
    if case.pass_ == "decode":
        return f"splits: {tiles.splits} ({tiles.source})"
    if case.pass_ == "fwd":
        way = "registers" if tiles.in_registers else tiles.queries
        return f"tiles: {_by(tiles.forward)}, queries in {way} ({tiles.source})"
    return f"tiles: probabilities {_by(tiles.probabilities)}, values' {_by(tiles.value_gradients)} ({tiles.source})"


def _device(name: str | None) -> Device:
    """The named device, or this machine's GPU."""
    if name is not None:
        return find_device(name)
    import torch

    if not torch.cuda.is_available():
        raise UsageError("explain predicts times of a GPU, and PyTorch finds none here; name one: --device-name h200")
    return find_device(torch.cuda.get_device_name())


def _kept_ceilings(path: Path | None, device: Device) -> dict[str, tuple[tuple[float, float], str]]:
    """By dtype the ceilings measured on this device, and where they stand; none without a file."""
    if path is not None and not path.exists():
        raise UsageError(f"there is no file {path}; `mtabench env --measure --out {path}` writes it")
    file = path or RESULTS_FOLDER / FILE_NAME
    found = ceilings_of_device(file, device.name)
    if path is not None and not found:
        raise UsageError(f"{path} says nothing of {device.name}; leave --ceilings away, or name its file")
    return {dtype: ((one.copy_gbytes_s, one.matmul_tflops), f"measured ({file})") for dtype, one in found.items()}


def _measured(paths: Sequence[Path]) -> Measured:
    """Medians in ms of the cells of results files; the last file counts."""
    return {
        key_of_row(row): (float(row["median_ms"]), path)
        for path in paths
        for row in read_file(path).rows()
        if row["status"] == "ok"
    }


def _title(case: Case) -> str:
    grouped = f" (KV {case.kv_heads})" if case.kv_heads != case.heads else ""
    steps = f", {case.steps}" if case.steps else ""
    causal = "" if case.operation.causal else ", not causal"
    return (
        f"{case.pass_} {case.label}: {case.dtype} {case.batch} x {case.heads} heads{grouped} of {case.head_dim}, "
        f"seq {short(case.seq)}{steps}{causal}"
    )


def _by(tile: tuple[int, int]) -> str:
    return f"{tile[0]} x {tile[1]}"


def _ms(seconds: float) -> str:
    return f"{significant(seconds * 1e3)} ms"


def _us(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return "" if not seconds else f"{seconds * 1e6:.1f}" if seconds < 1e-4 else f"{seconds * 1e6:.0f}"
