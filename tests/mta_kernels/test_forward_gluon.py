"""The forward in Gluon against float64: on an H100 or H200, else its code as Python; and compiled for Hopper."""

from __future__ import annotations

import pytest
import torch
from emulated_gluon import emulate
from kernel_inputs import DEVICE, assert_close, make, poison_memory, relative_error

from mta_kernels.conv_attention import conv_attention, conv_attention_reference
from mta_kernels.conv_attention.context_parallel.eager import EagerTiles
from mta_kernels.conv_attention.context_parallel.fused import TritonTiles
from mta_kernels.conv_attention.context_parallel.tiles import Problem, tiles
from mta_kernels.conv_attention.fastpath import triton_forward
from mta_kernels.conv_attention.triton import forward
from mta_kernels.gpu_limits import capability
from mta_kernels.operation import Operation
from mtabench import registry
from mtabench.static import runs
from mtabench.static.limits import limits_of
from mtabench.static.shapes import Shape

HALF = torch.float16
ON_HOPPER = DEVICE == "cuda" and capability(torch.device("cuda", 0)) == (9, 0)
COMPUTED = {"depth": 384, "head_dim": 64, "element_size": 2, "compute_capability": (9, 0), "packed": False}
DEPTHS = [(6, 11), (5, 5), (4, 6), (11, 3), (2, 9), (1, 1)]  # taps of each depth


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch):
    """`conv_attention` that must take the kernel in Gluon; whatever this does not write is NaN."""
    if DEVICE == "cuda" and not ON_HOPPER:
        pytest.skip("needs an H100 or H200, or no GPU")
    poison_memory(monkeypatch)
    if not ON_HOPPER:
        emulate(monkeypatch)
    monkeypatch.setattr(triton_forward, "can_replay", lambda: False)  # every call is to come here
    launch, launched = forward.gluon_launcher(), []
    assert launch is not None
    monkeypatch.setattr(forward, "gluon_launcher", lambda: lambda *args: launched.append(launch(*args)))

    def attention(*inputs, **options):
        launched.clear()
        out = conv_attention(*inputs, backend="triton", **options)
        assert launched
        return out

    attention.launched = launched
    return attention


@pytest.mark.parametrize("seq_len", [1, 5, 64, 65, 130, 400])
@pytest.mark.parametrize("taps", [(6, 11), (1, 1), (11, 3)], ids=lambda t: f"{t[0]}x{t[1]}")
def test_taps_and_lengths(gluon, taps: tuple[int, int], seq_len: int) -> None:
    inputs = make(1, 2, 1, seq_len, 64, taps, HALF)
    for causal in (True, False):
        assert_close(gluon(*inputs, causal=causal), *inputs, causal=causal)


@pytest.mark.parametrize("taps", [(2, 9), (4, 6), (5, 1), (1, 4), (6, 31)], ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize("pad_key", ["both", "left", "right"])
def test_key_paddings(gluon, taps: tuple[int, int], pad_key: str) -> None:
    inputs = make(1, 2, 2, 150, 64, taps, HALF)
    assert_close(gluon(*inputs, pad_key=pad_key), *inputs, pad_key=pad_key)


@pytest.mark.parametrize("taps", [(6, 11), (1, 1)], ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize(("rows", "length"), [(1, 64), (1, 130), (7, 200), (100, 300), (130, 321)])
def test_chunks_of_a_prompt(gluon, taps: tuple[int, int], rows: int, length: int) -> None:
    q, k, v, weight = make(1, 4, 2, length, 64, taps, HALF)
    before = length - rows
    history = q[:, :, max(0, before - taps[0] + 1) : before]
    whole = conv_attention_reference(*(x.double() for x in (q, k, v, weight)))
    got = gluon(q[:, :, before:], k, v, weight, q_history=history)
    assert relative_error(got, whole[:, :, before:]) < 2e-3


@pytest.mark.parametrize("owner", [0, 1])
def test_tiles_of_a_sequence_that_ranks_share(gluon, owner: int) -> None:
    """Margins beside the rows of a tile, and results in float32."""
    problem = Problem(rows=80, causal=True, scale=0.125, pad=5, query_taps=6, key_taps=11)
    sizes = [problem.rows + before + after for before, after in zip(problem.before, problem.after, strict=True)]
    q, k, v = (
        torch.randn(2, 1, heads, n, 64, device=DEVICE).to(HALF) for heads, n in zip((2, 1, 1), sizes, strict=True)
    )
    weight = make(1, 2, 1, 8, 64, (6, 11), HALF)[3]
    found = list(tiles(problem, 1, owner, 2))
    assert {tile.causal for tile in found} == {owner == 1, False}
    for tile in found:
        parts = tile.of(q, k, v)
        want = EagerTiles(0).forward(problem, tile, *(x.double() for x in parts), weight.double())
        for got, exact in zip(TritonTiles(0).forward(problem, tile, *parts, weight), want, strict=True):
            assert got.dtype == torch.float32
            assert relative_error(got, exact) < 2e-3
    assert len(gluon.launched) == len(found)


def test_heads_in_groups(gluon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three heads' keys fit in L2, of ten."""
    inputs = make(2, 5, 5, 140, 64, (6, 11), HALF)
    monkeypatch.setattr(forward, "KEYS_IN_L2", 3 * 140 * 384 * 2)
    assert_close(gluon(*inputs), *inputs)


def test_large_scores(gluon) -> None:
    inputs = make(1, 2, 2, 200, 64, (6, 11), HALF, magnitude=30.0)
    out = gluon(*inputs)
    assert torch.isfinite(out).all()
    assert_close(out, *inputs)


def test_all_equal_scores_average_the_values(gluon) -> None:
    q, k, v, weight = make(1, 1, 1, 150, 64, (3, 3), HALF)
    count = torch.arange(1, 151, device=DEVICE)[:, None]
    want = v[0, 0].double().cumsum(0) / count
    assert relative_error(gluon(torch.zeros_like(q), k, v, weight)[0, 0], want) < 1e-3


def test_the_future_changes_nothing(gluon) -> None:
    """Bit for bit, whatever the later tokens hold."""
    q, k, v, weight = make(1, 1, 1, 260, 64, (6, 11), HALF)
    before = gluon(q, k, v, weight)
    for token in (0, 63, 64, 127, 200):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, token + 1 :] = 60 - 7 * x[:, :, token + 1 :]
        assert torch.equal(before[:, :, : token + 1], gluon(*changed, weight)[:, :, : token + 1])


def test_any_strides_and_a_result_in_float32(gluon) -> None:
    q, k, v, weight = make(1, 2, 2, 70, 64, (6, 11), HALF)
    want = gluon(q, k, v, weight)
    spread = [torch.stack([x, x], dim=4)[..., 0] for x in (q, k, v)]
    assert torch.equal(gluon(*spread, weight), want)
    out, logsumexp = forward.conv_attention_forward(Operation.of((6, 11), 64), q, k, v, weight, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert torch.equal(out.half(), want)
    assert torch.isfinite(logsumexp).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_long_sequence(gluon, dtype: torch.dtype) -> None:
    inputs = make(1, 4, 2, 3000, 64, (6, 11), dtype)
    out = gluon(*inputs)
    assert_close(out, *inputs)
    assert torch.equal(out, gluon(*inputs))


@pytest.mark.parametrize(
    "other",
    [{"depth": 448}, {"depth": 512}, {"head_dim": 128}, {"element_size": 4}, {"compute_capability": (10, 0)},
     {"compute_capability": (8, 0)}, {"packed": True}],
    ids=str,
)  # fmt: skip
def test_what_it_does_not_compute(other: dict) -> None:
    assert forward.gluon_computes(**COMPUTED)
    assert not forward.gluon_computes(**COMPUTED | other)


def test_other_releases_of_triton_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward.triton, "__version__", "3.7.0")
    assert forward.gluon_launcher.__wrapped__() is None


@pytest.mark.parametrize(
    "shapes",
    [
        (Shape(conv=(6, 31), dtype="fp16"), Shape(conv=(6, 11), causal=False)),
        pytest.param(tuple(Shape(conv=taps) for taps in DEPTHS), marks=pytest.mark.long),
    ],
    ids=["longest", "others"],
)
def test_it_compiles_without_spills(shapes: tuple[Shape, ...]) -> None:
    found = runs.inspect(
        [limits_of("sm_90")], shapes, [registry.sources()["forward"]], names=("fwd_gluon",), disassemble=False
    )
    assert [kernel.status for kernel in found.kernels] == ["ok"] * len(shapes)
    assert {(kernel.spill_store_bytes, kernel.stack_bytes) for kernel in found.kernels} == {(0, 0)}


def test_all_depths_are_compiled() -> None:
    assert {64 * min(taps) for taps in DEPTHS} == set(forward.GLUON_DEPTHS)
