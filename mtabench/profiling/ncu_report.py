"""What Nsight Compute measured: its raw page as CSV, read into one record a kernel.

`ncu --csv --page raw` writes a header (`"ID","Process ID",...,"Kernel Name",..., metrics`), a row of units, then a row
a launch. All fields are quoted, with commas between thousands. Lines that begin with `==` are messages of the tool.
"""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtabench.errors import MtabenchError, UsageError
from mtabench.escaping import printable
from mtabench.problem.case import Case
from mtabench.registry import typed_as

HOW = "`ncu --import REPORT.ncu-rep --csv --page raw` writes one"
MOST_BYTES = 64 << 20
TIME_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "s": 1.0}
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")

# Metrics by what they say; of several names the first that a report has. Percentages are of the peak.
DURATION = "gpu__time_duration.sum"
PERCENTAGES = {
    "tensor_pct": (
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    ),
    "shared_pct": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",
    ),
    "l2_pct": (
        "lts__throughput.avg.pct_of_peak_sustained_elapsed",
        "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    ),
    "memory_pct": (
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "issue_pct": ("sm__inst_issued.avg.pct_of_peak_sustained_elapsed",),
    "occupancy_pct": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct",),
}
BANK_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
MEMORY_READ, MEMORY_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2_BYTES = "lts__t_bytes.sum"
REGISTERS, SHARED_SIZE = "launch__registers_per_thread", "launch__shared_mem_per_block"
# The metrics of our own runs: each by its first name. The stalls are a section of their own.
ASKED = (
    DURATION, *(names[0] for names in PERCENTAGES.values()), BANK_CONFLICTS, MEMORY_READ, MEMORY_WRITTEN, L2_BYTES,
    REGISTERS, SHARED_SIZE,
)  # fmt: skip
SECTIONS = ("WarpStateStats",)
PROGRAM = "ncu"
RIGHTS = "ERR_NVGPUCTRPERM"
NO_RIGHTS = (
    f"the driver lets administrators alone read the GPU's counters ({RIGHTS}): run as root, or have the driver loaded "
    "with NVreg_RestrictProfilingToAdminUsers=0; a container needs --cap-add=SYS_ADMIN "
    "(https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
)


@dataclass(frozen=True, slots=True)
class Counters:
    """All launches of one kernel: times and bytes added up, percentages weighted by time; None where not measured.

    The last fields hold for each launch. `stalls` are reasons and their share of all the time that warps waited, the
    largest first.
    """

    kernel: str
    launches: int
    us: float
    tensor_pct: float | None
    shared_pct: float | None
    l2_pct: float | None
    memory_pct: float | None
    issue_pct: float | None
    occupancy_pct: float | None
    l2_hit_pct: float | None
    bank_conflicts: float | None
    memory_bytes: float | None
    l2_bytes: float | None
    registers: float | None
    shared_bytes: float | None
    stalls: tuple[tuple[str, float], ...]


def read_report(path: Path) -> list[Counters]:
    """The kernels of a saved raw page, the longest first; raises UsageError for a file that is none."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path} is larger than {MOST_BYTES >> 20} MiB, the most that is read of such a file")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    return parse(text, str(path))


def parse(text: str, name: str) -> list[Counters]:
    """The kernels of a raw page, the longest first; `name` is what errors call it. Raises UsageError."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    try:
        rows = list(csv.reader(io.StringIO("\n".join(lines)), strict=True))
    except csv.Error as error:
        raise UsageError(f"{name} cannot be read as CSV: {error}; {HOW}") from error
    header = rows[0] if rows else []
    if "Kernel Name" not in header:
        raise UsageError(f"{name} is no report of Nsight Compute: no line of it names columns; {HOW}")
    if "Metric Name" in header:
        raise UsageError(f"{name} is another page of Nsight Compute than the raw one; {HOW}")
    if DURATION not in header:
        raise UsageError(f"{name} does not hold {DURATION}, without which nothing can be weighed; {HOW}")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise UsageError(f"row {number} of {name} has {len(row)} fields, and its header {len(header)}; {HOW}")
    body = rows[1:]
    units = dict.fromkeys(header, "")
    if body and not body[0][header.index("Kernel Name")]:
        units = dict(zip(header, body[0], strict=True))
        body = body[1:]
    launches = [_launch(dict(zip(header, row, strict=True)), units) for row in body]
    if not launches:
        raise UsageError(f"{name} holds no kernel: nothing was launched between the start and the stop of profiling")
    kernels: dict[str, list[dict[str, float]]] = {}
    for kernel, values in launches:
        if not values.get(DURATION):
            raise UsageError(f"{name} has no time of {kernel}: Nsight Compute could not measure it")
        kernels.setdefault(kernel, []).append(values)
    return sorted((_counters(kernel, found) for kernel, found in kernels.items()), key=lambda one: -one.us)


def _launch(row: dict[str, str], units: dict[str, str]) -> tuple[str, dict[str, float]]:
    """The kernel's name, and its metrics in seconds, bytes, percent and counts."""
    values = {}
    for name, text in row.items():
        if "__" not in name:
            continue
        try:
            values[name] = float(text.replace(",", "")) * _factor(name, units[name])
        except ValueError:  # n/a: this GPU does not have it
            continue
    return printable(" ".join(row["Kernel Name"].split())), values


def _factor(name: str, unit: str) -> float:
    """What brings a value to seconds or bytes; other units stay: a percentage, a count."""
    unit = unit.lower().partition("/")[0]
    if name == DURATION:
        return TIME_UNITS.get(unit[:1], 1e-9)  # "ns" and "nsecond", and so on; base units are ns
    return PREFIXES.get(unit.removesuffix("byte"), 1.0) if unit.endswith("byte") else 1.0


def _counters(kernel: str, launches: Sequence[dict[str, float]]) -> Counters:
    seconds = [values[DURATION] for values in launches]

    def total(name: str) -> float | None:
        return sum(values[name] for values in launches) if all(name in values for values in launches) else None

    def mean(names: Sequence[str]) -> float | None:
        found = [next((values[name] for name in names if name in values), None) for values in launches]
        weighed = [(value, time) for value, time in zip(found, seconds, strict=True) if value is not None]
        return sum(value * time for value, time in weighed) / sum(time for _, time in weighed) if weighed else None

    read, written = total(MEMORY_READ), total(MEMORY_WRITTEN)
    return Counters(
        kernel=kernel,
        launches=len(launches),
        us=sum(seconds) * 1e6,
        **{name: mean(metrics) for name, metrics in PERCENTAGES.items()},
        bank_conflicts=total(BANK_CONFLICTS),
        memory_bytes=None if read is None or written is None else read + written,
        l2_bytes=total(L2_BYTES),
        registers=launches[0].get(REGISTERS),
        shared_bytes=launches[0].get(SHARED_SIZE),
        stalls=_stalls(launches, seconds),
    )


def _stalls(launches: Iterable[dict[str, float]], seconds: Iterable[float]) -> tuple[tuple[str, float], ...]:
    """Reasons why warps did not issue, and their shares; the warp that issues ("selected") does not wait."""
    reasons: dict[str, float] = {}
    for values, time in zip(launches, seconds, strict=True):
        for name, value in values.items():
            match = STALL.fullmatch(name)
            if match and match[1] != "selected" and not match[1].endswith("not_issued"):
                reasons[match[1]] = reasons.get(match[1], 0.0) + value * time
    whole = sum(reasons.values())
    shares = ((name.replace("_", " "), value / whole) for name, value in reasons.items() if value > 0)
    return tuple(sorted(shares, key=lambda one: -one[1]))


def reason_against(device: str) -> str | None:
    """Why Nsight Compute cannot be used here, or None."""
    if device != "cuda":
        return "Nsight Compute reads the counters of an NVIDIA GPU"
    if shutil.which(PROGRAM) is None:
        return (
            f"{PROGRAM} is not on PATH: it comes with the CUDA toolkit (/usr/local/cuda/bin) and as Nsight Compute "
            "from https://developer.nvidia.com/nsight-compute"
        )
    return None


def command(case: Case, log: Path) -> list[str]:
    """The command line: one pass over the call that the child marks, at the clocks as they are, its raw page in `log`.

    Base units (ns, bytes), so that no rounding of a display is in between.
    """
    cell = case.columns | {"device": case.device, "typed": typed_as(case.impl)}
    child = [sys.executable, "-m", "mtabench.profiling.one_call", json.dumps(cell)]
    options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw"]
    sections = [word for section in SECTIONS for word in ("--section", section)]
    metrics = ["--metrics", ",".join(ASKED)]
    return [PROGRAM, *options, "--print-units", "base", *sections, *metrics, "--log-file", str(log), *child]


def measure(case: Case, log: Path) -> None:
    """Run it; the raw page is in `log` then. Raises MtabenchError, in a sentence that says what to do."""
    done = subprocess.run(
        command(case, log), capture_output=True, text=True, errors="replace", env=os.environ | {"LC_ALL": "C"}
    )
    written = log.read_text(errors="replace") if log.exists() else ""
    output = f"{written}\n{done.stdout}\n{done.stderr}"
    if RIGHTS in output:
        raise MtabenchError(NO_RIGHTS)
    if done.returncode or '"Kernel Name"' not in written:
        raise MtabenchError(f"{PROGRAM} measured nothing: {_why(output) or f'it ended with code {done.returncode}'}")


def _why(output: str) -> str:
    """The tool's first error, else the last line that anything printed."""
    error = re.search(r"^==ERROR==\s*(.+)$", output, re.MULTILINE)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return " ".join((error[1] if error else lines[-1] if lines else "").split())
