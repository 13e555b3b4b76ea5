"""Two inspections compared: what of a kernel got worse, by what a gate can be held to without a GPU.

Worse is a kernel that starts to spill or spills more, that no longer fits in a block, that leaves an SM fewer warps,
that no longer compiles, or that is gone. What only changed (registers, tile sizes, stages) passes without a word.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from mtabench.static.records import ALL, DOES_NOT_FIT, FAILED, OK, SKIPPED, Inspection, Kernel

WORSE, BETTER, NEW, SKIP = "worse", "better", "new", "not compared"


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
    """What changed from `base` to `head`, of the kernels that `head` was asked for.

    These are the kernels for `targets` and for the shapes of `head`, whose names hold one of `names` if there are any.
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
