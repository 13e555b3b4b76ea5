"""The tile sizes that the Triton kernels take on a named GPU, whether it is there or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mta_kernels.conv_attention import tile_sizes
from mta_kernels.conv_attention.triton.backward_scores import probabilities_candidates, value_gradients_candidates
from mta_kernels.conv_attention.triton.decode_plan import DecodeConfig, auto_splits, bulk_pays, decode_candidates
from mta_kernels.conv_attention.triton.forward import ForwardConfig, forward_candidates
from mtabench.model.devices import Device
from mtabench.model.fused import Tiles, power_of_two
from mtabench.problem.case import BYTES_PER_ELEMENT, Case
from mtabench.problem.inputs import DTYPES


def tiles_of(case: Case, device: Device) -> Tiles:
    """What the kernels' own tables say for a cell of "triton" on this device."""
    if case.pass_ == "decode":
        if isinstance(case.splits, int):
            return Tiles(splits=case.splits, source="asked for")
        return Tiles(splits=_auto_splits(case, device), source="auto")
    if case.pass_ == "fwd":
        config, source = forward_config(case, device)
        return Tiles(forward=(config.block_m, config.block_n), in_registers=config.q_in_registers, source=source)
    limits, key = _limits(case, device), _key(case)
    candidates = probabilities_candidates(compute_capability=device.capability, **limits)
    first, source = _choice("probabilities", key, candidates, device.name)
    second, _ = _choice(
        "value_gradients", key, value_gradients_candidates(block_d=value_columns(case), **limits), device.name
    )
    return Tiles(
        probabilities=(first.block_m, first.block_n), value_gradients=(second.block_m, second.block_n), source=source
    )


def depth_of(case: Case) -> int:
    """Numbers of a row of the expanded form."""
    return min(case.conv.taps) * case.head_dim


def forward_config(case: Case, device: Device) -> tuple[ForwardConfig, str]:
    """The tile sizes of the forward of "triton" on this device, and where they come from."""
    candidates = forward_candidates(
        depth=depth_of(case), block_d=value_columns(case), compute_capability=device.capability, **_limits(case, device)
    )
    return _choice("forward", _key(case), candidates, device.name)


def value_columns(case: Case) -> int:
    """Columns of a tile of values in Triton: as `value_block` of the kernels."""
    return max(128 // BYTES_PER_ELEMENT[case.dtype], power_of_two(case.head_dim))


def _auto_splits(case: Case, device: Device) -> int:
    """As `auto_tiles` of the kernels takes them there."""
    sequences, group = case.batch * case.kv_heads, case.heads // case.kv_heads
    limits = {"key_taps": case.conv.key_taps, "block_d": max(16, power_of_two(case.head_dim)), **_limits(case, device)}
    bulk = bulk_pays(case.head_dim, group, BYTES_PER_ELEMENT[case.dtype], device.capability)
    key, candidates = _key(case, group, sequences), decode_candidates(group=group, bulk=bulk, **limits)
    config: DecodeConfig = _choice("decode_bulk" if bulk else "decode", key, candidates, device.name)[0]
    return auto_splits(config, limits, sequences, case.seq, group, device.sm_count)


def _limits(case: Case, device: Device) -> dict[str, Any]:
    return {"element_size": BYTES_PER_ELEMENT[case.dtype], "shared_memory": device.shared_memory}


def _key(case: Case, *of_decode: int) -> tile_sizes.Key:
    shape = case.head_dim, case.conv.taps, case.operation.causal, case.seq
    return tile_sizes.Key.of(DTYPES[case.dtype], *shape, *of_decode)


def _choice(kernel: str, key: tile_sizes.Key, candidates: Sequence[Any], device: str) -> tuple[Any, str]:
    """The config that the kernels take, and where it comes from."""
    config, entry = tile_sizes.look_up(kernel, key, candidates, device)
    if entry is None:
        return config, "the kernels' own guess: nothing is tuned for this shape and device"
    return config, f"tuned at {entry.key.seq_len} tokens"
