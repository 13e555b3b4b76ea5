"""Tile sizes and backends chosen by measuring: the shapes of sweeps, the candidates' times, and what is in effect."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from mta_kernels.conv_attention import tile_sizes, tuner
from mtabench.commands import WRONG_RESULT
from mtabench.console import make_console, say
from mtabench.errors import MtabenchError, UsageError, first_line
from mtabench.problem import axes
from mtabench.problem.case import KERNEL_PASSES, Case
from mtabench.problem.inputs import DTYPES, use_full_float32
from mtabench.sweeps.plan import Options, make_plan
from mtabench.sweeps.readiness import unsupported_reason
from mtabench.sweeps.sweep import words
from mtabench.tables import Cell, Column, as_columns, print_columns


def run(passes: str, options: Options, out: Path | None) -> int:
    """Tune all that `tuner.PASSES` has of these passes for every shape; WRONG_RESULT if a candidate's result is wrong.

    Prints a table a shape. What is found is saved as each kernel's shape ends: in `out`, else in the user's file.
    """
    cases = list(_cases(passes, options))
    device = torch.device("cuda", torch.cuda.current_device())
    name = tile_sizes.device_name(device)
    path = out or tile_sizes.user_file(name)
    _check_destination(path, name, must_be_readable=out is not None)
    use_full_float32()
    console = make_console()
    pairs = [(case, kernel) for case in cases for kernel in tuner.tunable(case.pass_, _shape(case), device)]
    saved, any_wrong = 0, False
    for number, (case, kernel) in enumerate(pairs, start=1):
        title = f"[{number}/{len(pairs)}] {kernel}: {words(case)}{'' if case.operation.causal else ', not causal'}"
        reason = unsupported_reason(case)
        if reason:
            say(console, f"{title}: not tuned: {reason}")
            continue
        say(console, title)
        trials = _tune(console, kernel, case, path)
        if trials:
            print_columns(console, _trials_table(trials))
        saved += tuner.fastest(trials) is not None
        any_wrong = any_wrong or any(trial.status.startswith("wrong") for trial in trials)
    say(console, f"tuned {saved} of {len(pairs)}{f'; saved in {path}' if saved else ': nothing was saved'}")
    if out is not None and out.resolve() not in map(
        Path.resolve, (tile_sizes.user_file(name), tile_sizes.shipped_file(name))
    ):
        say(console, f"kernels on this machine read {tile_sizes.user_file(name)}; without --out that is where it goes")
    return WRONG_RESULT * any_wrong


def effect_lines(device: str) -> list[str]:
    """The files of tuned tile sizes and backends that kernels on "cuda" or "cpu" go by, a text each."""
    if device == "cpu":
        return ["none: tile sizes are tuned on a CUDA GPU"]
    name = tile_sizes.device_name(torch.device("cuda", torch.cuda.current_device()))
    found = tile_sizes.files_in_effect(name)
    lines = []
    for path, entries in found.items():
        kind = "shipped" if path == tile_sizes.shipped_file(name) else "yours"
        others = {str(entry.measured.get("triton")) for entry in entries} - {tile_sizes.triton_version()}
        made = f", some made with Triton {', '.join(sorted(others))}" if others else ""
        lines.append(f"{kind}: {len(entries)} {'entry' if len(entries) == 1 else 'entries'}{made}, {path}")
    if not any(found.values()):
        lines.append(f"nothing is tuned for {name}: kernels go by their own guesses, until `mtabench tune` measures")
    return lines


def _cases(passes: str, options: Options) -> Iterator[Case]:
    """The cells that a sweep over the Triton kernels would have; raises UsageError without a GPU."""
    chosen = axes.parse_names(passes, "--pass")
    for pass_ in chosen:
        if pass_ not in KERNEL_PASSES:
            raise UsageError(f"--pass {pass_!r} is not known; expected one or more of {', '.join(KERNEL_PASSES)}")
    plans = [make_plan(replace(options, pass_=pass_, impl="triton")) for pass_ in chosen]
    if plans[0].device != "cuda":
        raise UsageError(
            "kernels are tuned by timing on a CUDA GPU, and PyTorch finds none on this machine; "
            "run this where the kernels will run"
        )
    for plan in plans:
        yield from plan.cases


def _shape(case: Case) -> tuner.TunedShape:
    return tuner.TunedShape(
        batch=case.batch, heads=case.heads, kv_heads=case.kv_heads, seq_len=case.seq, head_dim=case.head_dim,
        taps=case.conv.taps, dtype=DTYPES[case.dtype], causal=case.operation.causal,
    )  # fmt: skip


def _check_destination(path: Path, device: str, must_be_readable: bool) -> None:
    """Raise UsageError for a file that could not be written, or, if it was named, that holds something else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise UsageError(f"{path} cannot be written: nothing can be written in {path.parent}")
        tile_sizes.read_entries(path, device)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    except ValueError as error:
        if must_be_readable:
            raise UsageError(f"--out {path} cannot be added to: {error}; name another file") from None


def _tune(console: Console, kernel: str, case: Case, path: Path) -> list[tuner.Trial]:
    """The trials of one kernel and shape; none, and a line about it, if there is no room for them on this GPU."""
    try:
        return tuner.tune(kernel, _shape(case), path=path)
    except (torch.OutOfMemoryError, ValueError) as error:
        say(console, f"not tuned: {first_line(error)}")
        return []
    except (OSError, RuntimeError) as error:
        raise MtabenchError(
            f"{kernel} for {words(case)} cannot be tuned: {first_line(error)}; what came before is saved in {path}"
        ) from None
    finally:
        torch.cuda.empty_cache()


def _trials_table(trials: Sequence[tuner.Trial]) -> list[Column]:
    """A row a candidate, in their order: the first is the heuristic's choice."""
    fields = [name.replace("_", " ") for name in asdict(trials[0].config)]
    rows: list[list[Cell]] = []
    best, first = tuner.fastest(trials), trials[0]
    for trial in trials:
        time = speedup = ""
        if trial.microseconds is not None:
            time = _shown(trial.microseconds)
            speedup = f"{first.microseconds / trial.microseconds:.3f}x" if first.microseconds else ""
        status = Text(trial.status, style="" if trial.status == tuner.OK else "bold red")
        status.append(", the heuristic's choice" if trial is first else "")
        status.append(", the fastest" if trial is best else "", style="bold green")
        rows.append([*map(str, asdict(trial.config).values()), time, speedup, status])
    return as_columns((*fields, "us", "speedup", "status"), rows, ("status",))


def _shown(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds < 1000 else f"{microseconds:.0f}"
