"""Stages of multi-token attention in CUDA C++ for GPUs that need not be there: what fits, is refused, compiles."""

from __future__ import annotations

import pytest
import torch
from emulators import H200, emulated_rows  # noqa: F401

from mta_kernels.gpu_limits import gpu_of
from mta_kernels.multi_token_attention.bands_cuda import bands
from mta_kernels.multi_token_attention.heads_cuda import heads
from mta_kernels.multi_token_attention.rows_cuda import mix_rows, rows
from mta_kernels.multi_token_attention.rows_cuda.rows import plan_on
from mta_kernels.nvrtc import compiler
from mta_kernels.nvrtc.compiler import Source
from mta_kernels.operation import Convolution

BF16, FP16 = torch.bfloat16, torch.float16
A100, RTX_4090 = 163 * 1024, 99 * 1024  # bytes of shared memory that a block may have
TAPS = Convolution(6, 11, 5)


def compiled(source: Source) -> str:
    """What the compiler says of the registers of a source."""
    if reason := compiler.missing_package():
        pytest.skip(reason)
    code, words = compiler.compile_source(source)
    assert code.startswith(b"\x7fELF")
    if "ptxas info" not in words:
        pytest.skip(f"NVRTC {compiler.version()} keeps ptxas's words to itself")
    return words


def most_spilled(words: str) -> int:
    return max(int(part.split()[-1]) for part in words.split(" bytes spill stores")[:-1])


def test_rows_that_do_not_fit_are_refused(emulated_rows) -> None:  # noqa: F811
    cpu = gpu_of(torch.device("cpu"))  # the Hopper GPU that is played there
    assert rows.shape_unsupported(cpu, BF16, 16, 16384, False) is None
    assert "do not fit" in rows.shape_unsupported(cpu, BF16, 16, 200_000, False)
    assert "more than the 64" in rows.shape_unsupported(cpu, BF16, 65, 100, False)
    assert "float32" in rows.shape_unsupported(cpu, torch.float32, 16, 100, False)
    scores, logsumexp = torch.zeros(1, 2, 2, 24, dtype=BF16), torch.empty(1, 2, 2)
    where = {"first_position": 18, "keys": 20, "causal": True}
    for wrong in (scores[..., :20], scores[..., 1:], scores[:, :, :, ::2]):
        with pytest.raises(ValueError, match="expected contiguous rows"):
            mix_rows(wrong, None, None, logsumexp, **where)


@pytest.mark.parametrize(("capability", "shared_memory"), [((9, 0), H200), ((8, 0), A100), ((8, 9), RTX_4090)])
def test_a_plan_of_rows_fits_every_gpu(capability: tuple[int, int], shared_memory: int) -> None:
    found = 0
    for count in (1, 10, 16, 32, 64):
        for keys in (1, 40, 1000, 2048, 4096, 16384, 40000):
            for backward in (False, True):
                chosen = plan_on(capability, shared_memory, BF16, count, keys, backward=backward)
                if chosen is None:
                    continue
                found += 1
                constants = chosen.constants
                assert chosen.shared_memory <= shared_memory
                assert chosen.segment * constants.cluster >= keys
                assert constants.threads * constants.blocks <= 1536
                assert capability[0] == 9 or (constants.cluster == 1 and not constants.bulk)
    assert found > 20


ROWS = [
    ("sm_80", A100, 16, 2048, False), ("sm_86", RTX_4090, 10, 1024, False), ("sm_90a", H200, 16, 4096, False),
    ("sm_90a", H200, 64, 2048, False), ("sm_80", A100, 16, 1024, True), ("sm_90a", H200, 16, 4096, True),
    ("sm_90a", H200, 32, 4096, True),
]  # fmt: skip


@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_rows_compile_without_spills(shape: tuple[str, int, int, int, bool]) -> None:
    architecture, limit, count, keys, backward = shape
    chosen = plan_on((int(architecture[3]), int(architecture[4])), limit, BF16, count, keys, backward=backward)
    words = compiled(chosen.constants.source(architecture))
    assert words.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 1


def test_convolutions_that_cannot_be_are_refused() -> None:
    assert bands.shape_unsupported(BF16, TAPS) is None
    assert "dtype torch.float32 is not float16 or bfloat16" in bands.shape_unsupported(torch.float32, TAPS)
    assert "9x11 taps are more than the 8x17" in bands.shape_unsupported(BF16, Convolution(9, 11, 5))
    assert "2x18 taps are more than the 8x17" in bands.shape_unsupported(BF16, Convolution(2, 18, 8))


@pytest.mark.parametrize("gradients", [False, True])
def test_convolutions_compile_with_hardly_a_spill(gradients: bool) -> None:
    sizes = bands.GRADIENTS if gradients else bands.CONVOLVE
    constants = bands.BandConstants(gradients, BF16, TAPS, gradients, True, False, sizes)
    assert most_spilled(compiled(constants.source("sm_90"))) <= 48


def test_heads_that_cannot_meet_are_refused() -> None:
    def reason(limit: int, dtype: torch.dtype, count: int, conv: Convolution, kernel: str = "heads") -> str | None:
        return heads.shape_unsupported(limit, dtype, count, {kernel: conv})

    assert reason(H200, BF16, 16, TAPS) is None
    assert "dtype torch.float32 is not float16 or bfloat16" in reason(H200, torch.float32, 16, TAPS)
    assert "9x11 taps are more than the 8x17" in reason(H200, BF16, 16, Convolution(9, 11, 5))
    assert "17 heads are more than the 16" in reason(H200, BF16, 17, TAPS)
    assert "185856 bytes of shared memory; a block may have 166912" in reason(A100, BF16, 16, TAPS)
    assert reason(A100, BF16, 16, TAPS, "pre") is None
    assert "133632 bytes of shared memory; a block may have 101376" in reason(RTX_4090, BF16, 16, TAPS, "post")


@pytest.mark.parametrize("name", ["probabilities", "logits", *heads.WALKS])
def test_heads_compile_with_hardly_a_spill(name: str) -> None:
    if name not in heads.WALKS:
        tiles = heads.MixTileConstants(name, BF16, 16, True, False, heads.TILES[name])
        assert most_spilled(compiled(tiles.source("sm_90a"))) == 0
        return
    constants = heads.WalkConstants(name, BF16, 16, True, False, TAPS, heads.walk_sizes(name, (9, 0)))
    words = compiled(constants.source("sm_90a"))
    assert most_spilled(words) <= 16
    # A warp that takes more registers than the block has waits for ever.
    of_heads, mixers = (88 if constants.sizes.mixers == 8 else 104), constants.sizes.mixers
    used = max(int(part.split()[-1]) for part in words.split(" registers")[:-1])
    assert 16 * of_heads + mixers * 64 <= used * (16 + mixers)


@pytest.mark.parametrize(
    ("name", "architecture", "count"),
    [
        ("pre", "sm_80", 16), ("post", "sm_86", 10), ("post", "sm_100", 16), ("pre", "sm_120", 12),
        ("rebuild", "sm_80", 16),
    ],
)  # fmt: skip
def test_heads_compile_for_other_gpus(name: str, architecture: str, count: int) -> None:
    if reason := compiler.missing_package():
        pytest.skip(reason)
    constants = heads.WalkConstants(name, FP16, count, False, True, TAPS, heads.WALKS[name])
    assert compiler.compile_source(constants.source(architecture))[0].startswith(b"\x7fELF")


def test_tasks_of_a_chunk_end_nearly_together() -> None:
    """On 132 multiprocessors, of rows that see up to 12298 keys; of few rows they are no longer than need be."""

    def rounds(run: int) -> int:
        ends = [min(first + run, 2068) for first in range(0, 2068, run)]
        return -(-sum(-(-(12298 - 2068 + end) // 128) for end in ends) // 132)

    run = heads.rows_of_even_tasks(103, 6, 2068, 12298, 97, 1, 132)
    assert (run + 5) % 6 == 0
    assert rounds(run) * (run + 5 + 9) < 0.95 * rounds(103) * (103 + 5 + 9)
    assert heads.rows_of_even_tasks(103, 6, 40, 40, 1, 1, 132) == 103
    assert heads.rows_of_even_tasks(103, 6, 2068, 0, 97, 1, 1 << 30) == 103


@pytest.mark.parametrize("conv", [TAPS, Convolution(8, 17, 8), Convolution(2, 3, 1)], ids=str)
def test_what_rebuilds_needs_no_more_memory_than_the_forward(conv: Convolution) -> None:
    """As `stages.recomputes_probabilities` has it."""
    for capability in (None, (9, 0)):
        pre, rebuild = (
            heads.WalkConstants(name, BF16, 16, True, False, conv, heads.walk_sizes(name, capability))
            for name in ("pre", "rebuild")
        )
        assert rebuild.shared_memory <= pre.shared_memory
