"""Kernels of mixed rows and values in CUDA C++ for GPUs that need not be there: what fits, is refused, compiles."""

from __future__ import annotations

import pytest
import torch
from emulated_rows import H200, emulated_rows  # noqa: F401

from mta_kernels.gpu_limits import gpu_of
from mta_kernels.multi_token_attention.mix_cuda import mix_values, shapes
from mta_kernels.multi_token_attention.rows_cuda import mix_rows, rows
from mta_kernels.multi_token_attention.rows_cuda.plan import plan_on
from mta_kernels.nvrtc import compiler

BF16, FP16 = torch.bfloat16, torch.float16
A100, RTX_4090 = 163 * 1024, 99 * 1024  # bytes of shared memory that a block may have


@pytest.mark.parametrize(
    ("count", "head_dim", "dtype", "words"),
    [
        (16, 64, FP16, "float16 is not bfloat16"),
        (17, 64, BF16, "17 heads are more than 16"),
        (16, 72, BF16, "head_dim 72 is not a multiple of 16 up to 128"),
        (16, 144, BF16, "head_dim 144 is not"),
    ],
)
def test_values_that_cannot_be_mixed_are_refused(count: int, head_dim: int, dtype: torch.dtype, words: str) -> None:
    assert words in shapes.shape_unsupported(dtype, count, head_dim)
    exponentials, v = torch.empty(1, count, 3, 64, dtype=dtype), torch.empty(1, 1, 3, head_dim, dtype=BF16)
    where = {"first_position": 0, "keys": 3, "causal": True}
    with pytest.raises(ValueError, match=words):
        mix_values(exponentials, torch.empty(1, count, 3), None, v, torch.empty_like(v), **where)


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
    if reason := compiler.missing_package():
        pytest.skip(reason)
    architecture, limit, count, keys, backward = shape
    chosen = plan_on((int(architecture[3]), int(architecture[4])), limit, BF16, count, keys, backward=backward)
    code, words = compiler.compile_source(chosen.constants.source(architecture))
    assert code.startswith(b"\x7fELF")
    if "ptxas info" not in words:
        pytest.skip(f"NVRTC {compiler.version()} keeps ptxas's words to itself")
    assert words.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 1
