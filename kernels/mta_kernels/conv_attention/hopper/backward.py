"""Launches backward.cu over chunks of rows, and Triton's products that turn what it leaves into dk and dv."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor

from mta_kernels.conv_attention.hopper.forward import ROWS, SLAB
from mta_kernels.conv_attention.hopper.prepare import (
    ELEMENTS,
    NORM_PARTS,
    Positions,
    Preparation,
    Rows,
    Tiles,
    prepare_launch,
)
from mta_kernels.conv_attention.hopper.source import Product, hopper_source
from mta_kernels.conv_attention.hopper.tensor_maps import describable, tensor_map
from mta_kernels.cuda import driver
from mta_kernels.cuda.compiler import Source, machine_code
from mta_kernels.gpu_limits import sm_count

MAX_HEAD_DIM = 128
TILE, CARRIED = 64, 16  # keys of a tile, and columns of c that it leaves to the next
SCORES_ABOVE, GRADS_ABOVE = 16, 8  # rows above a warpgroup's own
MOST_CHUNK_ROWS = 2304


class Geometry(Tiles):
    """The constants of backward.cu for a shape."""

    @property
    def block_rows(self) -> int:
        """Rows that a block computes whole, of those of its warpgroups."""
        return self.warpgroups * ROWS - 2 * (self.query_taps - 1)

    @property
    def left(self) -> int:
        """Columns by which p's tiles begin before those of scores, LEFT of tiles.cuh."""
        return -(-(self.key_taps - 1 - self.pad) // 8) * 8

    @property
    def lag(self) -> int:
        """Columns by which ds's tiles do, LAG of backward.cu."""
        return self.left + -(-self.pad // 8) * 8

    @property
    def shared_memory(self) -> int:
        """Bytes a block takes, as backward.cu lays them out."""
        tiles = (2 * self.warpgroups + 3 * self.stages) * self.slabs
        above = SCORES_ABOVE + GRADS_ABOVE
        buffers = (self.warpgroups * 10 * (2 * ROWS + above) + 8 * above) * 16
        small = 2 * self.prepared.tap_bytes + (6 * self.stages + 5) * 8 + self.warpgroups * 16
        return tiles * SLAB + buffers + small

    def products(self) -> list[Product]:
        element = ELEMENTS[self.dtype]
        found = [
            Product(64, element),
            Product(32, "Half"),
            Product(32, "Half", "fragments"),
            Product(24, "Half", "transposed"),
        ]
        return [*found, Product(self.head_dim, element, "registers")]

    @property
    def source(self) -> Source:
        return hopper_source("backward.cu", self.products(), self.constants())


class Arguments(ctypes.Structure):
    """`struct Arguments` of backward.cu."""

    _fields_ = (
        ("at", Positions),
        ("taps", ctypes.c_void_p),
        ("taps_back", ctypes.c_void_p),
        ("weight_scale", ctypes.c_void_p),
        ("key_norms", ctypes.c_void_p),
        ("value_norms", ctypes.c_void_p),
        ("grad_norms", ctypes.c_void_p),
        ("logsumexp", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("p", ctypes.c_void_p),
        ("ds", ctypes.c_void_p),
        ("ds_scale", ctypes.c_void_p),
        ("dq", ctypes.c_void_p),
        ("dweight", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("batch_heads", ctypes.c_int),
        ("row_blocks", ctypes.c_int),
        ("all_row_blocks", ctypes.c_int),
        ("first_row_block", ctypes.c_int),
        ("chunk_rows", ctypes.c_int),
        ("pitch", ctypes.c_int),
    )


def part_backward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, out: Tensor, logsumexp: Tensor, grad_out: Tensor, *,
    causal: bool, scale: float, pad: int, spans: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of some heads: dq in q's dtype, dk, dv and the weight's in float32; logsumexp is contiguous.

    The same from run to run. Scratch: p and ds of a chunk of rows, 4 * B * Hq * N bytes a row: see `chunk_rows_for`.
    """
    from mta_kernels.conv_attention.hopper.products import add_product
    from mta_kernels.conv_attention.triton.backward_scores import chunks
    from mta_kernels.conv_attention.triton.launch import call_signature

    q, k, v, out, grad_out = (describable(x) for x in (q, k, v, out, grad_out))
    batch, heads, query_rows, head_dim = q.shape
    kv_heads, key_rows = k.shape[1:3]
    geometry = Geometry(q.dtype, head_dim, weight.shape[1], weight.shape[2], pad, causal, spans is not None)
    prepared, device = geometry.prepared, q.device

    def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    taps, taps_back = numbers(2, heads, prepared.tap_bytes // 2, dtype=torch.float16)
    weight_scale, ds_scale = numbers(heads), numbers(batch * heads)
    key_norms, value_norms = numbers(2, batch * kv_heads, NORM_PARTS)
    grad_norms, delta = numbers(batch * heads, NORM_PARTS), numbers(batch, heads, query_rows)
    made = {"taps": taps, "taps_back": taps_back, "weight_scale": weight_scale, "key_norms": key_norms}
    made |= {"value_norms": value_norms, "grad_norms": grad_norms, "delta": delta}
    preparation = Preparation(
        k=Rows.of(k), v=Rows.of(v), out=Rows.of(out), grad_out=Rows.of(grad_out), **Preparation.of_weight(weight),
        **{name: x.data_ptr() for name, x in made.items()}, scale_log2=scale * math.log2(math.e),
        heads=heads, kv_heads=kv_heads, batch=batch, query_rows=query_rows, key_rows=key_rows,
    )  # fmt: skip
    prepare_launch(prepared, preparation, device.index)()

    all_row_blocks = -(-query_rows // geometry.block_rows)
    a_chunk = chunk_rows_for(batch * heads, sm_count(device), geometry.block_rows)
    chunk_rows = min(a_chunk, all_row_blocks * geometry.block_rows)
    pitch = -(-(key_rows + CARRIED) // TILE) * TILE
    scratch = numbers(2, batch * heads, chunk_rows, pitch, dtype=q.dtype)
    dq = torch.empty(q.shape, dtype=q.dtype, device=device)
    dk, dv = numbers(2, batch * heads, key_rows, head_dim)
    dweight = numbers(batch * heads, all_row_blocks, geometry.warpgroups, weight[0].numel())
    positions = Positions(None if spans is None else spans.data_ptr(), heads, heads // kv_heads, query_rows, key_rows)
    del made["delta"]
    arguments = Arguments(
        at=positions, **{name: x.data_ptr() for name, x in made.items()}, logsumexp=logsumexp.data_ptr(),
        delta=delta.data_ptr(), p=scratch[0].data_ptr(), ds=scratch[1].data_ptr(), ds_scale=ds_scale.data_ptr(),
        dq=dq.data_ptr(), dweight=dweight.data_ptr(), scale=scale, batch_heads=batch * heads,
        all_row_blocks=all_row_blocks, chunk_rows=chunk_rows, pitch=pitch,
    )  # fmt: skip
    maps = [tensor_map(x) for x in (q, k, v, grad_out)]
    queries, grads = (x.reshape(batch * heads, query_rows, head_dim) for x in (q, grad_out))
    ones = torch.ones(batch * heads, dtype=torch.float32, device=device)
    signature = call_signature(queries, grads, dk, options=(causal, "hopper"))
    compiled = kernel(geometry, device.index)
    for chunk in chunks(query_rows, key_rows, a_chunk, causal, spans, signature):
        arguments.first_row_block = chunk.first_row // geometry.block_rows
        arguments.row_blocks = -(-chunk.rows // geometry.block_rows)
        driver.launch(
            compiled, (arguments.row_blocks * batch * heads, 1), geometry.threads, geometry.shared_memory,
            device.index, *maps, arguments,
        )  # fmt: skip
        p, ds = scratch[:, :, : chunk.rows]
        add_product(p, grads, dv, ones, chunk, geometry.left)
        add_product(ds, queries, dk, ds_scale, chunk, geometry.lag)
    grouped = (x.view(batch, kv_heads, heads // kv_heads, key_rows, head_dim) for x in (dk, dv))
    dk, dv = (x.squeeze(2) if heads == kv_heads else x.sum(2) for x in grouped)
    return dq, dk, dv, dweight.view(batch, heads, -1, weight[0].numel()).sum((0, 2)).view(weight.shape)


def chunk_rows_for(batch_heads: int, multiprocessors: int, block_rows: int) -> int:
    """Rows whose p and ds are kept at a time, at most MOST_CHUNK_ROWS: whole blocks, as many as fill the GPU best.

    A multiprocessor has one block at a time, of `block_rows` rows of a head: 16 blocks of 118 rows of each of 16 heads
    are 1.94 rounds of 132 multiprocessors, where 19 would be 2.3.
    """

    def filled(blocks: int) -> float:
        rounds = blocks * batch_heads / multiprocessors
        return rounds / math.ceil(rounds)

    most = MOST_CHUNK_ROWS // block_rows
    return block_rows * max(range(1, most + 1), key=lambda blocks: (round(filled(blocks), 2), blocks))


@functools.cache
def kernel(geometry: Geometry, device: int) -> Any:
    """The kernel on a device, compiled at the first call: seconds, unless the disk has it."""
    return driver.load(machine_code(geometry.source), "hopper_backward", geometry.shared_memory, device)
