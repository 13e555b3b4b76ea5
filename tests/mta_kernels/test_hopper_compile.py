"""Hopper's kernels compiled without a GPU: for every head dim, without spills, with products in flight."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from mta_kernels.conv_attention.hopper.backward import HopperBackwardConstants
from mta_kernels.conv_attention.hopper.forward import MAX_BACKWARD_HEAD_DIM, HopperForwardConstants, shape_unsupported
from mta_kernels.nvrtc import compiler
from mta_kernels.operation import Convolution

FP16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def _with_a_compiler() -> None:
    if reason := compiler.missing_package():
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("constants", "spilled"),
    [
        (HopperForwardConstants(BF16, 64, Convolution(6, 11, 5), causal=True, spans=False), 0),
        (HopperForwardConstants(BF16, 128, Convolution(6, 11, 5), causal=True, spans=False), 0),
        (HopperForwardConstants(FP16, 256, Convolution(8, 17, 16), causal=False, spans=True), 0),
        (HopperBackwardConstants(BF16, 64, Convolution(6, 11, 5), causal=True, spans=False), 0),
        (HopperBackwardConstants(BF16, 128, Convolution(6, 11, 5), causal=True, spans=False), 0),
        (HopperBackwardConstants(FP16, 128, Convolution(8, 17, 0), causal=False, spans=True), 184),
    ],
    ids=[
        "forward, head dim 64",
        "forward, head dim 128",
        "forward, head dim 256",
        "backward, head dim 64",
        "backward, head dim 128",
        "backward, 8x17 taps",
    ],
)
def test_compiles_without_spills_and_with_products_in_flight(
    constants: HopperForwardConstants | HopperBackwardConstants, spilled: int
) -> None:
    """C7510 and its like say that ptxas runs one product at a time; a spill may be local memory in the loop.

    C7519 is a fence of registers that CUDA 13.0's ptxas adds before products, which stay in flight. The last one's
    bytes are what threads keep from one work tile to the next, and the powers of two of packed documents.
    """
    code, words = compiler.compile_source(constants.source())
    assert code.startswith(b"\x7fELF")
    if "ptxas info" not in words:
        pytest.skip(f"NVRTC {compiler.version()} keeps ptxas's words to itself")
    stored, loaded = (int(re.search(rf"(\d+) bytes spill {kind}", words).group(1)) for kind in ("stores", "loads"))
    assert max(stored, loaded) <= spilled
    assert not re.search("C75(?!19)", words)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("constants", [HopperForwardConstants, HopperBackwardConstants], ids=["forward", "backward"])
def test_compiles_for_head_dims_of_every_size(constants: type, dtype: torch.dtype) -> None:
    for head_dim in range(8, 264, 24 if dtype is BF16 else 56):  # what differs by type does at any head dim
        widest = MAX_BACKWARD_HEAD_DIM if constants is HopperBackwardConstants else head_dim
        if head_dim <= widest and shape_unsupported(dtype, head_dim, 1, 1) is None:
            of_head_dim = constants(dtype, head_dim, Convolution(1, 1, 0), causal=False, spans=False)
            # To PTX: what the assembler may refuse, it refuses in other tests.
            compiler.compile_source(dataclasses.replace(of_head_dim.source(), architecture="compute_90a"))


def test_the_compiler_s_words_are_kept() -> None:
    geometry = HopperForwardConstants(BF16, 64, Convolution(9, 11, 5), causal=True, spans=False)
    with pytest.raises(compiler.CompileError, match="eight rows above a score tile hold zeros"):
        compiler.compile_source(geometry.source())
