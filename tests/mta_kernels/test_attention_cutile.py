"""The ladder's cuTile rung: on a GPU itself; without one its kernel in a language of tiles made of torch, and compiled.

cuTile has no interpreter. `TorchTiles` gives the kernel what it uses of the language, as `cuda.tile` documents it, so
that tiles, masks and indices are checked without a GPU. That NVIDIA's compiler takes the kernel is checked apart.
"""

from __future__ import annotations

import io
import itertools
import types

import pytest
import torch
from kernel_inputs import DEVICE, relative_error
from torch import Tensor

from mta_ladder import attention_reference, cutile_fmha

CUDA = torch.device("cuda")
HOPPER, AMPERE = (9, 0), (8, 0)


class TorchTiles:
    """A block of a grid, and what `fmha_kernel` uses of `cuda.tile`."""

    int32, float32 = torch.int32, torch.float32
    PaddingMode = types.SimpleNamespace(ZERO=0.0)
    Constant = list  # only ever subscripted
    kernel = staticmethod(lambda function: function)
    astype = staticmethod(lambda x, dtype: x.to(dtype))
    cdiv = staticmethod(lambda x, y: -(-x // y))
    exp2 = staticmethod(lambda x, flush_to_zero: torch.exp2(x))
    maximum = staticmethod(torch.maximum)
    max = staticmethod(lambda x, axis, keepdims: x.amax(axis, keepdims))
    mma = staticmethod(lambda x, y, acc: acc + x.float() @ y.float())
    reshape = staticmethod(torch.reshape)
    sum = staticmethod(lambda x, axis, keepdims: x.sum(axis, keepdims))
    where = staticmethod(torch.where)
    arange = staticmethod(torch.arange)
    full = staticmethod(torch.full)
    zeros = staticmethod(torch.zeros)

    def __init__(self, grid: tuple[int, int, int], block: tuple[int, int, int]) -> None:
        self.grid, self.block = grid, block

    def bid(self, axis: int) -> int:
        return self.block[axis]

    def num_blocks(self, axis: int) -> int:
        return self.grid[axis]

    def load(self, array: Tensor, index, shape, order=(0, 1, 2, 3), padding_mode=float("nan")) -> Tensor:
        """The tile at `index`, counted in tiles, of the array with its axes in `order`."""
        array = array.permute(order)
        tile = torch.full(shape, padding_mode, dtype=array.dtype)
        part = self._inside(array, index, shape)
        tile[tuple(slice(size) for size in part.shape)] = part
        return tile

    def store(self, array: Tensor, index, tile: Tensor) -> None:
        part = self._inside(array, index, tile.shape)
        part.copy_(tile[tuple(slice(size) for size in part.shape)])

    def _inside(self, array: Tensor, index, shape) -> Tensor:
        starts = [i * size for i, size in zip(index, shape, strict=True)]
        assert all(start < rows for start, rows in zip(starts, array.shape, strict=True)), "undefined in cuTile"
        return array[tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))]


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, capability=HOPPER) -> Tensor:
    """The rung where it can run, else its kernel block by block."""
    if DEVICE == "cuda":
        reason = cutile_fmha.unsupported(device=CUDA, dtype=q.dtype, head_dim=q.shape[3])
        if reason is not None:
            pytest.skip(reason)
        return cutile_fmha.attention(q, k, v, causal=causal, scale=scale)
    out = torch.full((*q.shape[:3], v.shape[3]), float("nan"), dtype=q.dtype)
    grid, arguments = cutile_fmha.launch_arguments(q, k, v, out, causal, scale, capability)
    for block in itertools.product(*map(range, grid)):
        cutile_fmha.fmha_kernel(TorchTiles(grid, block))(*arguments)
    return out


def make(queries=70, keys=70, head_dim=64, value_dim=None, heads=(2, 1), batch=1, dtype=torch.float16, magnitude=1.0):
    """Random q, k and v on the test device."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads[0], queries, head_dim), (heads[1], keys, head_dim), (heads[1], keys, value_dim or head_dim))
    q, k, v = (torch.randn(batch, *shape, generator=generator) for shape in shapes)
    return tuple(x.to(DEVICE, dtype) for x in (q * magnitude, k, v))


def check(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float = 0.125, **options) -> None:
    """The output is within the error bar, and no further from float64 than twice eager."""
    out = attention(q, k, v, causal=causal, scale=scale, **options)
    exact = attention_reference(q.double(), k.double(), v.double(), causal=causal, scale=scale)
    eager_error = relative_error(attention_reference(q, k, v, causal=causal, scale=scale), exact)
    assert out.shape == exact.shape
    assert out.dtype == q.dtype
    most = 0.01 if q.dtype == torch.bfloat16 else 0.002
    assert relative_error(out, exact) <= min(most, max(2 * eager_error, 4 * torch.finfo(q.dtype).eps))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        {"queries": 1, "keys": 1}, {"queries": 33, "keys": 159}, {"queries": 128, "keys": 128, "head_dim": 40},
        {"queries": 129, "keys": 129, "dtype": torch.bfloat16}, {"queries": 100, "keys": 300, "head_dim": 96},
        {"head_dim": 96, "value_dim": 64}, {"head_dim": 256, "dtype": torch.bfloat16},
        {"queries": 40, "head_dim": 32, "heads": (6, 2), "batch": 2},
    ],
    ids=str,
)  # fmt: skip
def test_shapes(shape: dict, causal: bool) -> None:
    check(*make(**shape), causal=causal)


@pytest.mark.parametrize("scale", [1.0, 0.0, -0.2])
def test_scales(scale: float) -> None:
    check(*make(magnitude=10.0), scale=scale)


@pytest.mark.parametrize("causal", [True, False])
def test_a_padded_key_does_not_win_the_maximum(causal: bool) -> None:
    q, k, v = make(70, 70)
    check(torch.full_like(q, 12.5), k - 100, v, causal=causal)


def test_any_strides() -> None:
    q, k, v = make(37, 37, 48, heads=(2, 2), batch=2)
    want = attention(q, k, v, causal=True, scale=0.2)
    for a, b in ((1, 2), (2, 3)):
        turned = (x.transpose(a, b).contiguous().transpose(a, b) for x in (q, k, v))
        assert torch.equal(attention(*turned, causal=True, scale=0.2), want)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU has its own tiles")
def test_the_tiles_of_other_gpus() -> None:
    for head_dim in (64, 256):
        check(*make(130, 130, head_dim), capability=AMPERE)


@pytest.mark.parametrize(
    ("target", "dtype", "causal", "head_dim"),
    [("sm_90", "bfloat16", True, 128), ("sm_90", "float16", False, 64), ("sm_100", "bfloat16", True, 64)],
)
def test_compiles_for_gpus_that_are_not_there(target: str, dtype: str, causal: bool, head_dim: int) -> None:
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed (pip install 'mtabench[cutile]')")
    if target not in cutile_fmha.compiler_targets():
        pytest.skip(f"no tileiras here that compiles for {target} (pip install 'mtabench[cutile]')")
    import cuda.tile as ct
    from cuda.tile.compilation import (
        ArrayConstraint,
        CallingConvention,
        KernelSignature,
        ScalarConstraint,
        export_kernel,
    )

    array = ArrayConstraint(
        getattr(ct, dtype), 4, index_dtype=ct.int32, stride_lower_bound_incl=0, alias_groups=(),
        may_alias_internally=False, stride_constant=(None, None, None, 1), stride_divisible_by=(8, 8, 8, 1),
        base_addr_divisible_by=16,
    )  # fmt: skip
    capability = divmod(int(target.removeprefix("sm_")), 10)
    q = torch.empty(2, 4, 8192, head_dim, device="meta")
    _, arguments = cutile_fmha.launch_arguments(q, q[:, :2], q[:, :2], q, causal, 0.1, capability)
    parameters = [array] * 4 + [ScalarConstraint(ct.float32), *arguments[5:]]
    signature = KernelSignature(parameters, CallingConvention.cutile_python_v2())
    cubin = io.BytesIO()
    export_kernel(cutile_fmha.fmha_kernel(ct), [signature], cubin, gpu_code=target, output_format="cubin")
    assert cubin.getvalue().startswith(b"\x7fELF")


def test_unsupported_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(device=CUDA, dtype=torch.float16, head_dim=64) -> str | None:
        return cutile_fmha.unsupported(device=device, dtype=dtype, head_dim=head_dim)

    monkeypatch.setattr(cutile_fmha, "has_cuda_tile", lambda: True)
    monkeypatch.setattr(cutile_fmha, "compiler_targets", lambda: ("sm_80", "sm_90"))
    monkeypatch.setattr(cutile_fmha, "driver_version", lambda: 13000)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert reason() is None
    assert "float16 and bfloat16, not float32" in reason(dtype=torch.float32)
    assert "16 to 256" in reason(head_dim=300)
    assert "no interpreter" in reason(device=torch.device("cpu"))
    monkeypatch.setattr(cutile_fmha, "driver_version", lambda: 12080)
    assert "driver of CUDA 13" in reason()
    monkeypatch.setattr(cutile_fmha, "compiler_targets", lambda: ("sm_80", "sm_100"))
    assert "sm_80, sm_100 but not for sm_90" in reason()
    monkeypatch.setattr(cutile_fmha, "compiler_targets", lambda: ())
    assert "tileiras, is not installed" in reason()
    monkeypatch.setattr(cutile_fmha, "has_cuda_tile", lambda: False)
    assert "cuda-tile is not installed (pip install 'mtabench[cutile]')" in reason()


def test_the_compiler_is_found_where_the_package_is() -> None:
    if not cutile_fmha.has_cuda_tile():
        pytest.skip("cuda-tile is not installed (pip install 'mtabench[cutile]')")
    assert {"sm_80", "sm_100"} <= set(cutile_fmha.compiler_targets())
