"""How many blocks of a kernel an SM holds at once, and what keeps it from holding more."""

from dataclasses import dataclass

from mtabench.static.limits import (
    PARTITIONS,
    REGISTER_UNIT,
    REGISTERS_PER_BLOCK,
    REGISTERS_PER_SM,
    REGISTERS_PER_THREAD,
    RESERVED_SHARED_BYTES,
    SHARED_UNIT,
    WARP,
    WARPS_PER_BLOCK,
    Limits,
)

REGISTERS, SHARED, TENSOR, WARPS, BLOCKS = "registers", "shared memory", "tensor memory", "warps", "blocks"


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks and warps of a kernel that an SM holds, their share of its warps, and the resources that run out first."""

    blocks: int
    warps: int
    share: float
    limited_by: tuple[str, ...]


def occupancy(limits: Limits, *, warps: int, registers: int, shared_bytes: int, tensor_memory: int = 0) -> Occupancy:
    """Of blocks with `warps` warps, `registers` a thread, and static and dynamic shared memory of `shared_bytes`.

    As NVIDIA's occupancy calculator (cuda_occupancy.h) counts, with the most shared memory that an SM can set apart;
    barriers are left out: they limit only tiny blocks with several of them. `tensor_memory` are
    columns that the block allocates: further blocks are resident, and wait for them. 0 blocks: it cannot be launched.
    """
    blocks = {
        REGISTERS: _by_registers(warps, registers),
        SHARED: _by_shared_memory(limits, shared_bytes),
        WARPS: limits.warps_per_sm // warps if warps <= WARPS_PER_BLOCK else 0,
        BLOCKS: limits.blocks_per_sm,
    }
    if tensor_memory:
        blocks[TENSOR] = limits.tensor_memory // tensor_memory
    fewest = min(blocks.values())
    limited_by = tuple(name for name, count in blocks.items() if count == fewest)
    return Occupancy(fewest, fewest * warps, fewest * warps / limits.warps_per_sm, limited_by)


def _by_registers(warps: int, registers: int) -> int:
    a_warp = max(1, -(-registers * WARP // REGISTER_UNIT)) * REGISTER_UNIT
    # A launch is checked as if every partition of the SM got as many warps.
    needed = a_warp * -(-warps // PARTITIONS) * PARTITIONS
    if registers > REGISTERS_PER_THREAD or needed > REGISTERS_PER_BLOCK:
        return 0
    return REGISTERS_PER_SM // PARTITIONS // a_warp * PARTITIONS // warps


def _by_shared_memory(limits: Limits, shared_bytes: int) -> int:
    if shared_bytes > limits.shared_per_block:
        return 0
    return limits.shared_per_sm // (-(-(shared_bytes + RESERVED_SHARED_BYTES) // SHARED_UNIT) * SHARED_UNIT)
