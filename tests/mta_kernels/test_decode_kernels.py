"""What steps of conv attention have beside tests/conformance: tiles, programs, numbers beyond fp16, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulators import emulated_decode  # noqa: F401
from kernel_inputs import DEVICE, RANGES, make, poison_memory, relative_error, with_range
from torch import Tensor

pytest.importorskip("triton")

from mta_kernels.conv_attention import conv_attention_decode, conv_attention_decode_reference, explain
from mta_kernels.conv_attention.cuda_decode import hopper_plan
from mta_kernels.conv_attention.triton import decode
from mta_kernels.conv_attention.triton.decode_plan import (
    DecodeConfig,
    bulk_pays,
    choose_splits,
    column_steps,
    decode_config,
    newest_last,
)
from mta_kernels.gpu_limits import capability
from mta_kernels.operation import Operation

BF16, FP16 = torch.bfloat16, torch.float16
ON_GPU = DEVICE == "cuda"
HAS_COPY_ENGINE = capability(torch.device(DEVICE)) >= (9, 0)
RTX_4090 = 101376  # bytes of shared memory a program


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN."""
    poison_memory(monkeypatch)


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Any:
    """`backend="cuda"` runs; where there is no GPU, its multiprocessors, shared memory and kind may be changed."""
    if ON_GPU:
        pytest.skip("a GPU has its own multiprocessors and shared memory")
    return request.getfixturevalue("emulated_decode")


def steps(lengths, heads, kv_heads, head_dim, taps=(6, 11), dtype=FP16, extra: int = 5, **options) -> dict[str, Tensor]:
    """Random arguments, with NaN before the first token and beyond each length."""
    q, k, v, weight = make(len(lengths), heads, kv_heads, max(lengths) + extra, head_dim, taps, dtype, **options)
    q = torch.cat([q] * taps[0], 2)[:, :, : taps[0]]
    for batch, length in enumerate(lengths):
        k[batch, :, length:] = v[batch, :, length:] = q[batch, :, : max(0, taps[0] - length)] = float("nan")
    given = {"q_window": q, "k_cache": k, "v_cache": v, "weight": weight}
    return given | {"lengths": torch.tensor(lengths, device=DEVICE)}


def exact(step: dict[str, Tensor], **options: Any) -> Tensor:
    return conv_attention_decode_reference(
        **{name: x if name == "lengths" else x.double() for name, x in step.items()}, **options
    )


def check(got: Tensor, step: dict[str, Tensor], rounding: int = 8, **options: Any) -> None:
    """As near to float64 as twice eager's own error and a few units of rounding, each sequence too."""
    want, eager = exact(step, **options), conv_attention_decode_reference(**step, **options)
    tolerance = max(2 * relative_error(eager, want), rounding * torch.finfo(got.dtype).eps)
    assert relative_error(got, want) <= tolerance
    assert all(relative_error(x, y) <= 2 * tolerance for x, y in zip(got, want, strict=True))


def launched(step: dict[str, Tensor], config: DecodeConfig, splits: int, bulk: bool = False, **options: Any) -> Tensor:
    """By Triton with these tiles."""
    tensors = (step[name] for name in ("q_window", "k_cache", "v_cache", "weight", "lengths"))
    operation = Operation.of(step["weight"].shape[1:], step["q_window"].shape[3], **options)
    return decode.launch_decode(operation, *tensors, None, splits=splits, config=config, bulk=bulk)


@pytest.mark.parametrize(
    ("hopper", "multiprocessors", "heads", "lengths"),
    [
        (False, 1, 2, [1, 30, 2, 90] * 9), (False, 132, 2, [1, 30, 2, 90] * 9), (False, 3, 2, [700]),
        (True, 1, 8, [900, 33]), (True, 8, 8, [40, 0, 300, 1, 5, 17, 6, 70]), (True, 9, 24, [300, 900, 20, 0, 130]),
    ],
)  # fmt: skip
def test_any_number_of_programs(gpu, monkeypatch, hopper, multiprocessors, heads, lengths) -> None:
    """More sequences than a warp has threads, heads with many programs; counts that are zeros after the first call."""
    monkeypatch.setattr(hopper_plan, "FEWEST_KEYS", 0)
    gpu.hopper, gpu.multiprocessors = hopper, multiprocessors
    kv_heads = 1 if hopper else 2
    step = steps(lengths, heads, kv_heads, 64, dtype=FP16 if hopper else BF16, extra=-max(lengths) % 32)
    for _ in range(2 if heads == 24 else 1):
        check(conv_attention_decode(**step, backend="cuda"), step, rounding=4)


def test_heads_of_one_length_are_shared_evenly(gpu) -> None:
    """By as many programs each as the plan says; longer and shorter ones by runs of equal length."""
    gpu.multiprocessors = 8
    step = steps([300, 300], 2, 2, 64, dtype=BF16)
    for lengths, same in (([300, 300], True), ([300, 200], False)):
        step["lengths"] = torch.tensor(lengths)
        found = [conv_attention_decode(**step, backend="cuda", splits=splits) for splits in ("auto", 2)]
        assert torch.equal(*found) == same


def test_heads_that_do_not_fit_into_one_program(gpu) -> None:
    gpu.shared_memory = RTX_4090
    step = steps([100, 20], 18, 1, 64, dtype=BF16)
    check(conv_attention_decode(**step, backend="cuda"), step, rounding=4)


@pytest.mark.parametrize(
    ("backend", "heads"), [("triton", 1), ("triton", 3), ("cuda", 1), ("cuda", 8), ("cuda-hopper", 8)]
)
@pytest.mark.parametrize("kind", RANGES)
def test_range_of_fp16(request: pytest.FixtureRequest, kind: str, backend: str, heads: int) -> None:
    """The last keys of a sequence, of which some queries see fewer, and others; eight heads fold no taps."""
    if backend != "triton" and not ON_GPU:
        request.getfixturevalue("emulated_decode").hopper = backend == "cuda-hopper"
    step = steps([5, 130], heads, 1, 64, dtype=torch.float32, extra=30)
    q, k, weight, scale = with_range(kind, step["q_window"], step["k_cache"], step["weight"])
    step |= {"q_window": q, "k_cache": k, "v_cache": step["v_cache"].half(), "weight": weight}
    got = conv_attention_decode(**step, scale=scale, backend=backend.partition("-")[0])
    assert relative_error(got, exact(step, scale=scale)) < 2e-3


@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (80, 4)])
def test_all_tiles(head_dim: int, group: int) -> None:
    """By pointers and by the copy engine: lengths about the ends of tiles and shares, capacities of any remainder."""
    step = steps([0, 3, 64, 139, 140, 203], group, 1, head_dim)
    shape = {"key_taps": 11, "block_d": 128 if head_dim > 64 else 64, "element_size": 2, "shared_memory": 232448}
    configs = [decode_config(group=group, small=small, **shape) for small in (False, True)]
    configs += [DecodeConfig(64, 1, 1, 2, 3)] if group == 1 else []  # of many taps
    for number, config in enumerate(dict.fromkeys(configs)):
        splits = (1, 2, 5)[number % 3]
        caches = {name: step[name][:, :, : 203 + number % 6].contiguous() for name in ("k_cache", "v_cache")}
        got = launched(step | caches, config, splits, HAS_COPY_ENGINE)
        assert (got[0] == 0).all()
        check(got[1:], {name: x if name == "weight" else x[1:] for name, x in step.items()})
        assert relative_error(got, launched(step | caches, config, splits)) < 1e-3, config


def test_newest_keys_come_first_or_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where programs stand does not change what they compute."""
    step, found = steps([7, 200], 6, 2, 64), []
    for last in (False, True):
        monkeypatch.setattr(decode, "newest_last", lambda *_, last=last: last)
        found.append(launched(step, DecodeConfig(64, 2, 2, 2, 3), 3, HAS_COPY_ENGINE))
    check(found[0], step)
    assert torch.equal(*found)
    assert [newest_last(*x, 132) for x in ((16, 14, 1), (16, 16, 1), (16, 4, 1), (8, 24, 4))] == [
        False,  # about five programs on three SMs, the newest keys' in between
        True, True, True,
    ]  # fmt: skip


def test_what_the_copy_engine_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(2, 6, 1, 64, dtype=FP16, device=DEVICE)
    cache = torch.zeros(2, 3, 50, 64, dtype=FP16, device=DEVICE)
    wide = torch.zeros(2, 3, 50, 72, dtype=FP16, device=DEVICE)
    for other in (cache, cache.transpose(1, 2).contiguous().transpose(1, 2), wide[..., :64], wide[..., 8:]):
        assert decode.reads_in_bulk(q, cache, other, None) == HAS_COPY_ENGINE
    for other in (
        cache.mT.contiguous().mT,
        torch.zeros(2, 3, 50, 68, dtype=FP16, device=DEVICE)[..., :64],  # rows of 136 bytes
        wide[..., 4:68],  # from byte 8 on
        cache[:1].expand(2, -1, -1, -1),
    ):
        assert not decode.reads_in_bulk(q, cache, other, None)
        assert not decode.reads_in_bulk(q, other, cache, None)
    assert not decode.reads_in_bulk(q, cache.float(), cache.float(), None)
    assert not decode.reads_in_bulk(q, cache, cache, torch.zeros(2, 1, dtype=torch.int32, device=DEVICE))
    found = [(72, 1, 2, (9, 0)), (40, 2, 2, (10, 0)), (64, 1, 2, (9, 0)), (44, 2, 2, (9, 0)), (128, 8, 2, (8, 9))]
    assert [bulk_pays(*x) for x in found] == [True, True, False, False, False]
    monkeypatch.setattr(decode, "compiled_capability", lambda device: (8, 9))
    assert not decode.reads_in_bulk(q, cache, cache, None)


def test_caches_whose_numbers_of_a_key_lie_apart_are_for_others() -> None:
    step = steps([4, 90], 4, 2, 48)
    apart = step["k_cache"].mT.contiguous().mT
    for name in ("k_cache", "v_cache"):
        with pytest.raises(ValueError, match=r"numbers of a key side by side \(stride 1\); backend='auto'"):
            conv_attention_decode(**step | {name: apart}, backend="triton")
    got = conv_attention_decode(**step | {"k_cache": apart})
    assert relative_error(got, conv_attention_decode_reference(**step)) < 0.002
    q, _, v, weight, _ = step.values()
    assert explain(q, apart, v, weight, decode=True).backend == ("cuda" if ON_GPU else "reference")


@pytest.mark.parametrize("shared_memory", [166912, RTX_4090], ids=["sm_80", "sm_86"])
def test_tiles_of_older_gpus(shared_memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "shared_memory_limit", lambda device: shared_memory)
    step = steps([4, 150], 8, 1, 128)
    check(conv_attention_decode(**step, splits=2, backend="triton"), step)


@pytest.mark.parametrize("shared_memory", [232448, 166912, RTX_4090])
def test_tiles_fit_every_gpu(shared_memory: int) -> None:
    for key_taps in (1, 2, 11, 16, 17, 31):
        for group in (1, 2, 3, 4, 8, 32):
            for block_d, size in ((16, 2), (64, 2), (128, 2), (256, 2), (64, 4), (256, 4)):
                shape = {"key_taps": key_taps, "block_d": block_d, "element_size": size}
                options = {"group": group, "shared_memory": shared_memory}
                for small in (False, True):
                    config = decode_config(small=small, **options, **shape)
                    assert config.shared_memory(**shape) <= shared_memory
                    # A window's columns lie within two tiles.
                    assert config.block_n // config.pack >= column_steps(key_taps, config.pack)


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((16, 65536, 1, 132, 1, 3), 14),  # the fewest that read as fast as memory can: 5 on 3 SMs
        ((16, 256, 1, 132, 1, 3), 4),  # never less than 64 keys each
        ((128, 16384, 1, 132, 1, 3), 3),  # five on three cannot be: 384 programs, three an SM
        ((128, 16384, 1, 132, 1, 4), 4),
        ((8, 65536, 4, 132, 2, 4), 33),  # 16 programs a split, 528: four an SM
        ((8, 4096, 4, 132, 2, 4), 24),  # of few keys, three
        ((1, 1 << 20, 1, 132, 1, 4), 128),
        ((16, 8192, 1, 84, 1, 1), 5),  # an SM that holds one program has no five on three
        ((384, 20000, 1, 132, 1, 3), 1),
        ((4096, 4096, 1, 132, 1, 4), 1),
    ],
)
def test_splits_fill_the_gpu(shape: tuple[int, ...], splits: int) -> None:
    assert choose_splits(*shape) == splits
