"""What is known of a compiled kernel, as a row; the JSON file of such rows.

JSON: `{"schema_version": 1, "toolchain": {...}, "shapes": {NAME: {...}}, "kernels": [{...}, ...]}`, a line a kernel.
What is unknown is left out. A row is identified by `target`, `shape` and `kernel`; rows come in the order in which they
were asked for.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mtabench.errors import UsageError
from mtabench.static.shapes import Shape

SCHEMA_VERSION = 1
OK, DOES_NOT_FIT, FAILED, SKIPPED = "ok", "does not fit", "failed", "skipped"
ALL = "all"  # in place of a kernel's name: the process that compiles all of a shape died


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled kernel. None where unknown, which a failure makes all numbers."""

    target: str  # sm_80, sm_86, ...
    shape: str  # the arguments that it was compiled for, in words
    # NAME.2 is what the second different launch of it in the shape compiled to. Host code that fails has a row under
    # the name of its source, and a compiler that crashes one named "all".
    kernel: str
    status: str  # ok, "does not fit", failed (it does not compile) or skipped (it cannot be compiled here)
    source: str = ""  # the row of `sources`
    language: str = ""  # triton or cuda
    reason: str = ""  # why it is not ok
    tiles: str = ""  # the constants BLOCK_* that it was compiled with
    warps: int | None = None  # a block
    stages: int | None = None  # of the compiler's software pipeline
    registers: int | None = None  # a thread
    spill_store_bytes: int | None = None  # of a thread's spill instructions, each counted once, as `ptxas -v` says
    spill_load_bytes: int | None = None
    stack_bytes: int | None = None  # a thread
    static_shared_bytes: int | None = None  # a block
    dynamic_shared_bytes: int | None = None  # a block
    shared_limit_bytes: int | None = None  # the most that the target gives a block
    tensor_memory_columns: int | None = None  # sm_100: those that a block allocates, of 512
    blocks_per_sm: int | None = None  # what an SM holds at once
    warps_per_sm: int | None = None
    occupancy: float | None = None  # the share of the warps that an SM can hold
    limited_by: str = ""  # the resources that keep an SM from holding one more block

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the row."""
        return self.target, self.shape, self.kernel

    @property
    def shared_bytes(self) -> int | None:
        """Shared memory of a block, static and dynamic."""
        return _sum(self.static_shared_bytes, self.dynamic_shared_bytes)

    @property
    def spill_bytes(self) -> int | None:
        """Bytes that spill instructions move, both ways."""
        return _sum(self.spill_store_bytes, self.spill_load_bytes)


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


@dataclass(frozen=True, slots=True)
class Inspection:
    """The kernels of a run, the shapes that it asked for, and the versions of what compiled them.

    `launched` names all kernels of these shapes, wanted or not.
    """

    kernels: Sequence[Kernel]
    shapes: Sequence[Shape]
    toolchain: Mapping[str, str]
    launched: Sequence[str] = ()


def json_text(found: Inspection) -> str:
    """The JSON file."""
    head = {"schema_version": SCHEMA_VERSION, "toolchain": dict(found.toolchain)}
    shapes = {shape.name: asdict(shape) for shape in found.shapes}
    lines = [json.dumps({name: value for name, value in asdict(kernel).items() if value not in (None, "")})
             for kernel in found.kernels]  # fmt: skip
    parts = [f'  "{name}": {json.dumps(value)}' for name, value in head.items()]
    parts.append(f'  "shapes": {_block("{}", (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in shapes.items()))}')
    parts.append(f'  "kernels": {_block("[]", lines)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read_json(path: Path) -> Inspection:
    """What `json_text` wrote; raises UsageError that names the file and what to type to make one."""
    how = f"make one with `mtabench inspect --json-file {path}`"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--baseline {path} cannot be read: {error.strerror}; {how}") from None
    except ValueError:
        raise UsageError(f"--baseline {path} is not JSON; {how}") from None
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"--baseline {path} has schema version {version}, and this mtabench reads {SCHEMA_VERSION}; {how}"
        )
    try:
        kernels = [Kernel(**record) for record in content["kernels"]]
        shapes = [Shape(**record | {"conv": tuple(record["conv"])}) for record in content["shapes"].values()]
        return Inspection(kernels, shapes, dict(content["toolchain"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"--baseline {path} is no inspection of kernels ({reason}); {how}") from None


def _block(brackets: str, lines: Iterable[str]) -> str:
    """A JSON list or object with a line an item."""
    body = ",\n".join(f"    {line}" for line in lines)
    return f"{brackets[0]}\n{body}\n  {brackets[1]}"
