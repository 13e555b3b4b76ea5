"""What is known of a compiled kernel, as a row; the JSON file of such rows, and two of them compared.

JSON: `{"schema_version": 1, "toolchain": {...}, "shapes": {NAME: {...}}, "kernels": [{...}, ...]}`, a line a kernel.
What is unknown is left out. A row is identified by `target`, `shape` and `kernel`; rows come in the order of the
request.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mtabench.errors import UsageError
from mtabench.static.shapes import Shape

SCHEMA_VERSION = 1
OK, DOES_NOT_FIT, FAILED, SKIPPED = "ok", "does not fit", "failed", "skipped"
ALL = "all"  # in place of a kernel's name: the process that compiles all of a shape died
WORSE, BETTER, NEW, SKIP = "worse", "better", "new", "not compared"


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
    """The kernels of a run, the shapes that it compiled for, and the versions of what compiled them.

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


@dataclass(frozen=True, slots=True)
class Finding:
    """What changed of a kernel: a verdict, and a line that says it."""

    verdict: str
    line: str


@dataclass(frozen=True, slots=True)
class KernelComparison:
    """The findings, how many kernels both inspections have, and how the toolchains differ, an empty text if not."""

    findings: Sequence[Finding]
    common: int
    toolchains: str

    @property
    def worse(self) -> int:
        """How many findings fail a gate."""
        return sum(finding.verdict == WORSE for finding in self.findings)


def compare(
    base: Inspection, head: Inspection, targets: Collection[str], names: Sequence[str] = ()
) -> KernelComparison:
    """What changed from `base` to `head`, of the kernels that `head` has.

    These are the kernels for `targets` and for the shapes of `head`, whose names hold one of `names` if there are any.
    Worse is one that starts to spill or spills more, that no longer fits in a block, that leaves an SM fewer warps,
    that no longer compiles, or that is gone. What only changed (registers, tile sizes, stages) passes without a word.
    """
    shapes = {shape.name for shape in head.shapes}
    before = {
        kernel.key: kernel
        for kernel in base.kernels
        if kernel.target in targets and kernel.shape in shapes
        if not names or any(name in kernel.kernel for name in names)
    }
    after = {kernel.key: kernel for kernel in head.kernels}
    # Host code, or a whole process, that failed or was skipped has one row: its kernels are not all gone.
    lost = {
        (kernel.target, kernel.shape, kernel.source)
        for kernel in after.values()
        if kernel.status in (FAILED, SKIPPED) and kernel.kernel in (kernel.source, ALL)
    }
    findings: list[Finding] = []
    for key, kernel in before.items():
        if key in after:
            findings += _changes(kernel, after[key])
        elif not lost & {(*key[:2], kernel.source), (*key[:2], "")}:
            findings.append(Finding(WORSE, f"{_place(kernel)} is gone: nothing launches or compiles it any more"))
    findings += [_newcomer(kernel) for key, kernel in after.items() if key not in before]
    return KernelComparison(findings, len(before.keys() & after.keys()), _toolchains(base, head))


def _changes(before: Kernel, after: Kernel) -> Iterator[Finding]:
    place = _place(after)
    if after.status != before.status:
        if after.status == SKIPPED:
            yield Finding(SKIP, f"{place} cannot be compiled here: {after.reason}")
        elif after.status == OK:
            yield Finding(BETTER, f"{place} {'fits now' if before.status == DOES_NOT_FIT else 'compiles now'}")
        elif after.status == DOES_NOT_FIT:
            verb = "no longer fits" if before.status == OK else "does not fit"
            yield Finding(WORSE, f"{place} {verb}: {after.reason}")
        elif after.status == FAILED:
            yield Finding(WORSE, f"{place} no longer compiles: {after.reason}")
        return
    if before.spill_bytes is None or after.spill_bytes is None:
        return
    if before.spill_bytes != after.spill_bytes:
        more = after.spill_bytes > before.spill_bytes
        verb = "spills more" if more and before.spill_bytes else "starts to spill" if more else "spills less"
        yield Finding(WORSE if more else BETTER, f"{place} {verb}: {_spills(after)} (was {_spills(before)})")
    if before.warps_per_sm is not None and after.warps_per_sm is not None and before.warps_per_sm != after.warps_per_sm:
        less = after.warps_per_sm < before.warps_per_sm
        verb = "loses occupancy" if less else "gains occupancy"
        yield Finding(WORSE if less else BETTER, f"{place} {verb}: {_occupancy(after)} (was {_occupancy(before)})")


def _newcomer(kernel: Kernel) -> Finding:
    place = _place(kernel)
    if kernel.status == SKIPPED:
        return Finding(SKIP, f"{place} cannot be compiled here: {kernel.reason}")
    if kernel.status == FAILED:
        return Finding(WORSE, f"{place} does not compile: {kernel.reason}")
    if kernel.status == DOES_NOT_FIT:
        return Finding(WORSE, f"{place} is new and does not fit: {kernel.reason}")
    return Finding(NEW, f"{place} is new: {_spills(kernel)}, {_occupancy(kernel)}")


def _place(kernel: Kernel) -> str:
    return f"{kernel.target}, {kernel.shape}: {kernel.kernel}"


def _spills(kernel: Kernel) -> str:
    if not kernel.spill_bytes:
        return "no spills"
    return f"{kernel.spill_store_bytes} bytes of spill stores and {kernel.spill_load_bytes} of loads a thread"


def _occupancy(kernel: Kernel) -> str:
    shared = f"{(kernel.shared_bytes or 0) / 1024:.1f} KiB of shared memory"
    return (
        f"{kernel.warps_per_sm} warps on an SM, limited by {kernel.limited_by}, "
        f"with {kernel.registers} registers and {shared}"
    )


def _toolchains(base: Inspection, head: Inspection) -> str:
    """Tools that both used in other versions."""
    differing = [
        (name, base.toolchain[name], version)
        for name, version in head.toolchain.items()
        if base.toolchain.get(name, version) != version
    ]
    return ", ".join(f"{name} {after} instead of {before}" for name, before, after in differing)
