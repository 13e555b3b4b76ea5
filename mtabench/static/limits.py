"""What an SM holds, by compute capability: one literal table with its sources, and the GPU that stands for each."""

from dataclasses import dataclass

from mta_kernels.planned import H200, PlannedGpu
from mtabench.errors import UsageError

KIB = 1024
WARP = 32
# CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability": the same for all of these.
REGISTERS_PER_SM = 64 * 1024
REGISTERS_PER_BLOCK = 64 * 1024
REGISTERS_PER_THREAD = 255
WARPS_PER_BLOCK = 1024 // WARP
# cuda_occupancy.h of CUDA 13.0, NVIDIA's occupancy calculator, for compute capabilities 8.0 to 12.x. Registers are
# allocated to warps, 256 at a time, within each of the four partitions of an SM. Shared memory: 128 bytes at a time.
REGISTER_UNIT = 256
PARTITIONS = 4
SHARED_UNIT = 128
PLANNED_MEMORY = 24 * 2**30  # of a GPU that is only planned for
# CUDA C++ Programming Guide, "Compute Capability 8.x" to "12.x": the system keeps 1 KiB of each block.
RESERVED_SHARED_BYTES = 1024
REGISTERS, SHARED, TENSOR, WARPS, BLOCKS = "registers", "shared memory", "tensor memory", "warps", "blocks"


@dataclass(frozen=True, slots=True)
class Limits:
    """An SM of one compute capability.

    `shared_per_block` is what a kernel may have at most (the opt-in limit). `tensor_memory` counts columns, 0 where
    there is none. `gpu` is a GPU of this capability, as CUDA calls it, and `sms` its number of SMs.
    """

    target: str
    capability: tuple[int, int]
    warps_per_sm: int
    blocks_per_sm: int
    shared_per_sm: int
    shared_per_block: int
    tensor_memory: int
    gpu: str
    sms: int

    @property
    def number(self) -> int:
        """The capability as compilers write it: 90 for 9.0."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def planned(self) -> PlannedGpu:
        """The GPU as plans of calls take it."""
        if self.gpu == H200.name:
            return H200
        return PlannedGpu(
            self.gpu, self.capability, self.shared_per_block, self.shared_per_sm, self.sms, PLANNED_MEMORY
        )  # fmt: skip


# Warps, blocks and shared memory: the table named above. Tensor memory: PTX ISA, "Tensor Memory", 512 columns an SM.
# SMs: NVIDIA's data sheets and architecture whitepapers of these GPUs.
LIMITS = (
    Limits("sm_80", (8, 0), 64, 32, 164 * KIB, 163 * KIB, 0, "NVIDIA A100-SXM4-80GB", 108),
    Limits("sm_86", (8, 6), 48, 16, 100 * KIB, 99 * KIB, 0, "NVIDIA GeForce RTX 3090", 82),
    Limits("sm_89", (8, 9), 48, 24, 100 * KIB, 99 * KIB, 0, "NVIDIA GeForce RTX 4090", 128),
    Limits("sm_90", (9, 0), 64, 32, 228 * KIB, 227 * KIB, 0, "NVIDIA H200", 132),
    Limits("sm_100", (10, 0), 64, 32, 228 * KIB, 227 * KIB, 512, "NVIDIA B200", 148),
    Limits("sm_120", (12, 0), 48, 24, 100 * KIB, 99 * KIB, 0, "NVIDIA GeForce RTX 5090", 170),
)
TARGETS = tuple(limits.target for limits in LIMITS)
# sm_89 has the code of sm_86 and room for more blocks: it is compiled only if --target names it.
DEFAULT_TARGETS = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


def limits_of(target: str) -> Limits:
    """The limits of a target such as "sm_90", of which "90", "sm90" and "sm_90a" are other spellings.

    Raises UsageError for one that the table does not have.
    """
    number = target.lower().removeprefix("sm").removeprefix("_").removesuffix("a").replace(".", "")
    for limits in LIMITS:
        if limits.target == f"sm_{number}":
            return limits
    raise UsageError(f"--target {target!r} is not known; expected one or more of {', '.join(TARGETS)}")


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
