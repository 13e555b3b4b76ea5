"""Kernels under test, each by a public function, and the emulator that stands in for their GPU on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fuzz.calls import PUBLIC, Operation
from kernel_inputs import DEVICE
from torch import Tensor

from mta_ladder import attention, cuda_conv

Kind = dict[str, Any]
Taps = tuple[int, int]
EAGER = "eager"  # the reference, or whatever `operation` has in its place
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def kind(dtype: str, head_dim: int, taps: tuple[int, int], pad_key: str = "both", causal: bool = True) -> Kind:
    """What kernels are compiled for."""
    sizes = {"head_dim": head_dim, "query_taps": taps[0], "key_taps": taps[1]}
    return {"dtype": dtype, "pad_key": pad_key, "causal": causal, **sizes}


@dataclass(frozen=True)
class Kernels:
    """Kernels of an operation by their `backend`, for cases of three kinds.

    `played` names the fixture that emulates their GPU on a CPU. `forms` are the forms of a case that they run.
    """

    name: str
    backend: str
    usual: Kind
    other: Kind
    wide: Kind
    played: str = ""
    forms: tuple[str, ...] = ("whole", "chunk", "packed", "contiguous", "paged")
    gradients: bool = True
    decode: bool = False
    operation: Operation = PUBLIC
    needs: bool = True  # of the GPU, if there is one
    op: str = "conv-attention"
    switches: tuple[str, ...] | None = None  # of multi-token attention: the entries of `stages` that are on
    groups: int = 1  # of keys, a whole number of which the copy engine reads
    corners: tuple[str, ...] = ()  # some of the table; all if none is named

    def __str__(self) -> str:
        return self.name + " decode" * self.decode

    @property
    def marks(self) -> tuple[pytest.MarkDecorator, ...]:
        """Of their tests."""
        return () if self.needs else (pytest.mark.skip("needs another GPU"),)

    def run(self, request: pytest.FixtureRequest) -> Any:
        """Start their emulator, if they have one on this machine; its `seed` orders threads and copies."""
        if self.switches is not None:
            return request.getfixturevalue("cuda_stages")(self.switches, self.played)
        return request.getfixturevalue(self.played) if self.played and DEVICE == "cpu" else None


def rung(name: str) -> Callable[..., Tensor]:
    """Plain attention by a rung, as conv attention by one tap of 1."""

    def run(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, *, causal: bool, scale: float | None, **_: Any) -> Tensor:
        return attention(q, k, v, causal=causal, scale=scale, rung=name)

    return run


def overlapping(*tensors: Tensor, causal: bool, scale: float | None, pad_key: str, **_: Any) -> Tensor:
    """The published approach, by the public functions' names of options."""
    return cuda_conv.conv_attention(*tensors, causal=causal, scale=scale, pad_key=pad_key)


def overlapping_decode(*tensors: Tensor, backend: str, **options: Any) -> Tensor:
    """Its step of decode."""
    return cuda_conv.conv_attention_decode(*tensors, **options)


REFERENCE = {
    "usual": kind("fp32", 16, (3, 5)),  # float16 does not hold its scores
    "other": kind("bf16", 17, (4, 2), "left", causal=False),
    "wide": kind("bf16", 136, (2, 9), "right"),
}
TRITON = {
    "usual": kind("fp16", 16, (3, 5)),
    "other": kind("fp32", 17, (4, 2), "left", causal=False),
    "wide": kind("fp16", 136, (2, 9), "right"),
}
BANDED = {"usual": kind("bf16", 64, (6, 11)), "other": kind("fp16", 40, (3, 4), "left", causal=False)}
DECODE = {"usual": kind("fp16", 64, (6, 11)), "other": kind("bf16", 40, (4, 2), "left")}
PLAIN = {"usual": kind("fp32", 40, (1, 1)), "other": kind("fp32", 17, (1, 1), causal=False)}


def ladder(name: str, **options: Any) -> Kernels:
    """A rung of plain attention, which has no gradient."""
    kinds = PLAIN | {"wide": kind("fp16", 128, (1, 1))} | options
    kinds = {name: x | {"weight": "identity"} if isinstance(x, dict) else x for name, x in kinds.items()}
    given = {"forms": ("whole", "chunk"), "gradients": False, "operation": Operation(attention=rung(name))}
    return Kernels(name, EAGER, **kinds, **given)


def mixed(
    dtype: str, head_dim: int, taps: Taps | None, after: Taps | None, mixings: tuple[int, int] = (-1, -1),
    in_float32: tuple[str, ...] = (), **others: Any,
) -> Kind:  # fmt: skip
    """What kernels of multi-token attention are compiled for; `mixings` as in `fuzz.cases.Kind`."""
    found = kind(dtype, head_dim, taps or (1, 1)) | {"pre_conv": taps is not None, "post_conv": after}
    return found | {"pre_mix": mixings[0], "post_mix": mixings[1], "in_float32": in_float32} | others


FLASH = {"usual": kind("fp16", 40, (1, 1)), "other": kind("bf16", 64, (1, 1), causal=False)}

MTA_REFERENCE = {
    "usual": mixed("fp32", 16, (3, 5), (2, 4), gate="one"),
    "other": mixed("bf16", 17, (2, 9), (4, 3), (2, 2), pad_key="left", causal=False, norm_eps=0.1, depth=3),
    "wide": mixed("bf16", 136, None, None),
}
MTA = {
    "usual": mixed("fp16", 16, (3, 5), (2, 4), in_float32=("pre_conv", "post_mix", "gate_weight"), gate="one"),
    "other": mixed("fp32", 20, (2, 9), (4, 3), (2, 2), pad_key="left", causal=False, norm_eps=0.1, depth=3),
    "wide": mixed("fp16", 136, None, None, in_float32=("pre_mix",)),
}
MTA_CUDA = {
    "usual": mixed("fp16", 16, (6, 11), (3, 8), in_float32=("post_conv", "pre_mix"), heads=3, kv_heads=1),
    "other": MTA["other"] | {"dtype": "fp16", "mixings": "random"},
    "wide": mixed("fp16", 40, (2, 3), (2, 3), heads=16, kv_heads=4),
}  # fmt: skip
MTA_ROWS = {"usual": mixed("fp16", 16, None, None), "other": mixed("fp16", 24, None, None, (2, 2), causal=False)}
MTA_MIX = {
    "usual": mixed("bf16", 80, None, None, in_float32=("pre_mix", "post_mix"), heads=4, kv_heads=2),
    "other": mixed("bf16", 48, None, None, (2, 2), causal=False),
    "wide": mixed("bf16", 64, None, None, heads=10, kv_heads=2),
}  # fmt: skip
SIX_HEADS = {"heads": 6, "kv_heads": 2}
EIGHT_HEADS = {"heads": 8, "kv_heads": 8}
MTA_DECODE = {
    "usual": mixed("fp16", 16, (3, 5), (2, 4), in_float32=("pre_conv", "post_mix"), gate="one") | EIGHT_HEADS,
    "other": mixed("fp16", 48, (16, 9), (12, 3), (2, 2), pad_key="left", norm_eps=0.1, depth=3) | EIGHT_HEADS,
    "wide": mixed("fp16", 128, None, None, gate="full", norm_eps=1e-5, heads=10, kv_heads=10),
}
CONVOLVED = (
    "chunks of rows", "every key seen", "documents", "the last rows of a prompt",
    "rows of fewer blocks of keys than a chunk has",
)  # fmt: skip
BANDS = (*CONVOLVED, "convolved after alone")
HEADS = (
    *CONVOLVED, "many heads", "one token", "documents in which every key is seen", "parts of a batch",
    "mixed and convolved after", "scores that grow",
)  # fmt: skip
MIXED_ALONE = (
    "one token", "many heads", "heads mixed alone", "every key seen", "documents",
    "documents in which every key is seen", "scores of 60000", "parts of a batch",
)  # fmt: skip


KERNELS = (
    Kernels("eager", EAGER, **REFERENCE),
    Kernels("triton", "triton", **TRITON),
    Kernels(
        "cuda", "cuda", **BANDED, wide=kind("bf16", 200, (8, 17), "right"),
        played="emulated_forward",
    ),
    Kernels(
        "hopper", "hopper", **BANDED, wide=kind("bf16", 128, (8, 17), "right"),
        played="emulator", needs=DEVICE == "cpu" or HOPPER,
    ),
    Kernels(
        "cuda-conv", EAGER, usual=kind("bf16", 64, (6, 11)),
        other=kind("fp32", 8, (5, 4), "left", causal=False), wide=kind("fp16", 128, (2, 9), "right"),
        played="emulated_cuda", forms=("whole",), operation=Operation(attention=overlapping),
    ),
    ladder("c-loops", wide=kind("fp32", 256, (1, 1)), needs=DEVICE == "cpu"),
    ladder("c-tiled", wide=kind("fp32", 256, (1, 1)), needs=DEVICE == "cpu"),
    ladder("cuda-naive", played="emulated_attention"),
    ladder("cuda-tiled", played="emulated_attention"),
    ladder("cuda-flash", **FLASH, played="emulated_attention"),
    ladder("triton-pointer"),
    ladder("triton-descriptor"),
    ladder("triton-fmha"),
    Kernels("mta-eager", EAGER, **MTA_REFERENCE, op="mta"),
    Kernels("mta", "triton", **MTA, op="mta", switches=()),
    Kernels("mta-bands", "triton", **MTA_CUDA, op="mta", switches=("BANDS",), played="bands", corners=BANDS),
    Kernels(
        "mta-heads", "triton", **MTA_CUDA, op="mta", switches=("HEADS", "BANDS", "BACKWARD_HEADS"), played="heads",
        corners=HEADS,
    ),
    Kernels(
        "mta-rows", "triton", **MTA_ROWS, wide=MTA["wide"], op="mta", switches=("ROWS",), played="rows",
        corners=MIXED_ALONE,
    ),
    Kernels(
        "mta-rows-sm80", "triton", **MTA_ROWS, wide=MTA["wide"], op="mta", switches=("ROWS",), played="rows of sm_80",
        corners=("heads mixed alone", "documents"), needs=DEVICE == "cpu",
    ),
    Kernels(
        "mta-mix", "triton", **MTA_MIX, op="mta", switches=("MIX", "ROWS"), played="mix",
        corners=(*MIXED_ALONE, "the last rows of a prompt", "scores that grow"),
        forms=("whole", "chunk"), gradients=DEVICE == "cuda", needs=DEVICE == "cpu" or HOPPER,
    ),
)  # fmt: skip
DECODES = (
    Kernels("eager", EAGER, **REFERENCE, decode=True),
    Kernels("triton", "triton", **TRITON, decode=True),
    Kernels(
        "cuda", "cuda", **DECODE, wide=kind("fp16", 80, (16, 31), "right"),
        played="emulated_decode", decode=True,
    ),
    Kernels(
        "cuda-hopper", "cuda", usual=kind("fp16", 64, (6, 11)) | SIX_HEADS,
        other=kind("bf16", 72, (8, 16), "left") | SIX_HEADS, wide=kind("bf16", 128, (6, 11), "right") | SIX_HEADS,
        played="emulated_hopper_decode", decode=True, groups=32, needs=DEVICE == "cpu" or HOPPER,
    ),
    Kernels(
        "cuda-conv", EAGER, usual=kind("bf16", 64, (6, 11)), other=kind("fp32", 8, (5, 4), "left"),
        wide=kind("fp16", 128, (2, 9), "right"), played="emulated_cuda", forms=("contiguous",), decode=True,
        operation=Operation(decode=overlapping_decode),
    ),
    Kernels("mta-eager", EAGER, **MTA_REFERENCE, decode=True, op="mta"),
    Kernels("mta", "triton", **MTA, decode=True, op="mta"),
    Kernels("mta-cuda", "triton", **MTA_DECODE, played="emulated_mta_decode", decode=True, op="mta"),
)  # fmt: skip
