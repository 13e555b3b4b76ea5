"""The CUDA decode by wgmma and the copy engine against float64: on a Hopper GPU, else in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from decode_steps import assert_decodes, exact, make_decode, paged
from emulated_decode import H200, emulated_decode  # noqa: F401
from kernel_inputs import DEVICE, poison_memory, relative_error
from planted_faults import plant
from torch import Tensor

from mta_kernels.conv_attention import conv_attention_decode
from mta_kernels.conv_attention.cuda_decode import decode, hopper_plan
from mta_kernels.conv_attention.cuda_decode.hopper_plan import HopperConstants, hopper_plan_on, key_layout
from mta_kernels.nvrtc import compiler
from mta_kernels.operation import Convolution

ON_GPU = DEVICE == "cuda"
BF16, FP16 = torch.bfloat16, torch.float16
RAGGED = [40, 0, 300, 1, 5, 17, 6, 70]  # some shorter than the taps
CONV = Convolution(6, 11, 5)


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """`backend="cuda"` runs, in an emulated Hopper GPU where there is none; with NaN in whatever nobody writes.

    `described` counts the calls that the copy engine read caches for. A GPU has too many multiprocessors for caches as
    short as these, so that there the kernel runs where it does not pay.
    """
    poison_memory(monkeypatch)
    if ON_GPU:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("no Hopper GPU")
        monkeypatch.setattr(hopper_plan, "FEWEST_KEYS", 0)
    fields = SimpleNamespace() if ON_GPU else request.getfixturevalue("emulated_decode")
    fields.hopper, fields.described = True, 0

    def counted(*args) -> hopper_plan.Maps:
        fields.described += 1
        return hopper_plan.maps(*args)

    monkeypatch.setattr(decode, "maps", counted)
    return fields


def run(inputs: tuple[Tensor, ...], **options) -> Tensor:
    q, k, v, weight, lengths = inputs
    return conv_attention_decode(q, k, v, weight, lengths=lengths, backend="cuda", **options)


def make_groups(
    lengths: list[int], group: int = 8, dtype: torch.dtype = FP16, head_dim: int = 64, taps=(6, 11), **options
):
    """As `make_decode`, with one KV head and a capacity that is a whole number of groups of keys."""
    q, k, v, weight, at = make_decode(lengths, group, 1, head_dim, taps, dtype, **options)
    fill = (0, 0, 0, -k.shape[2] % hopper_plan.GROUP)
    k, v = (torch.nn.functional.pad(x, fill, value=float("nan")) for x in (k, v))
    return q, k, v, weight, at


@pytest.mark.parametrize("multiprocessors", [1, 8])
def test_any_number_of_programs(gpu, multiprocessors: int) -> None:
    """Programs with many tiles and heads, and heads with many programs."""
    gpu.multiprocessors = multiprocessors
    for lengths in ([900, 33], [130] * 15, RAGGED * 9):  # the last on a GPU too without merge.cu
        inputs = make_groups(lengths)
        assert_decodes(run(inputs), *inputs, rounding=4)


def test_two_blocks_of_heads_whose_last_programs_add_up(gpu, monkeypatch) -> None:
    """Twice, by counts that are zeros again after the first call."""
    monkeypatch.setattr(hopper_plan, "FEWEST_KEYS", 0)
    gpu.multiprocessors = 9
    inputs = make_groups([300, 900, 20, 0, 130], 24)
    for _ in range(2):
        assert_decodes(run(inputs), *inputs, rounding=4)
    assert gpu.described == 2


def run_in_pages(inputs: tuple[Tensor, ...], page_size: int, **options) -> Tensor:
    q, k, v, weight, lengths = inputs
    (k_pages, table), (v_pages, _) = paged(k, page_size), paged(v, page_size)
    used = -(-lengths // page_size)
    table[torch.arange(table.shape[1], device=DEVICE) >= used[:, None]] = 2**30  # such entries are never read
    return run((q, k_pages, v_pages, weight, lengths), block_table=table, **options)


@pytest.mark.parametrize("page_size", [128, 256])
def test_pages(gpu, page_size: int) -> None:
    gpu.multiprocessors = 2
    inputs = make_decode([16, 65, 290], 16, 1, 128, (6, 11), BF16)
    assert_decodes(run_in_pages(inputs, page_size), *inputs, rounding=4)
    assert gpu.described == 1


@pytest.mark.parametrize(("group", "head_dim", "taps"), [(3, 64, (8, 16)), (16, 128, (6, 11))], ids=str)
def test_shares_begin_behind_a_page(gpu, monkeypatch, tmp_path, group: int, head_dim: int, taps: tuple[int, int]):
    """So one of 128 keys has two tiles, wherever it is: in the emulator no program takes a third."""
    if not ON_GPU:
        count = "(stop + DELAY - first_column + KEYS - 1) / KEYS"
        plant(monkeypatch, hopper_plan, tmp_path / "cuda_decode", "hopper_layout.cuh", count, f"min({count}, 2)")
    monkeypatch.setattr(hopper_plan, "FEWEST_KEYS", 0)
    gpu.multiprocessors = 8
    for lengths, splits in (([512, 528, 497, 450, 130, 5], 4), ([512, 512], "auto")):
        inputs = make_decode(lengths, group, 1, head_dim, taps, BF16)
        assert_decodes(run_in_pages(inputs, 128, splits=splits), *inputs, rounding=4)
    assert gpu.described == 2


@pytest.mark.parametrize("in_pages", [False, True])
def test_two_narrow_heads_take_it_with_many_keys(gpu, monkeypatch, in_pages: bool) -> None:
    monkeypatch.setattr(hopper_plan, "FEWEST_OF_TWO", 320 if not ON_GPU else 0)
    gpu.multiprocessors = 2
    for lengths, described in (([300, 70], 1), ([300], int(ON_GPU))):
        inputs, gpu.described = make_groups(lengths, 2, BF16), 0
        got = run_in_pages(inputs, 128) if in_pages else run(inputs)
        assert_decodes(got, *inputs, rounding=4)
        assert gpu.described == described


def test_any_order_of_heads_and_keys(gpu) -> None:
    """Several sequences and KV heads: heads, keys or sequences may be the slowest dimension."""
    q, k, v, weight, lengths = make_decode([300, 90], 16, 2, 64, (6, 11), FP16)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % 32), value=float("nan")) for x in (k, v))
    want = run((q, k, v, weight, lengths))
    assert_decodes(want, q, k, v, weight, lengths, rounding=4)
    token_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    assert torch.equal(run((q, *token_major, weight, lengths)), want)
    one_of_two = [torch.stack([x, x], dim=1)[:, 0] for x in (k, v)]  # sequences too far apart to be groups or heads
    assert gpu.described == 2
    assert_decodes(run((q, *one_of_two, weight, lengths)), q, k, v, weight, lengths, rounding=4)
    assert gpu.described == 2


def test_keys_and_values_have_strides_of_their_own(gpu) -> None:
    """Values token-major or part of something larger, keys not. One cache for all sequences, which no map tells."""
    q, k, v, weight, lengths = make_groups([300, 90])
    want = run((q, k, v, weight, lengths))
    assert_decodes(want, q, k, v, weight, lengths, rounding=4)
    token_major, part = v.transpose(1, 2).contiguous().transpose(1, 2), torch.stack([v, v], dim=1)[:, 1]
    for other in (token_major, part):
        assert torch.equal(run((q, k, other, weight, lengths)), want)
    assert gpu.described == 3
    k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
    lengths = lengths.clamp(max=90).flip(0).expand(2).contiguous()
    assert_decodes(run((q, k, v, weight, lengths)), q, k, v, weight, lengths, rounding=4)
    assert gpu.described == 3


def test_what_other_kernels_read(gpu) -> None:
    """A capacity that is no whole number of groups, and pages of fewer keys."""
    inputs = make_decode([40], 8, 1, 64, (6, 11), FP16)
    assert inputs[1].shape[2] % hopper_plan.GROUP
    assert_decodes(run(inputs), *inputs, rounding=4)
    q, k, v, weight, lengths = inputs
    (k, table), (v, _) = paged(k, 64), paged(v, 64)
    assert_decodes(run((q, k, v, weight, lengths), block_table=table), *inputs, rounding=4)
    assert gpu.described == 0
    if ON_GPU:
        return
    gpu.multiprocessors = 2
    inputs = make_groups([450], 16, BF16, 128)  # warp groups would share tiles, and a program have few keys
    assert_decodes(run(inputs), *inputs, rounding=4)
    assert gpu.described == 0


@pytest.mark.parametrize(
    ("size", "scale"),
    [(1e-3, 0.125), (300.0, 0.125), (1.0, 6e4), (1.0, -0.5), (1.0, 0.0), (1.0, 1e-9), (1.0, 1e24)],
    ids=str,
)
def test_scores_of_any_size(gpu, size: float, scale: float) -> None:
    """fp16 holds the folded queries in units of a power of two. Eager rounds scores to fp16."""
    inputs = make_groups([5, 70, 200], magnitude=size)
    want = exact(*inputs, scale=scale)
    assert relative_error(run(inputs, scale=scale), want) < 0.01


@pytest.mark.parametrize(
    ("group", "head_dim", "taps", "dtype", "pad"),
    [(3, 72, (8, 16), BF16, "left"), (20, 128, (1, 11), FP16, "right")],
    ids=str,
)
def test_shapes(gpu, group: int, head_dim: int, taps: tuple[int, int], dtype: torch.dtype, pad: str) -> None:
    gpu.multiprocessors = 1
    for lengths in ([150, 300], [9, 258]):
        inputs = make_groups(lengths, group, dtype, head_dim, taps)
        assert_decodes(run(inputs, pad_key=pad), *inputs, rounding=4, pad_key=pad)
    assert gpu.described == 2


@pytest.mark.skipif(ON_GPU, reason="plants faults in the emulated source")
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("            barrier_wait(shared + HANDED_AT", "            if (false) barrier_wait(shared + HANDED_AT"),
        ("        meet();\n        uint32_t from", "        uint32_t from"),
    ],
    ids=["scores before the last tile's", "before the warp's before"],
)
def test_the_emulator_finds_what_a_gpu_may_hide(gpu, monkeypatch, tmp_path, line: str, instead: str) -> None:
    plant(monkeypatch, hopper_plan, tmp_path / "cuda_decode", "hopper_heads.cu", line, instead)
    gpu.multiprocessors = 1
    inputs = make_groups([700])
    want = exact(*inputs)
    errors = []
    for gpu.seed in range(8):
        errors.append(relative_error(run(inputs), want))
    assert not max(errors) < 0.01


def test_a_plan_fits_or_there_is_none() -> None:
    for head_dim in (64, 80, 128):
        for taps in ((1, 1), (6, 11), (8, 16)):
            for group in (5, 8, 12, 40):
                for pages in (False, True):
                    constants = hopper_plan_on(H200, 132, BF16, head_dim, Convolution(*taps, 0), group, pages).constants
                    assert constants.shared_memory <= H200
                    assert constants.heads * constants.sharing * constants.head_blocks >= group
    for head_dim, taps, group in (
        (56, (6, 11), 8),
        (136, (6, 11), 8),
        (64, (9, 11), 8),
        (64, (6, 17), 8),
        (64, (6, 11), 1),
    ):
        assert hopper_plan_on(H200, 132, BF16, head_dim, Convolution(*taps, 0), group, False) is None
    assert hopper_plan_on(101376, 132, BF16, 128, CONV, 16, False) is None


def test_how_the_copy_engine_sees_keys() -> None:
    keys = torch.empty(3, 4, 64, 128, dtype=FP16)
    assert key_layout(keys) == (2, 12, 64 * 128, 0, 4)
    assert key_layout(keys[:1]) == (2, 4, 64 * 128, 0, 0)
    assert key_layout(keys[:, :1]) == (2, 3, 4 * 64 * 128, 0, 1)
    assert key_layout(keys.view(3, 64, 4, 128).transpose(1, 2)) == (6, 4, 128, 2, 0)
    assert key_layout(keys[:, :2]) is None
    assert key_layout(keys[:, :, :48]) is None
    assert key_layout(keys[:, :, :, :8].transpose(2, 3)) is None


@pytest.mark.parametrize(("head_dim", "group", "pages"), [(64, 8, True), (64, 16, True), (128, 16, False)])
def test_it_compiles_with_products_in_flight(head_dim: int, group: int, pages: bool) -> None:
    if reason := compiler.missing_package():
        pytest.skip(reason)
    constants = hopper_plan_on(H200, 132, BF16, head_dim, CONV, group, pages).constants
    assert isinstance(constants, HopperConstants)
    code, words = compiler.compile_source(constants.source("sm_90"))
    assert code.startswith(b"\x7fELF")
    assert "C75" not in words
    assert "ptxas info" not in words or "0 bytes spill stores, 0 bytes spill loads" in words
