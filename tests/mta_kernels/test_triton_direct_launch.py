"""Launches without Triton's Python reach its launcher in C as its own do, for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from kernel_inputs import DEVICE

pytest.importorskip("triton")

from mta_kernels.conv_attention.triton import direct_launch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has a driver of its own")
def test_what_reaches_the_launcher_is_what_triton_sends() -> None:
    """Of all that is launched a second time; Hopper's kernels."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "tests"))
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [sys.executable, str(ROOT / "tests/replayed_launches.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compared = dict(line.split() for line in done.stdout.splitlines())
    assert set(compared) == {"forward", "others", "backward"}
    assert min(map(int, compared.values())) > 30


def test_another_triton_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled:
        run = None

    monkeypatch.setattr(direct_launch, "CompiledKernel", Compiled)
    monkeypatch.setattr(direct_launch.triton, "__version__", "4.0.0")
    direct_launch._launcher_is_known.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="how Triton 4.0.0 launches kernels, only those of 3.6 to 3.9"):
            assert direct_launch.launch_replay(Compiled(), 3, ()) is None
        assert direct_launch.launch_replay(Compiled(), 3, ()) is None  # a second warning would be an error
    finally:
        direct_launch._launcher_is_known.cache_clear()


def test_a_kernel_that_needs_scratch_is_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(scratch: int, profile: int, descriptors: list) -> SimpleNamespace:
        run = SimpleNamespace(
            launch=len, global_scratch_size=scratch, profile_scratch_size=profile,
            launch_cooperative_grid=False, launch_pdl=True,
        )  # fmt: skip
        return SimpleNamespace(
            run=run, function=1, packed_metadata=(4, 1, 0), src=SimpleNamespace(signature={"x": "tensordesc<fp16[1]>"}),
            metadata=SimpleNamespace(tensordesc_meta=descriptors),
        )  # fmt: skip

    monkeypatch.setattr(direct_launch, "CompiledKernel", SimpleNamespace)
    monkeypatch.setattr(direct_launch, "_launcher_is_known", lambda: True)
    assert direct_launch.launch_replay(compiled(0, 0, [{}]), 3, ()) is not None
    for needs in ((8, 0, [{}]), (0, 8, [{}]), (0, 0, [])):
        assert direct_launch.launch_replay(compiled(*needs), 3, ()) is None
