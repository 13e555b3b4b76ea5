"""The command `mtabench env`: device and versions, and the ceilings kept for it."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from mtabench import registry
from mtabench.commands import RESULTS_FOLDER
from mtabench.commands.list import readiness
from mtabench.console import flop_unit, say
from mtabench.environment import describe, resolve_device, torch_build
from mtabench.json_output import print_json
from mtabench.measuring.ceilings import FILE_NAME, check_ceilings, keep_ceilings, measure_ceilings, read_ceilings
from mtabench.problem.case import DTYPES
from mtabench.problem.operations import OPS
from mtabench.results.results_file import text_of
from mtabench.tables import print_prose


def run(device: str, measure: bool, out: Path | None, as_json: bool) -> int:
    """Print where this runs and the ceilings kept for it in `out`; with `measure` they are measured anew."""
    device = resolve_device(device)
    path = out or RESULTS_FOLDER / FILE_NAME
    check_ceilings(path)
    console = Console()
    environment = describe(device)
    if not as_json:
        print_prose(console, f"{'measures':<10} {_measurable(device, environment['device'])}")
        for name, value in environment.items():
            say(console, f"{name:<10} {'-' if value in ('', None) else text_of(value)}")
    if measure:
        keep_ceilings(path, environment, {dtype: measure_ceilings(device, dtype) for dtype in DTYPES})
    if as_json:
        print_json("env", _data(device, environment, path))
        return 0
    for dtype, ceilings in read_ceilings(path, environment).items():
        unit, factor = flop_unit([ceilings.matmul_tflops])
        copy, matmul = f"{ceilings.copy_gbytes_s:.4g} GB/s copy", f"{factor * ceilings.matmul_tflops:.4g} {unit} matmul"
        reads = ceilings.read_gbytes_s
        read = f"{reads:.4g} GB/s read" if reads else "reading not measured yet (--measure does)"
        say(console, f"{'ceilings':<10} {dtype}: {copy}, {read}, {matmul} ({path})")
    return 0


def _measurable(device: str, name: str) -> str:
    """What can be measured here, in a sentence or two."""
    reasons = readiness(device)
    ready: dict[str, list[str]] = {op: [] for op in OPS}
    for one in registry.IMPLEMENTATIONS:
        if not one.of_models and reasons[one.key] is None:
            ready[one.op].append(one.name)
    found = "; ".join(f"{op} by {', '.join(names)}" for op, names in ready.items() if names)
    if device == "cuda":
        return f"on {name}: {found}"
    why = f"PyTorch {torch_build().version} " + ("finds no GPU" if torch_build().cuda else "is built without CUDA")
    return f"on the CPU: {found}. Nothing on a GPU, since {why}; `mtabench list` says why each is not ready"


def _data(device: str, environment: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What `run` prints, for programs."""
    ceilings = [{"dtype": dtype, **asdict(found)} for dtype, found in read_ceilings(path, environment).items()]
    facts = {name: None if value == "" else value for name, value in environment.items()}
    return {"kind": device, "environment": facts, "ceilings_file": path, "ceilings": ceilings}
