"""The CUDA forward against float64: on a GPU if there is one, else in the emulator."""

from __future__ import annotations

import pytest
import torch
from banded_forwards import ON_GPU, forward_by
from emulated_forward import emulated_forward  # noqa: F401
from kernel_inputs import DEVICE, assert_close, make, relative_error
from planted_faults import plant

from mta_kernels.backend import Request
from mta_kernels.conv_attention import conv_attention_reference, explain, operators
from mta_kernels.conv_attention.banded import structures
from mta_kernels.conv_attention.cuda_decode import backend
from mta_kernels.conv_attention.cuda_sm80 import forward
from mta_kernels.conv_attention.hopper import backend as hopper_backend
from mta_kernels.conv_attention.triton.backend import TRITON
from mta_kernels.operation import Convolution, Operation, key_padding

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """`conv_attention` by the CUDA kernel."""
    return forward_by("cuda", request, monkeypatch)


def test_heads_share_l2_in_turns(cuda, monkeypatch) -> None:
    q, k, v, weight = make(2, 3, 3, 140, 64, (6, 11), BF16)
    monkeypatch.setattr(structures, "L2_BYTES", k.nbytes)
    assert structures.heads_in_l2(k, heads=6) == 3
    assert_close(cuda(q, k, v, weight), q, k, v, weight)


def test_the_logsumexp_of_rows(cuda) -> None:
    q, k, v, weight = make(1, 2, 1, 140, 64, (6, 11), BF16)
    cuda(q, k, v, weight)
    _, got = operators.CONV_ATTENTION(q, k, v, weight, True, 0.125, 5, 0, None, "cuda")
    ones = torch.cat([v.new_zeros(1, 1, 140, 32), v.new_ones(1, 1, 140, 32)], dim=3)
    assert (cuda(q, k, ones, weight)[..., 32:] == 1).all()
    scores = q.double() @ k.double().transpose(2, 3) * 0.125
    hidden = torch.ones(140, 140, device=DEVICE).triu(1).bool()
    padded = torch.nn.functional.pad(scores.masked_fill(hidden, 0), (5, 5, 5, 0))
    c = torch.nn.functional.conv2d(padded, weight.double()[:, None], groups=2).masked_fill(hidden, -torch.inf)
    assert relative_error(got, c.logsumexp(3)) < 1e-3


@pytest.mark.parametrize(
    ("major", "head_dim", "taps", "gradients", "taken"),
    [
        (8, 64, (6, 11), False, True),
        (12, 128, (2, 9), False, False),
        (12, 128, (3, 9), False, True),
        (9, 128, (6, 11), False, True),
        (8, 136, (6, 11), False, True),
        (9, 136, (6, 11), False, False),
        (9, 136, (6, 11), True, True),
        (8, 64, (6, 11), True, True),
        (12, 128, (6, 11), True, True),
        (8, 64, (4, 11), True, False),
        (8, 64, (3, 9), True, False),
        (10, 64, (6, 11), True, False),
        (8, 256, (1, 11), False, False),
        (10, 256, (6, 11), True, False),
        (10, 64, (6, 11), False, False),
        (11, 64, (6, 11), False, False),
    ],
)
def test_auto_takes_it_where_triton_has_more_to_multiply(monkeypatch, major, head_dim, taps, gradients, taken) -> None:
    monkeypatch.setattr(backend, "absent", lambda device: None)
    monkeypatch.setattr(backend, "capability", lambda device: (major, 0))
    monkeypatch.setattr(backend, "_multiplies_alike", backend._multiplies_alike.__wrapped__)
    operation = Operation(Convolution(*taps, key_padding(taps[1], "both")), 1.0)
    request = Request(operation, "cuda", BF16, head_dim, gradients)
    assert (backend.rank(request) < TRITON.rank(request)) == taken
    assert backend.rank(request._replace(over_ranks=True)) is None


def test_auto_takes_it_with_gradients_and_without(cuda, monkeypatch) -> None:
    monkeypatch.setattr(backend, "_multiplies_alike", lambda *asked: True)
    monkeypatch.setattr(hopper_backend, "platform_unsupported", lambda device: "no Hopper GPU")
    q, k, v, weight = make(1, 2, 1, 24, 64, (6, 11), FP16)
    assert explain(q, k, v, weight).backend == "cuda"
    assert explain(q, k, v, weight.requires_grad_()).backend == "cuda"
    assert explain(*make(1, 2, 1, 24, 64, (1, 11), FP16)).backend != "cuda"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "taps", "words"),
    [
        (torch.float32, 64, (6, 11), "dtype torch.float32 is not float16 or bfloat16"),
        (BF16, 20, (6, 11), "head_dim 20 is not a multiple of 8 from 16 to 256"),
        (BF16, 264, (6, 11), "head_dim 264"),
        (BF16, 64, (9, 11), "9x11 taps are outside 1x1 to 8x17"),
        (BF16, 64, (6, 18), "6x18 taps are outside 1x1 to 8x17"),
    ],
)
def test_what_it_cannot_take_is_told(cuda, dtype, head_dim, taps, words: str) -> None:
    q, k, v, weight = make(1, 1, 1, 8, head_dim, taps, dtype)
    with pytest.raises(ValueError, match=words):
        cuda(q, k, v, weight)


@pytest.mark.parametrize("limit", [99, 163, 227])
def test_every_shape_fits(limit: int) -> None:
    for head_dim in forward.HEAD_DIMS:
        for pad_key in ("both", "left", "right"):
            conv = Convolution(8, 17, key_padding(17, pad_key))
            constants = forward.ForwardConstants(BF16, head_dim, conv, True, False, limit * 1024)
            assert constants.shared_memory <= 99 * 1024
            assert limit == 99 or 2 * (constants.shared_memory + 1024) <= (limit + 1) * 1024


@pytest.mark.parametrize(
    ("limit", "head_dim", "keys"),
    [(99, 64, 64), (99, 80, 32), (99, 128, 64), (163, 96, 64), (163, 128, 32), (227, 128, 64), (227, 136, 32)],
)
def test_the_keys_of_a_tile_let_two_blocks_share_an_sm(limit: int, head_dim: int, keys: int) -> None:
    conv = Convolution(6, 11, 5)
    assert forward.ForwardConstants(BF16, head_dim, conv, True, False, limit * 1024).keys == keys


@pytest.mark.parametrize(("head_dim", "options"), [(128, {}), (112, {"causal": False, "pad_key": "left"})], ids=str)
def test_tiles_of_an_a100(cuda, monkeypatch: pytest.MonkeyPatch, head_dim: int, options) -> None:
    monkeypatch.setattr(forward, "shared_memory_limit", lambda device: 163 * 1024)
    q, k, v, weight = make(1, 2, 1, 200, head_dim, (6, 11), BF16)
    assert_close(cuda(q, k, v, weight, **options), q, k, v, weight, **options)


@pytest.mark.skipif(ON_GPU, reason="plants faults in the emulated source")
@pytest.mark.parametrize(
    ("file", "line", "instead"),
    [
        ("forward.cu", "__syncthreads();  // the keys have come", "//"),
        ("forward.cu", "__syncthreads();  // the values have come", "//"),
        ("forward.cu", "copies_wait<0>();\n        __syncthreads();  // the keys", "__syncthreads();  // the keys"),
        ("forward.cu", "copies_wait<0>();\n        __syncthreads();  // the values", "__syncthreads();  // the values"),
    ],
    ids=[
        "keys that other threads copy",
        "scores that other warps store",
        "no wait for the keys",
        "no wait for the values",
    ],
)
def test_the_emulator_finds_what_a_gpu_may_hide(
    cuda, monkeypatch: pytest.MonkeyPatch, tmp_path, file: str, line: str, instead: str
) -> None:
    plant(monkeypatch, forward, tmp_path, file, line, instead)
    inputs = make(1, 2, 1, 140, 64, (6, 11), BF16)
    want = conv_attention_reference(*(x.double() for x in inputs))

    def run() -> None:
        for seed in range(8):
            assert relative_error(cuda(*inputs, seed=seed), want) < 0.005
            # A row that reads what nobody wrote is NaN, and computing it again would hide that.
            _, logsumexp = operators.CONV_ATTENTION(*inputs, True, 0.125, 5, 0, None, "cuda")
            assert not (logsumexp.view(torch.int32) & 1).any()

    with pytest.raises(AssertionError):  # wrong, or what the emulator says
        run()
