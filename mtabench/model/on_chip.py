"""What lies on the chip while a fused forward runs: bytes of one tile, by the sizes in the kernels' own modules."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from mtabench.model.devices import Device
from mtabench.model.fused import power_of_two
from mtabench.model.tiles import depth_of, forward_config, shared_memory, value_columns
from mtabench.problem.case import BYTES_PER_ELEMENT, Case
from mtabench.problem.inputs import DTYPES

FLOAT = 4
STATISTICS = 2  # numbers a row: the running maximum and the running sum
Tile = dict[str, int]


def tile_of(case: Case, device: Device) -> Tile | None:
    """Bytes of what a block of threads holds of its queries and one block of keys, by name.

    Copies that are on their way to the chip are not counted. None for what works without tiles, for sources that are
    not ours, for dtypes that a kernel does not take, and for other passes than the forward.
    """
    if case.pass_ != "fwd" or case.impl not in TILES:
        return None
    return TILES[case.impl](case, device)


def _triton(case: Case, device: Device) -> Tile:
    """Queries and keys are `min(cq, ck)` times as long; where they are streamed, a slice of both is there at a time."""
    config, _ = forward_config(case, device)
    slices = -(-depth_of(case) // config.block_depth) if config.q_in_registers else 1
    return _blocks(case, config.block_m, config.block_n, slices * config.block_depth, value_columns(case))


def _hopper(case: Case, device: Device) -> Tile | None:
    from mta_kernels.conv_attention.arguments import key_padding
    from mta_kernels.conv_attention.hopper import forward

    dtype, taps = DTYPES[case.dtype], (case.conv_q or 1, case.conv_k or 1)
    if device.capability != (9, 0) or forward.shape_unsupported(dtype, case.head_dim, *taps):
        return None
    geometry = forward.Geometry(dtype, case.head_dim, *taps, key_padding(taps[1], "both"), case.causal, False)
    rows, slab = geometry.warpgroups * forward.ROWS, forward.SLAB
    return {
        "queries": geometry.warpgroups * geometry.slabs * slab,
        "keys": geometry.slabs * slab,
        "values": -(-geometry.value_dim // forward.ROWS) * slab,
        "scores": rows * forward.ROWS * FLOAT,
        "statistics": STATISTICS * rows * FLOAT,
        "accumulator": rows * geometry.value_dim * FLOAT,
    }


def _cuda_conv(case: Case, device: Device) -> Tile | None:
    """In 16 bits, where a tile has all columns. The values take the place of the keys, probabilities of the scores."""
    from mta_kernels.conv_attention.cuda_conv import shape

    element = BYTES_PER_ELEMENT[case.dtype]
    taps = (case.conv_q or 1, case.conv_k or 1)
    if element != 2 or shape.shape_unsupported(DTYPES[case.dtype], case.head_dim, *taps):
        return None
    return {
        "queries": shape.TILE * case.head_dim * element,
        "keys": shape.TILE * case.head_dim * element,
        "values": 0,
        "scores": shape.SCORE_BYTES,
        "statistics": STATISTICS * shape.TILE * FLOAT,
        "accumulator": shape.TILE * case.head_dim * FLOAT,
    }


def _c_tiled(case: Case, device: Device) -> Tile:
    """In a core's caches."""
    from mta_kernels.attention.c_tiled import SOURCE

    sizes = _constants(SOURCE)
    queries, keys, row = sizes["QUERIES"], sizes["KEYS"], case.head_dim * FLOAT
    return {
        "queries": queries * row,
        "keys": keys * row,
        "values": keys * row,
        "scores": queries * keys * FLOAT,
        "statistics": STATISTICS * queries * FLOAT,
        "accumulator": queries * row,
    }


def _cuda_tiled(case: Case, device: Device) -> Tile:
    """Of its first product: slabs of q and k, and a tile of scores, which goes to memory."""
    from mta_kernels.attention.cuda_launch import FOLDER

    sizes = _constants(FOLDER / "cuda_tiled.cu")
    slab = sizes["TILE"] * sizes["DEPTH"] * FLOAT
    return {"queries": slab, "keys": slab, "scores": sizes["TILE"] ** 2 * FLOAT}


def _cuda_flash(case: Case, device: Device) -> Tile | None:
    from mta_kernels.attention.cuda_flash import Geometry, tile_bytes

    if case.dtype == "fp32":
        return None
    parts = tile_bytes(case.head_dim, BYTES_PER_ELEMENT[case.dtype])
    geometry = Geometry(DTYPES[case.dtype], case.head_dim, case.head_dim)
    return {
        "queries": parts["q tile"],
        "keys": parts["k tile"],
        "values": parts["v tile"],
        "scores": geometry.rows * geometry.keys * FLOAT,
        "statistics": parts["statistics"],
        "accumulator": parts["accumulator"],
    }


def _cutile_fmha(case: Case, device: Device) -> Tile | None:
    from mta_kernels.attention.cutile_fmha import tile_rows

    if case.dtype == "fp32":
        return None
    columns = max(16, power_of_two(case.head_dim))
    return _blocks(case, *tile_rows(columns, device.capability), columns, columns)


def _triton_pointer(case: Case, device: Device) -> Tile:
    from mta_kernels.attention.triton_pointer import tiles

    columns = value_columns(case)
    block_m, block_n, _ = tiles(columns, BYTES_PER_ELEMENT[case.dtype])
    return _blocks(case, block_m, block_n, columns, columns)


def _triton_fmha(case: Case, device: Device) -> Tile:
    from mta_kernels.attention.triton_fmha import tiles

    columns = value_columns(case)
    chosen = tiles(columns, BYTES_PER_ELEMENT[case.dtype], device.capability, shared_memory(device))
    return _blocks(case, chosen.block_m, chosen.block_n, columns, columns)


def _blocks(case: Case, block_m: int, block_n: int, depth: int, columns: int) -> Tile:
    """Of so many queries and keys, `depth` numbers each, and values of so many columns."""
    element = BYTES_PER_ELEMENT[case.dtype]
    return {
        "queries": block_m * depth * element,
        "keys": block_n * depth * element,
        "values": block_n * columns * element,
        "scores": block_m * block_n * FLOAT,
        "statistics": STATISTICS * block_m * FLOAT,
        "accumulator": block_m * columns * FLOAT,
    }


def _constants(source: Path) -> dict[str, int]:
    """The whole numbers that a C source names: `TILE = 64`."""
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+) = (\d+)\b", source.read_text())}


TILES: dict[str, Callable[[Case, Device], Tile | None]] = {
    "triton": _triton,
    "hopper": _hopper,
    "cuda-conv": _cuda_conv,
    "c-tiled": _c_tiled,
    "cuda-tiled": _cuda_tiled,
    "cuda-flash": _cuda_flash,
    "cutile-fmha": _cutile_fmha,
    "triton-pointer": _triton_pointer,
    "triton-descriptor": _triton_pointer,  # whose tiles it takes
    "triton-fmha": _triton_fmha,
}
