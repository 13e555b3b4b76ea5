"""The instruction mix of a kernel, from its disassembly (SASS) as `nvdisasm -c` or `cuobjdump -sass` print it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P(?:\d+|T)\s+)?([A-Z][\w.]*)", re.MULTILINE)
_SECTION = re.compile(r"^\s*(?:\.section\s+\.text\.([^,\s]+)|Function : (\S+))", re.MULTILINE)
_TENSOR = re.compile(r"(?:UTC)?[BDHIOQ]G?MMA")
_WIDTH = re.compile(r"\.[SU]?(8|16|32|64|96|128|256)\b")
BULK_COPIES = ("UTMALDG", "UTMASTG", "UTMAREDG", "UTMAPF", "UBLKCP", "UBLKPF", "UBLKRED")


@dataclass(frozen=True, slots=True)
class Mix:
    """Instructions as they stand in the code: one in a loop counts once. Widths are bits that a thread moves.

    `tensor_core_opcodes` names what `tensor_core` counts (HMMA on registers, HGMMA of a warpgroup on sm_90, UTCHMMA on
    tensor memory on sm_100). `async_copies` are LDGSTS (cp.async), `bulk_copies` those of the copy engine (TMA).
    `matrix_loads` are LDSM (ldmatrix). Stores count stores and reductions. `local_*` move spills, and local arrays.
    """

    instructions: int
    tensor_core: int
    tensor_core_opcodes: str
    global_load_8: int
    global_load_16: int
    global_load_32: int
    global_load_64: int
    global_load_128: int
    global_load_256: int
    async_copies: int
    bulk_copies: int
    global_stores: int
    shared_load_8: int
    shared_load_16: int
    shared_load_32: int
    shared_load_64: int
    shared_load_128: int
    matrix_loads: int
    shared_stores: int
    local_loads: int
    local_stores: int


def instruction_mix(text: str, kernel: str) -> Mix:
    """The mix of one kernel of a disassembly; raises ValueError if that has no instruction of it."""
    opcodes = _opcodes(text, kernel)
    if not opcodes:
        raise ValueError(f"the disassembly has no instruction of {kernel}")
    bases: Counter[str] = Counter()
    for opcode, count in opcodes.items():
        bases[opcode.partition(".")[0]] += count
    tensor = {base: count for base, count in bases.items() if _TENSOR.fullmatch(base)}
    global_loads, shared_loads = _widths(opcodes, "LDG", "LD"), _widths(opcodes, "LDS")
    return Mix(
        instructions=sum(opcodes.values()) - bases["NOP"],
        tensor_core=sum(tensor.values()),
        tensor_core_opcodes=" ".join(sorted(tensor)),
        **{f"global_load_{bits}": global_loads[bits] for bits in (8, 16, 32, 64, 128, 256)},
        async_copies=bases["LDGSTS"],
        bulk_copies=sum(bases[base] for base in BULK_COPIES),
        global_stores=sum(bases[base] for base in ("STG", "ST", "RED", "REDG", "ATOM", "ATOMG")),
        **{f"shared_load_{bits}": shared_loads[bits] for bits in (8, 16, 32, 64, 128)},
        matrix_loads=bases["LDSM"],
        shared_stores=sum(bases[base] for base in ("STS", "STSM", "ATOMS")),
        local_loads=bases["LDL"],
        local_stores=bases["STL"],
    )


def _opcodes(text: str, kernel: str) -> Counter[str]:
    """How often each opcode with its modifiers stands in the sections of a kernel."""
    sections = [*_SECTION.finditer(text)]
    ends = [section.start() for section in sections[1:]] + [len(text)]
    found: Counter[str] = Counter()
    for section, end in zip(sections, ends, strict=True):
        if kernel in section.groups():
            found.update(_INSTRUCTION.findall(text, section.end(), end))
    return found


def _widths(opcodes: Counter[str], *bases: str) -> Counter[int]:
    """How many loads move so many bits; 32 where the opcode names none. A load of 96 bits counts as 128."""
    found: Counter[int] = Counter()
    for opcode, count in opcodes.items():
        base, _, modifiers = opcode.partition(".")
        if base in bases:
            bits = _WIDTH.findall(f".{modifiers}")
            width = int(bits[-1]) if bits else 32
            found[128 if width == 96 else width] += count
    return found
