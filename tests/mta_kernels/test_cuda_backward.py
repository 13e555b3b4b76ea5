"""What only the CUDA backward has, against float64: on a GPU if there is one, else in the emulator."""

from __future__ import annotations

import itertools

import pytest
import torch
from banded_backwards import Kernel, inputs, kernel_of
from emulated_forward import emulated_forward  # noqa: F401
from kernel_inputs import assert_as_reference

from mta_kernels.conv_attention import unsupported
from mta_kernels.conv_attention.cuda_decode import backend
from mta_kernels.conv_attention.cuda_sm80 import backward_constants
from mta_kernels.conv_attention.cuda_sm80.backward_constants import LARGE_TILES, SMALL_TILES, WIDE_TILES, Tiles
from mta_kernels.operation import Convolution, key_padding

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return kernel_of("cuda", request, monkeypatch)


@pytest.mark.parametrize(
    ("tiles", "head_dim", "options"),
    [
        *((tiles, 24, {}) for tiles in SMALL_TILES),
        *((tiles, 72, {"causal": False}) for tiles in LARGE_TILES),
        *((tiles, 136, {"causal": False}) for tiles in WIDE_TILES),
        (WIDE_TILES[0], 200, {"pad_key": "left"}),
        (WIDE_TILES[-1], 256, {}),
    ],
    ids=str,
)
def test_tiles_of_every_gpu(monkeypatch: pytest.MonkeyPatch, tiles: Tiles, head_dim: int, options) -> None:
    for name in ("SMALL_TILES", "LARGE_TILES", "WIDE_TILES"):
        monkeypatch.setattr(backward_constants, name, (tiles,))
    assert_as_reference(inputs(1, 2, 1, 150, head_dim, (6, 11)), "cuda", **options)


@pytest.mark.parametrize("limit", [99, 163, 227])
def test_every_shape_fits(limit: int) -> None:
    """But on the smallest GPUs those above head dim 128."""
    for head_dim, taps, pad_key in itertools.product(
        range(16, 257, 8), ((8, 17), (7, 17), (1, 1)), ("both", "left", "right")
    ):
        if limit == 99 and head_dim > 128 and taps == (1, 1):
            continue  # some have room
        conv = Convolution(*taps, key_padding(taps[1], pad_key))
        found = backward_constants.constants_for(BF16, head_dim, conv, True, False, limit * 1024)
        if limit == 99 and head_dim > 128:
            assert found is None
        else:
            assert found.tiles.blocks * (found.shared_memory + 1024) <= (limit + 1) * 1024


@pytest.mark.parametrize(
    ("number", "head_dim", "refused"),
    [(0, 128, False), (0, 136, True), (1, 256, False), (2, 256, False)],
)
def test_a_gpu_without_room_is_refused(
    monkeypatch: pytest.MonkeyPatch, number: int, head_dim: int, refused: bool
) -> None:
    """For a backward alone."""
    limits = 99, 163, 227
    for name in ("absent", "platform_unsupported"):
        monkeypatch.setattr(backend, name, lambda device: None)
    monkeypatch.setattr(backend, "shared_memory_limit", lambda device: limits[device.index] * 1024)
    asked = {"device": f"cuda:{number}", "dtype": BF16, "head_dim": head_dim, "query_taps": 8, "key_taps": 11}
    reason = (
        f"the backward of head_dim {head_dim} with 8x11 taps needs more shared memory than the {limits[number]} KB "
        "that a thread block has on this GPU"
    )
    assert unsupported("cuda", backward=True, **asked) == (reason if refused else None)
    assert unsupported("cuda", **asked) is None


@pytest.mark.parametrize(
    ("head_dim", "of_limits"),
    [(64, (1, 0, 0)), (80, (3, 1, 0)), (96, (3, 2, 0)), (128, (3, 2, 1)), (192, (None, 1, 0)), (256, (None, 1, 1))],
)
def test_the_usual_tiles_of_gpus(head_dim: int, of_limits: tuple[int, ...]) -> None:
    tiles = SMALL_TILES if head_dim <= 64 else LARGE_TILES if head_dim <= 128 else WIDE_TILES
    for limit, number in zip((99, 163, 227), of_limits, strict=True):
        found = backward_constants.constants_for(BF16, head_dim, Convolution(6, 11, 5), True, False, limit * 1024)
        assert found is None if number is None else found.tiles == tiles[number]
