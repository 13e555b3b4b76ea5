"""The command `mtabench env`: device and versions, and the ceilings kept for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from mtabench.commands import RESULTS_FOLDER
from mtabench.commands.tune import effect_lines
from mtabench.console import say
from mtabench.environment import describe, resolve_device
from mtabench.json_output import print_json
from mtabench.measuring.ceilings import measure_ceilings
from mtabench.measuring.kept_ceilings import FILE_NAME, check_ceilings, keep_ceilings, read_ceilings
from mtabench.problem.case import DTYPES
from mtabench.results.results_file import text_of


def run(device: str, measure: bool, out: Path | None, as_json: bool) -> int:
    """Print where this runs and the ceilings kept for it in `out`; with `measure` they are measured anew."""
    console = Console()
    device = resolve_device(device)
    path = out or RESULTS_FOLDER / FILE_NAME
    check_ceilings(path)
    environment = describe(device)
    if as_json:
        if measure:
            keep_ceilings(path, environment, {dtype: measure_ceilings(device, dtype) for dtype in DTYPES})
        print_json("env", _data(device, environment, path))
        return 0
    for name, value in environment.items():
        say(console, f"{name:<10} {'-' if value in ('', None) else text_of(value)}")
    for text in effect_lines(device):
        say(console, f"{'tuned':<10} {text}")
    if measure:
        keep_ceilings(path, environment, {dtype: measure_ceilings(device, dtype) for dtype in DTYPES})
    for dtype, ceilings in read_ceilings(path, environment).items():
        copy, matmul = f"{ceilings.copy_gbytes_s:.4g} GB/s copy", f"{ceilings.matmul_tflops:.4g} TFLOP/s matmul"
        reads = ceilings.read_gbytes_s
        read = f"{reads:.4g} GB/s read" if reads else "reading not measured yet (--measure does)"
        say(console, f"{'ceilings':<10} {dtype}: {copy}, {read}, {matmul} ({path})")
    return 0


def _data(device: str, environment: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What `run` prints, for programs."""
    ceilings = [{"dtype": dtype, **asdict(found)} for dtype, found in read_ceilings(path, environment).items()]
    facts = {name: None if value == "" else value for name, value in environment.items()}
    return {
        "kind": device, "environment": facts, "tuned": effect_lines(device), "ceilings_file": path,
        "ceilings": ceilings,
    }  # fmt: skip
