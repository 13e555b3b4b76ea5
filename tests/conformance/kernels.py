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
EAGER = "eager"  # the reference, or whatever `operation` has in its place
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def kind(dtype: str, head_dim: int, taps: tuple[int, int], pad_key: str = "both", causal: bool = True) -> Kind:
    """What kernels are compiled for."""
    sizes = {"head_dim": head_dim, "query_taps": taps[0], "key_taps": taps[1]}
    return {"dtype": dtype, "pad_key": pad_key, "causal": causal, **sizes}


@dataclass(frozen=True)
class Kernels:
    """Kernels of conv attention by their `backend`, for cases of three kinds.

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

    def __str__(self) -> str:
        return self.name + " decode" * self.decode

    @property
    def marks(self) -> tuple[pytest.MarkDecorator, ...]:
        """Of their tests."""
        return () if self.needs else (pytest.mark.skip("needs another GPU"),)

    def run(self, request: pytest.FixtureRequest) -> Any:
        """Start their emulator, if they have one on this machine; its `seed` orders threads and copies."""
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


FLASH = {"usual": kind("fp16", 40, (1, 1)), "other": kind("bf16", 64, (1, 1), causal=False)}

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
)  # fmt: skip
DECODES = (
    Kernels("eager", EAGER, **REFERENCE, decode=True),
    Kernels("triton", "triton", **TRITON, decode=True),
    Kernels(
        "cuda", "cuda", **DECODE, wide=kind("fp16", 80, (16, 31), "right"),
        played="emulated_decode", decode=True,
    ),
    Kernels(
        "cuda-hopper", "cuda", usual=kind("fp16", 64, (6, 11)),
        other=kind("bf16", 72, (8, 16), "left"), wide=kind("bf16", 128, (6, 11), "right"),
        played="emulated_hopper_decode", decode=True, needs=DEVICE == "cpu" or HOPPER,
    ),
    Kernels(
        "cuda-conv", EAGER, usual=kind("bf16", 64, (6, 11)), other=kind("fp32", 8, (5, 4), "left"),
        wide=kind("fp16", 128, (2, 9), "right"), played="emulated_cuda", forms=("contiguous",), decode=True,
        operation=Operation(decode=overlapping_decode),
    ),
)  # fmt: skip
