"""The CUDA kernels of decode against the forward in float64: on a GPU if there is one, else in the emulator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from decode_inputs import COMBINATIONS, PARTS, Inputs, check_steps, name_of, paged
from emulated_mta_decode import emulated_mta_decode  # noqa: F401
from kernel_inputs import DEVICE, DTYPES, poison_memory, with_gaps

from mta_kernels.multi_token_attention import DecodeState, multi_token_attention_decode
from mta_kernels.multi_token_attention.decode_cuda.plan import shape_unsupported
from mta_kernels.operation import Convolution, Operation

pytest.importorskip("triton")

OWN = [parts for parts in COMBINATIONS if any(parts[name] for name in PARTS[1:])]
ALL = dict.fromkeys(PARTS, True)
MIXING = dict.fromkeys(PARTS, False) | {"pre_mix": True, "post_mix": True}


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Whatever a kernel does not write is NaN."""
    poison_memory(monkeypatch)
    return SimpleNamespace() if DEVICE == "cuda" else request.getfixturevalue("emulated_mta_decode")


def inputs_of(parts: dict[str, bool], heads: int = 8, dtype: torch.dtype = torch.float16, **options) -> Inputs:
    return Inputs(parts, heads=heads, kv_heads=heads, dtype=dtype, **options)


@pytest.mark.parametrize("parts", OWN, ids=name_of)
def test_every_combination_of_parts(parts: dict[str, bool]) -> None:
    """Prompts shorter and longer than the taps look back; programs that share a sequence, and that have several."""
    check_steps(inputs_of(parts, batch=3, tokens=300), [1, 298, 3], steps=2)


@pytest.mark.parametrize("dtype", [x for x in DTYPES if x.itemsize == 2], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 64), (10, 128), (9, 96)])
def test_heads_and_head_dims(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    inputs = inputs_of(ALL, heads, dtype, head_dim=head_dim, tokens=170, taps=(6, 11), after=(6, 11))
    check_steps(inputs, [168])
