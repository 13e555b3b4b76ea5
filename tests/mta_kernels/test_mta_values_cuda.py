"""The values kernel against float64: on a Hopper GPU if there is one, else in the emulator."""

from __future__ import annotations

import pytest
import torch
from emulated_mix import emulated_mix  # noqa: F401
from kernel_inputs import DEVICE
from mta_values import Stored, assert_near, make_stored
from planted_faults import plant

from mta_kernels.multi_token_attention.mix_cuda import values_plan
from mta_kernels.multi_token_attention.mix_cuda.values import mix_values
from mta_kernels.multi_token_attention.mix_cuda.values_plan import ValuesConstants

ON_GPU = DEVICE == "cuda"
BF16 = torch.bfloat16


@pytest.fixture
def gpu(request: pytest.FixtureRequest):
    """The kernel runs, in the emulator where there is no GPU, whose seed may be changed."""
    return None if ON_GPU else request.getfixturevalue("emulated_mix")


def assert_right(stored: Stored, **options) -> None:
    """Near to float64, and nothing written but the rows of out."""
    out = stored.out
    mix_values(stored.exponentials, stored.scale, stored.post_mix, stored.v, out, **stored.options, **options)
    assert_near(out, stored)
    assert out._base is not None
    assert out._base[:, :, :3].isnan().all()


# Odd seeds have copies come late, and seeds 2 and 3 have warps fall behind.
@pytest.mark.parametrize(
    ("head_dim", "cluster", "rows", "seed"),
    [
        (64, 2, 64, 0), (64, 2, 64, 3), (64, 4, 128, 1), (64, 4, 128, 2), (128, 4, 64, 0), (128, 4, 64, 3),
        (128, 8, 128, 1), (128, 8, 128, 2),
    ],
)  # fmt: skip
def test_a_cluster_shares_a_tile(gpu, seed: int, head_dim: int, cluster: int, rows: int) -> None:
    if gpu is not None:
        gpu.seed = seed
    constants = ValuesConstants(16, head_dim, cluster, rows, 2)
    assert_right(make_stored(1, 16, 16, 150, 170, head_dim, seed=seed), constants=constants)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 10, 5, 130, 150, 128), {"mix_dtype": BF16}),
        ((1, 10, 10, 65, 65, 64), {}),
        ((2, 1, 1, 1, 1, 16), {"mix_dtype": None}),
        ((1, 3, 1, 70, 200, 48), {"above": 100}),
        ((2, 16, 4, 40, 90, 96), {"mix_dtype": None}),
        ((1, 7, 7, 70, 90, 32), {"causal": False, "above": 3}),
    ],
    ids=str,
)
def test_shapes(gpu, shape: tuple[int, ...], options: dict) -> None:
    assert_right(make_stored(*shape, **options))


def test_values_of_any_strides(gpu) -> None:
    stored = make_stored(2, 4, 2, 10, 70, 16)
    stored.v = stored.v.transpose(1, 2).contiguous().transpose(1, 2)
    assert_right(stored)
    stored.v = torch.stack((stored.v, stored.v), -1)[..., 0]
    assert_right(stored)


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "words"),
    [
        (16, 64, torch.float16, "float16 is not bfloat16"),
        (17, 64, BF16, "17 heads are more than 16"),
        (16, 72, BF16, "head_dim 72 is not a multiple of 16 up to 128"),
        (16, 144, BF16, "head_dim 144 is not"),
    ],
)
def test_what_it_does_not_take(heads: int, head_dim: int, dtype: torch.dtype, words: str) -> None:
    stored = make_stored(1, heads, 1, 1, 1, head_dim)
    with pytest.raises(ValueError, match=words):
        mix_values(stored.exponentials.to(dtype), stored.scale, None, stored.v, stored.out, **stored.options)


def test_exponentials_of_another_layout() -> None:
    stored = make_stored(1, 4, 4, 3, 3, 16)
    with pytest.raises(ValueError, match="expected contiguous rows of a multiple of 64 columns, 3 or more"):
        mix_values(stored.exponentials[..., :72], stored.scale, None, stored.v, stored.out, **stored.options)


@pytest.mark.skipif(ON_GPU, reason="plants faults in the emulated sources")
@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("values.cu", "block.units.wait_empty(unit);", ""),
        ("values.cu", "        block.values.wait_empty(step);", ""),
        ("values_mixing.cuh", "        block.units.wait_full(unit);", ""),
        ("values_mixing.cuh", "if (i == 0) block.planes.wait_empty(step);", ";"),
        ("values_products.cuh", "        block.planes.wait_full(step);", ""),
        ("values_products.cuh", "        products_wait<0>();", ""),
    ],
    ids=["units over units", "values over values", "no wait for units", "planes over planes", "no wait for planes",
         "planes free too soon"],
)  # fmt: skip
def test_the_emulator_finds_what_a_gpu_may_hide(gpu, monkeypatch, tmp_path, name, line, instead) -> None:
    plant(monkeypatch, values_plan, tmp_path / "mix_cuda", name, line, instead)
    stored = make_stored(1, 4, 2, 70, 330, 64, room=0)

    def check_orders() -> None:
        for gpu.seed in range(6):
            assert_right(stored)

    with pytest.raises(AssertionError):
        check_orders()
