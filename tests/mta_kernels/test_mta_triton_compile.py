"""The Triton stages of multi-token attention compile for GPUs that are not there, and fit into them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]

ONE_WARP = {"_convolution_kernel", "_taps_gradient_kernel"}  # too few for Hopper's products, and faster without


def compiled(*words: str) -> list[dict]:
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "tests"))
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, str(ROOT / "tests" / "mta_code.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "target", [*(pytest.param(name, marks=pytest.mark.long) for name in ("sm_80", "sm_86")), "sm_90"]
)
def test_stages_fit(target: str) -> None:
    kernels = compiled(target)
    assert {kernel["kernel"] for kernel in kernels} == {
        "_score_product_kernel", "_convolution_kernel", "_mix_rows_kernel", "_mix_heads_kernel", "_row_product_kernel",
        "_mix_rows_backward_kernel", "_transposed_product_kernel", "_taps_gradient_kernel",
    }  # fmt: skip
    for kernel in kernels:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["late_reads"] == 0, kernel
        if kernel["dtype"] == "torch.float32":  # has no tensor cores, and spills
            continue
        assert kernel["stack"] <= 8, kernel
        assert (kernel["wgmma"] > 0) == (target == "sm_90" and kernel["kernel"] not in ONE_WARP), kernel


def test_no_counter_of_heads_loses_a_carry() -> None:
    """As with 28 query heads a KV head, of which a part were zero: ptxas subtracted the first KV head wrongly."""
    kernels = compiled("sm_90", "shared")
    assert "_mta_decode_values_kernel" in {kernel["kernel"] for kernel in kernels}
    assert [kernel["kernel"] for kernel in kernels if kernel["lost_carries"]] == []


@pytest.mark.long
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90"])
def test_decode_fits(target: str) -> None:
    """With every part and without: what is not given, a kernel must not need to compile."""
    kernels = compiled(target, "decode")
    names = ("convolved", "early", "logits", "values", "merge")
    assert {kernel["kernel"] for kernel in kernels} == {f"_mta_decode_{name}_kernel" for name in names}
    for kernel in kernels:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["stack"] <= (64 if kernel["heads"] == 16 else 512), kernel
