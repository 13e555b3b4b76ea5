"""The CUDA rungs of attention against float64: on a GPU if there is one, else in the emulator."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest
import torch
from emulated_rungs import emulated_attention  # noqa: F401
from kernel_inputs import DEVICE, relative_error
from planted_faults import plant
from torch import Tensor

from mta_kernels.nvrtc import compiler
from mta_ladder import attention_reference, cuda_flash, cuda_launch, cuda_unfused

ON_GPU = DEVICE == "cuda"
SEEDS = (0,) if ON_GPU else (0, 1, 2, 3)  # of the emulator: how threads and copies interleave
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LARGEST_ERROR = {FP32: 1e-5, FP16: 0.002, BF16: 0.01}


def unfused(rung: str) -> type:
    """A class of the rung's name, since pytest names a test by a class's name and by an object's address."""
    functions = cuda_unfused.attention, cuda_unfused.unsupported
    return type(rung, (), {x.__name__: staticmethod(partial(x, rung=rung)) for x in functions})


cuda_naive, cuda_tiled = unfused("cuda-naive"), unfused("cuda-tiled")
ALL = [(cuda_naive, FP32), (cuda_tiled, FP32), (cuda_flash, FP16)]  # each rung, and numbers that it takes


@pytest.fixture
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """A rung's `attention`, with NaN in whatever it does not write."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))
    emulated = None if ON_GPU else request.getfixturevalue("emulated_attention")

    def call(rung, q, k, v, *, causal: bool = True, scale: float | None = None, seed: int = 0) -> Tensor:
        if emulated:
            emulated.seed = seed
        return rung.attention(q, k, v, causal=causal, scale=q.shape[3] ** -0.5 if scale is None else scale)

    return call


def make(queries: int, keys: int, head_dim: int, dtype: torch.dtype, *, value_dim: int = 0, heads=(2, 1), batch=1):
    """Random q, k and v on the test device."""
    generator = torch.Generator().manual_seed(queries * keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    q_heads, kv_heads = heads
    return (
        normal(batch, q_heads, queries, head_dim),
        normal(batch, kv_heads, keys, head_dim),
        normal(batch, kv_heads, keys, value_dim or head_dim),
    )


def assert_close(got: Tensor, q: Tensor, k: Tensor, v: Tensor, **options) -> None:
    """Within the bar of the dtype and twice eager's own error (or a few units of rounding)."""
    exact = attention_reference(q.double(), k.double(), v.double(), **options)
    eager = attention_reference(q, k, v, **options)
    assert got.shape == exact.shape
    assert got.dtype == q.dtype
    tolerance = min(LARGEST_ERROR[q.dtype], max(2 * relative_error(eager, exact), 4 * torch.finfo(q.dtype).eps))
    assert relative_error(got, exact) <= tolerance, (relative_error(got, exact), tolerance)


@pytest.mark.parametrize(
    ("rung", "dtype", "head_dim"),
    [
        (cuda_naive, BF16, 20),
        (cuda_tiled, FP16, 70),
        (cuda_flash, FP16, 80),
        (cuda_flash, BF16, 96),
        (cuda_flash, BF16, 256),
    ],
    ids=lambda x: x.__name__.rpartition(".")[2] if isinstance(x, ModuleType) else str(x),
)
def test_shapes(run, rung, dtype, head_dim) -> None:
    for queries, keys, causal in ((5, 5, False), (64, 64, True), (3, 70, True)):
        q, k, v = make(queries, keys, head_dim, dtype, batch=2 if queries == 5 else 1)
        assert_close(run(rung, q, k, v, causal=causal), q, k, v, causal=causal)


@pytest.mark.parametrize(("rung", "dtype"), ALL)
def test_values_of_another_width(run, rung, dtype) -> None:
    q, k, v = make(70, 70, 40, dtype, value_dim=24)
    assert_close(run(rung, q, k, v), q, k, v)


def test_heads_that_share_l2_or_do_not(run, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make(130, 130, 64, FP16, heads=(6, 3))
    for heads_that_fit in (0, 1, 2, 3):  # of k and v
        monkeypatch.setattr(cuda_flash, "L2_BYTES", heads_that_fit * 130 * 128 * 2)
        assert_close(run(cuda_flash, q, k, v), q, k, v)


def test_two_stages_copy_further_ahead(run) -> None:
    class TwoStages(cuda_flash.Geometry):
        stages = 2

    for seed in SEEDS:
        q, k, v = make(70, 330, 64, FP16, heads=(1, 1))
        rung = type("rung", (), {"attention": lambda *x, **y: cuda_flash.launch(TwoStages(FP16, 64, 64), *x, **y)})
        assert_close(run(rung, q, k, v, seed=seed), q, k, v)


@pytest.mark.skipif(ON_GPU, reason="plants faults in the emulated source")
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("        copies_wait<2 * STAGES - 2>();\n        __syncthreads();\n        values.copy", "values.copy"),
        ("        copies_wait<2 * STAGES - 2>();\n        __syncthreads();\n        keys.copy", "keys.copy"),
        ("(chunk ^ row % 8 * WAYS<Columns> / 8)", "chunk"),
        ("VALUES_AT = KEYS_AT + STAGES * KEY_TILE", "VALUES_AT = KEYS_AT + STAGES * KEY_TILE + 16"),
    ],
    ids=["no wait for the keys", "no wait for the values", "bank conflicts", "beyond the block's memory"],
)
def test_the_emulator_finds_what_a_gpu_may_hide(run, monkeypatch, tmp_path, line: str, instead: str) -> None:
    module, name = (compiler, "swizzle.cuh") if "WAYS" in line else (cuda_launch, "cuda_flash.cu")
    plant(monkeypatch, module, tmp_path, name, line, instead)
    cuda_launch.kernel.cache_clear()
    q, k, v = make(130, 200, 64, FP16, heads=(1, 1))

    def several_times() -> None:
        for seed in range(8):
            assert_close(run(cuda_flash, q, k, v, seed=seed), q, k, v)

    try:
        with pytest.raises(AssertionError):  # wrong, or what the emulator says
            several_times()
    finally:
        cuda_launch.kernel.cache_clear()


@pytest.mark.parametrize(
    ("rung", "dtype", "head_dim", "words"),
    [
        (cuda_naive, torch.float64, 64, "float32, float16 and bfloat16, not torch.float64"),
        (cuda_tiled, torch.int32, 64, "float32, float16 and bfloat16, not torch.int32"),
        (cuda_flash, FP32, 64, "takes float16 and bfloat16, .* not torch.float32; cuda-tiled takes float32"),
        (cuda_flash, FP16, 20, "multiples of 8 up to 256, not 20"),
        (cuda_flash, BF16, 264, "multiples of 8 up to 256, not 264"),
    ],
)
def test_what_a_rung_cannot_take_is_told(rung, dtype, head_dim, words) -> None:
    import re

    reason = rung.unsupported(device=torch.device(DEVICE), dtype=dtype, head_dim=head_dim)
    assert re.search(words, reason)


def test_a_cpu_runs_no_cuda_kernel() -> None:
    for rung, dtype in ALL:
        reason = rung.unsupported(device=torch.device("cpu"), dtype=dtype, head_dim=64)
        assert reason == "CUDA kernels need an NVIDIA GPU, not a cpu device"


def test_values_that_flash_cannot_copy_are_told(run) -> None:
    q, k, v = make(5, 5, 64, FP16, value_dim=20)
    with pytest.raises(ValueError, match="v has rows of 20 numbers; cuda-flash takes multiples of 8 up to 256"):
        run(cuda_flash, q, k, v)


def test_bytes_of_a_tile() -> None:
    assert cuda_flash.tile_bytes(128, 2) == {
        "q tile": 128 * 128 * 2,
        "k tile": 64 * 128 * 2,
        "v tile": 64 * 128 * 2,
        "statistics": 128 * 2 * 4,
        "accumulator": 128 * 128 * 4,
    }
    for head_dim in range(8, 257, 8):
        in_shared_memory = sum(list(cuda_flash.tile_bytes(head_dim, 2).values())[:3])
        assert cuda_flash.Geometry(FP16, head_dim, head_dim).shared_memory == in_shared_memory
        assert in_shared_memory <= 99 << 10  # what a block may take on GPUs of sm_86, sm_89 and sm_120


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
def test_they_compile_and_flash_spills_nothing(architecture) -> None:
    """A spill is local memory in the loop over keys."""
    reason = compiler.missing_package()
    if reason:
        pytest.skip(reason)
    for file in ("cuda_naive.cu", "cuda_tiled.cu") if architecture == "sm_80" else ():  # without matrix instructions
        for element in ("float", "Bfloat16"):
            source = cuda_launch.source(file, architecture, (("ELEMENT", element),))
            assert compiler.compile_source(source)[0].startswith(b"\x7fELF")
    for dtype, head_dim in ((FP16, 40), (BF16, 64), (BF16, 96), (BF16, 128), (BF16, 256)):
        constants = cuda_flash.Geometry(dtype, head_dim, head_dim).constants
        code, words = compiler.compile_source(cuda_launch.source("cuda_flash.cu", architecture, constants))
        assert code.startswith(b"\x7fELF")
        if "ptxas info" not in words:
            pytest.skip(f"NVRTC {compiler.version()} keeps ptxas's words to itself")
        assert words.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 1, head_dim
