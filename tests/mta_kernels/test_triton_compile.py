"""Every Triton kernel compiles for GPUs that are not there and takes no more of them than the committed baseline says.

`mtabench inspect --baseline results/static/baseline.json` does so for all shapes and targets: minutes. Here each
target has a shape or two, such that each path through the kernels is compiled for one target.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from mtabench.cli import main
from mtabench.static import compiling
from mtabench.static.compiling import short_name
from mtabench.static.limits import DEFAULT_TARGETS
from mtabench.static.records import read_json
from mtabench.static.shapes import ALL_SHAPES

ROOT = Path(__file__).parents[2]
BASELINE = ROOT / "results" / "static" / "baseline.json"
OTHER_COMPILERS = 5
# Which shapes of the baseline are compiled here; fp16 takes bf16's path, and head dim 96 takes head dim 80's.
CASES = [
    pytest.param("sm_80", "--head-dim 64 --dtype fp32", marks=pytest.mark.long),
    pytest.param("sm_86", "--head-dim 256 --dtype bf16", marks=pytest.mark.long),
    pytest.param("sm_90", "--head-dim 128 --dtype bf16", marks=pytest.mark.long),
    # Also packed, with fewer KV heads and a paged cache. Other tests compile kernels of CUDA.
    ("sm_90", "--head-dim 128 --dtype bf16 --kernel finish_logits,conv_attention_fwd,conv_attention_decode"),
    pytest.param("sm_90", "--head-dim 64 --dtype bf16", marks=pytest.mark.long),
    ("sm_100", "--head-dim 80 --dtype bf16 --kernel probabilities,row_product"),  # not causal
    pytest.param("sm_100", "--head-dim 80 --dtype bf16", marks=pytest.mark.long),
    pytest.param("sm_120", "--head-dim 36,64 --dtype bf16", marks=pytest.mark.long),  # the first without a convolution
]


@pytest.mark.parametrize(("target", "shapes"), CASES)
def test_kernels_are_as_good_as_in_the_baseline(target, shapes, monkeypatch, capsys):
    monkeypatch.setattr(compiling, "cpus", lambda: 1)  # the other tests have the other ones
    words = ["inspect", "--baseline", str(BASELINE), "--target", target, *shapes.split()]
    monkeypatch.setattr(sys, "argv", ["mtabench", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    if ended.value.code == OTHER_COMPILERS:
        pytest.skip(printed.out.splitlines()[-1])
    assert ended.value.code == 0, printed.out + printed.err


def test_decode_reads_by_the_copy_engine():
    """And spills nothing there, on long caches. Pages are read by pointers."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "tests"))
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, str(ROOT / "tests" / "decode_code.py"), "sm_90"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert len(kernels) == 4
    for kernel in kernels:
        pays = kernel["head_dim"] > 64 or kernel["group"] > 1
        by_copy_engine = pays and not kernel["paged"]
        assert (kernel["copies"] > 0) == by_copy_engine, kernel
        assert kernel["spilled"] == 0 or not by_copy_engine, kernel


def test_the_baseline_has_every_kernel_for_every_target():
    base = read_json(BASELINE)
    for target in DEFAULT_TARGETS:
        kernels = [kernel for kernel in base.kernels if kernel.target == target]
        assert {x.kernel.partition(".")[0] for x in kernels if x.language != "cuda"} == kernel_names(target)
        assert {x.kernel.partition(".")[0] for x in kernels if x.language == "cuda"} == cuda_names(target)
    assert list(base.shapes) == list(ALL_SHAPES)


def test_all_kernels_of_the_baseline_fit():
    assert {kernel.status for kernel in read_json(BASELINE).kernels} == {"ok"}


def kernel_names(target: str) -> set[str]:
    """Names of all `@triton.jit` kernels of the packages for this target, so that a new one cannot be forgotten."""
    names = set()
    for package in map(importlib.import_module, ("mta_kernels", "mta_ladder")):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(module.name)).items():
                if name.endswith("_kernel") and hasattr(value, "__getitem__"):
                    names.add(short_name(name))
    return names


def cuda_names(target: str) -> set[str]:
    """What `mtabench inspect` calls the kernels in all `.cu` files of the package that are for this target."""
    names = set()
    for path in (ROOT / "kernels").rglob("*.cu"):
        for kernel in re.findall(
            r"__global__ void (?:IN_CLUSTERS )?(?:(?:__launch_bounds__|MAXIMUM_THREADS)\(.*?\)\s+)?(\w+)\(",
            path.read_text(),
        ):
            match path.parent.name:
                case "hopper" | "mix_cuda":
                    names |= {kernel} if target == "sm_90" else set()
                case "decode_cuda":  # where a block can have enough shared memory
                    names |= {kernel} if target in ("sm_90", "sm_100") else set()
                case "mta_ladder":
                    names.add(kernel if kernel == path.stem else f"{path.stem}_{kernel}")
                case _:
                    names.add(kernel)
    return names
