"""Nsight Compute around one call of a cell: `ncu` starts a process that warms up and marks the call to be measured."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from mtabench.errors import MtabenchError
from mtabench.problem.case import Case
from mtabench.profiling.ncu_report import ASKED, SECTIONS
from mtabench.registry import typed_as

PROGRAM = "ncu"
RIGHTS = "ERR_NVGPUCTRPERM"
NO_RIGHTS = (
    f"the driver lets administrators alone read the GPU's counters ({RIGHTS}): run as root, or have the driver loaded "
    "with NVreg_RestrictProfilingToAdminUsers=0; a container needs --cap-add=SYS_ADMIN "
    "(https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
)


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
