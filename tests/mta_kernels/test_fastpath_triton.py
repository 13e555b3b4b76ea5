"""Launches without Triton's Python reach the driver as Triton's own do: against one that is not there, so no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_inputs import DEVICE

pytest.importorskip("triton")

from mta_kernels.conv_attention.fastpath import triton_forward, triton_launch

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's own driver is loaded first, and Triton's launcher finds it")
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler, as Triton does")
def test_what_reaches_the_driver_is_what_triton_sends(tmp_path: Path) -> None:
    """Of repeated forwards, and of all else that is launched a second time; Hopper's kernels."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("", "kernels", "tests"))
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    command = [sys.executable, str(ROOT / "tests/replayed_launches.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compared = dict(line.split() for line in done.stdout.splitlines())
    assert set(compared) == {"forward_64", "forward_128", "others", "backward"}
    assert min(map(int, compared.values())) > 30


def test_scratch_is_used_again() -> None:
    """As by the forward: the first is no longer needed when the largest two are."""
    near, band, padded, expanded = (0, 1000), (2000, 2512), (4000, 5100), (8000, 14000)
    size, places = triton_forward.laid_out({near: (0, 1), band: (1, 3), padded: (2, 3), expanded: (2, 3)})
    assert places == {expanded: 0, padded: 6144, near: 0, band: 6144 + 1536}
    assert size == 6144 + 1536 + 512
    assert triton_forward.laid_out({}) == (0, {})


def test_scratch_fills_gaps() -> None:
    a, b, c, d = (0, 4096), (10000, 12048), (20000, 21024), (30000, 30512)
    assert triton_forward.laid_out({a: (0, 0), b: (0, 1), c: (1, 2), d: (2, 2)})[1] == {a: 0, b: 4096, c: 0, d: 1024}
    assert triton_forward.laid_out({a: (0, 1), b: (0, 0), c: (1, 1), d: (0, 1)})[1] == {a: 0, b: 4096, c: 4096, d: 6144}


def test_scratch_is_kept_from_its_first_use_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, z = (torch.zeros(n, dtype=torch.uint8) for n in (1000, 3000, 100))
    monkeypatch.setattr(triton_forward, "driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0)))
    recorder = triton_forward.Recorder()
    for used in ([x], [y], [x, z]):
        recorder(_Replay(), used)
    recording = recorder.recording([z])
    assert recording.scratch_bytes == 3072 + 1024
    assert [step.places for step in recording._steps] == [
        [(0, 1, 3072, None)],
        [(0, 1, 0, None)],
        [(0, 1, 3072, None), (1, 0, 0, None)],
    ]


@pytest.mark.parametrize("unclear", ["twice", "within", "triton"])
def test_what_is_not_clear_is_not_repeated(unclear: str) -> None:
    """One address of two tensors, a pointer into the midst of one, a launch that only Triton can make."""
    x, y = torch.zeros(64), torch.zeros(64)
    recorder = triton_forward.Recorder()
    recorder(None if unclear == "triton" else _Replay(), [x[16:] if unclear == "within" else x])
    assert recorder.recording([x, x.detach()] if unclear == "twice" else [x, y]) is None


class _Replay:
    """A launch of tensors by their positions."""

    launcher = None

    def places(self, args):
        return [triton_launch.Place(i, x, None) for i, x in enumerate(args)]

    def arguments(self, stream, args):
        return [x.data_ptr() for x in args]


def test_another_triton_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled:
        run = None

    monkeypatch.setattr(triton_launch, "CompiledKernel", Compiled)
    monkeypatch.setattr(triton_launch.triton, "__version__", "4.0.0")
    triton_launch._launcher_is_known.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="how Triton 4.0.0 launches kernels, only those of 3.6 to 3.9"):
            assert triton_launch.launch_replay(Compiled(), 3, ()) is None
        assert triton_launch.launch_replay(Compiled(), 3, ()) is None  # a second warning would be an error
    finally:
        triton_launch._launcher_is_known.cache_clear()


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

    monkeypatch.setattr(triton_launch, "CompiledKernel", SimpleNamespace)
    monkeypatch.setattr(triton_launch, "_launcher_is_known", lambda: True)
    assert triton_launch.launch_replay(compiled(0, 0, [{}]), 3, ()) is not None
    for needs in ((8, 0, [{}]), (0, 8, [{}]), (0, 0, [])):
        assert triton_launch.launch_replay(compiled(*needs), 3, ()) is None
