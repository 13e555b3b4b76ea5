"""What the rungs of plain attention, and the published approach, have beside tests/conformance."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from emulators import (
    emulated_attention,  # noqa: F401
    emulated_cuda,  # noqa: F401
)
from kernel_inputs import DEVICE, make, poison_memory, relative_error
from torch import Tensor

pytest.importorskip("triton")

import triton
from triton.runtime import _allocation

from mta_kernels import gpu_limits
from mta_kernels.nvrtc import compiler
from mta_ladder import (
    attention,
    attention_reference,
    cuda_conv,
    cuda_flash,
    cuda_unfused,
    rung_unsupported,
    triton_descriptor,
    triton_fmha,
)
from mta_ladder.cuda_conv.shape import ConvKernel, Shape
from mtabench.static.limits import limits_of

ON_GPU = DEVICE == "cuda"
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LARGEST_ERROR = {FP32: 1e-5, FP16: 0.002, BF16: 0.01}
C = () if ON_GPU else ("c-loops", "c-tiled")


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run here, with NaN in whatever they do not write."""
    poison_memory(monkeypatch)
    if not ON_GPU:
        request.getfixturevalue("emulated_attention")


def inputs(
    queries: int, keys: int, head_dim: int, dtype: torch.dtype, value_dim: int = 0, heads=(2, 1)
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries * keys)
    shapes = (heads[0], queries, head_dim), (heads[1], keys, head_dim), (heads[1], keys, value_dim or head_dim)
    return [torch.randn(1, *shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def check(rung: str, *tensors: Tensor, **options: object) -> Tensor:
    """The output is within the bar of the dtype, and no further from float64 than twice eager, or units of rounding."""
    out = attention(*tensors, rung=rung, **options)
    exact = attention_reference(*(x.double() for x in tensors), **options)
    eager, dtype = attention_reference(*tensors, **options), tensors[0].dtype
    tolerance = min(LARGEST_ERROR[dtype], max(2 * relative_error(eager, exact), 4 * torch.finfo(dtype).eps))
    assert (out.shape, out.dtype) == (exact.shape, dtype)
    assert relative_error(out, exact) <= tolerance, (relative_error(out, exact), tolerance)
    return out


@pytest.mark.parametrize(
    ("rung", "dtype", "head_dim", "value_dim"),
    [
        *((rung, FP32, 40, 24) for rung in (*C, "cuda-naive", "cuda-tiled", "triton-pointer")),
        *((rung, FP16, 17, 33) for rung in ("triton-pointer", "triton-descriptor", "triton-fmha")),
        *((rung, FP32, 16, 256) for rung in C),
        ("cuda-naive", BF16, 20, 20), ("cuda-tiled", FP16, 70, 70), ("cuda-flash", FP16, 80, 24),
        ("cuda-flash", BF16, 96, 96), ("cuda-flash", BF16, 256, 256), ("triton-descriptor", FP16, 64, 128),
        ("triton-fmha", FP16, 96, 96), ("triton-pointer", FP16, 256, 256),
    ],
)  # fmt: skip
def test_head_dims(rung: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    for queries, keys, causal in ((5, 5, False), (64, 64, True), (3, 70, True)):
        check(rung, *inputs(queries, keys, head_dim, dtype, value_dim), causal=causal)


@pytest.mark.parametrize("rung", C)
def test_rows_beside_a_block_of_queries_and_nan(rung: str) -> None:
    """It is passed on and stays in its row."""
    for queries, keys in ((97, 97), (33, 300), (1, 129)):
        check(rung, *inputs(queries, keys, 64, FP32))
    q, k, v = inputs(100, 100, 32, FP32, heads=(2, 2))
    q[0, 0, 50, 3] = float("nan")
    out = attention(q, k, v, rung=rung)
    assert out[0, 0, 50].isnan().all()
    assert out.isnan().sum() == 32


@pytest.mark.skipif(ON_GPU, reason="of a CPU")
def test_the_tiled_exponential_is_as_exact_as_it_says() -> None:
    """With scores 0 and x <= 0 and values 0 and 1, the output is e^x / (1 + e^x)."""
    x = torch.linspace(-87, 0, 20001)
    ones = torch.ones(len(x), 1, 1, 1)
    q, k = x[:, None, None, None], torch.cat([0 * ones, ones], dim=2)
    run = partial(attention, causal=False, scale=1.0, rung="c-tiled")
    out, exact = run(q, k, k).flatten().double(), x.double().sigmoid()
    # Beside the polynomial: x log2(e) is rounded, which counts x times as much, and so are a sum and a quotient.
    allowed = 1.2e-7 + 2**-23 * (2 + x.abs().double())
    assert ((out - exact).abs() <= allowed * exact).all()
    assert run(q[:1] - 1000, k[:1], k[:1]).item() == 0


@pytest.mark.parametrize("heads_that_fit", [0, 1, 3])
def test_heads_that_share_l2_or_do_not(monkeypatch: pytest.MonkeyPatch, heads_that_fit: int) -> None:
    """Of k and v."""
    monkeypatch.setattr(cuda_flash, "L2_BYTES", heads_that_fit * 130 * 128 * 2)
    check("cuda-flash", *inputs(130, 130, 64, FP16, heads=(6, 3)))


def test_two_stages_copy_further_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_flash.Geometry, "stages", 2)
    check("cuda-flash", *inputs(70, 330, 64, FP16, heads=(1, 1)))


def test_what_lies_as_a_rung_wants_it_is_not_copied() -> None:
    k = inputs(48, 48, 64, FP16)[1]
    transposed = k.mT.contiguous().mT.transpose(2, 3)
    assert triton_descriptor.head_major(transposed) is transposed
    assert triton_descriptor.head_major(k) is k


def test_the_caller_keeps_their_allocator() -> None:
    """A descriptor made in a kernel needs memory, which Triton asks of an allocator that is set for all."""
    before = _allocation._allocator.get()
    check("triton-descriptor", *inputs(30, 30, 64, FP16))
    assert _allocation._allocator.get() is before


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_120"])
def test_tiles_of_every_gpu(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = limits_of(target)
    monkeypatch.setattr(triton_fmha, "compiled_capability", lambda device: limits.capability)
    monkeypatch.setattr(triton_fmha, "shared_memory_limit", lambda device: limits.shared_per_block)
    if ON_GPU:
        # A GPU with a copy engine turns pointers into descriptors on the device, and wants room for them.
        triton.set_allocator(lambda size, alignment, stream: torch.ones(size, dtype=torch.int8, device=DEVICE))
        if limits.shared_per_block > gpu_limits.shared_memory_limit(torch.device("cuda")):
            pytest.skip(f"the tiles of {target} do not fit here")
    for head_dim in (40, 256):
        check("triton-fmha", *inputs(130, 130, head_dim, FP16, heads=(1, 1)))


NUMBERS = "float32, float16 and bfloat16, not torch"


@pytest.mark.parametrize(
    ("rung", "dtype", "head_dim", "words"),
    [
        ("cuda-naive", torch.float64, 64, f"{NUMBERS}.float64"), ("cuda-tiled", torch.int32, 64, f"{NUMBERS}.int32"),
        ("cuda-flash", FP32, 64, "takes float16 and bfloat16, .* not torch.float32; cuda-tiled takes float32"),
        ("cuda-flash", FP16, 20, "multiples of 8 up to 256, not 20"), ("cuda-flash", BF16, 264, "not 264"),
        ("triton-fmha", FP16, 320, "16 to 256"), ("triton-pointer", torch.float64, 64, "float16"),
    ],
)  # fmt: skip
def test_what_a_rung_cannot_take_is_refused(rung: str, dtype: torch.dtype, head_dim: int, words: str) -> None:
    assert re.search(words, rung_unsupported(rung, device=DEVICE, dtype=dtype, head_dim=head_dim))


def test_values_that_flash_cannot_copy_are_refused() -> None:
    with pytest.raises(ValueError, match="v has rows of 20 numbers; cuda-flash takes multiples of 8 up to 256"):
        attention(*inputs(5, 5, 64, FP16, value_dim=20), rung="cuda-flash")


def test_tiles_of_flash_fit_every_gpu() -> None:
    assert list(cuda_flash.tile_bytes(128, 2).values()) == [32768, 16384, 16384, 1024, 65536]
    for head_dim in range(8, 257, 8):
        in_shared_memory = sum(list(cuda_flash.tile_bytes(head_dim, 2).values())[:3])
        assert cuda_flash.Geometry(FP16, head_dim, head_dim).shared_memory == in_shared_memory
        assert in_shared_memory <= 99 << 10  # what a block may take on GPUs of sm_86, sm_89 and sm_120


def overlapping(request: pytest.FixtureRequest) -> None:
    """The published approach runs here."""
    if not ON_GPU:
        request.getfixturevalue("emulated_cuda")


SIZES = "head_dim 20 is not a multiple of 8 from 8 to 128"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "taps", "words"),
    [
        (torch.float64, 64, (6, 11), "dtype torch.float64 is not float16, bfloat16 or float32"),
        (BF16, 20, (6, 11), SIZES), (BF16, 136, (6, 11), "head_dim 136"),
        (BF16, 64, (12, 11), "12x11 taps are outside 1x1 to 11x11"),
        (BF16, 64, (6, 12), "6x12 taps are outside 1x1 to 11x11"),
    ],
)  # fmt: skip
def test_what_the_published_approach_cannot_take_is_refused(request, dtype, head_dim, taps, words: str) -> None:
    overlapping(request)
    q, k, v, weight = make(1, 1, 1, 12, head_dim, taps, dtype)
    with pytest.raises(ValueError, match=words):
        cuda_conv.conv_attention(q, k, v, weight)
    lengths = torch.tensor([8], device=DEVICE)
    with pytest.raises(ValueError, match=words):
        cuda_conv.conv_attention_decode(q[:, :, : taps[0]], k, v, weight, lengths=lengths)


def test_wrong_arguments_of_the_published_approach_are_refused(request) -> None:
    overlapping(request)
    q, k, v, weight = make(1, 1, 1, 8, 16, (1, 3), FP16)
    with pytest.raises(ValueError, match="q has 5 rows and k 8; cuda-conv takes whole sequences"):
        cuda_conv.conv_attention(q[:, :, :5], k, v, weight)
    with pytest.raises(ValueError, match="pad_key is 'middle'"):
        cuda_conv.conv_attention(q, k, v, weight, pad_key="middle")
    with pytest.raises(ValueError, match="splits is 0; expected 'auto' or a whole number from 1 to 128"):
        cuda_conv.conv_attention_decode(q, k, v, weight, lengths=torch.tensor([8], device=DEVICE), splits=0)


def test_cuda_runs_on_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    reason = cuda_conv.unsupported(device="cpu", dtype=BF16, head_dim=64, query_taps=6, key_taps=11)
    assert reason == "its kernels need an NVIDIA GPU of sm_80 or later, not a cpu device"
    for rung in ("cuda-naive", "cuda-tiled", "cuda-flash"):
        reason = rung_unsupported(rung, device="cpu", dtype=FP16, head_dim=64)
        assert reason == "CUDA kernels need an NVIDIA GPU, not a cpu device"


def test_every_shape_fits_the_shared_memory_of_every_gpu_from_sm_80_on() -> None:
    for dtype in (FP16, FP32):
        for head_dim in range(8, 129, 8):
            assert max(max(Shape(dtype, head_dim, n, n).shared_memory.values()) for n in (1, 11)) <= 99 * 1024


SOURCES = [
    *(
        cuda_flash.Geometry(dtype, head_dim, head_dim).source(architecture)
        for architecture, dtype, head_dim in (("sm_90", FP16, 40), ("sm_80", BF16, 256))
    ),
    cuda_unfused.rung_source("cuda_naive.cu", "sm_80", {"ELEMENT": "float"}),
    cuda_unfused.rung_source("cuda_tiled.cu", "sm_80", {"ELEMENT": "Half"}),
]


def test_they_compile_and_flash_spills_nothing() -> None:
    """A spill is local memory in the loop over keys."""
    if reason := compiler.missing_package():
        pytest.skip(reason)
    for shape, architecture in ((Shape(FP16, 16, 2, 3), "sm_80"), (Shape(FP32, 16, 1, 2), "sm_90")):
        for name in shape.shared_memory:
            assert compiler.compile_source(ConvKernel(shape, name, "").source(architecture))[0].startswith(b"\x7fELF")
    for source in SOURCES:
        code, words = compiler.compile_source(source)
        assert code.startswith(b"\x7fELF")
        spilled = "ptxas info" in words and source.path.name == "cuda_flash.cu"
        assert not spilled or "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in words
