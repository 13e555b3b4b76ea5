"""Plants faults in the text of kernels, in a copy of the package, and has tests/conformance find them.

    python scripts/plant_faults.py [WORDS...]

tests/conformance_faults.py lists the faults; WORDS choose those whose names or files have one of them. Each is run by a
process of its own, without a GPU, until the first test fails. Exits with 1 if one is not found.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import linecache
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
FAILED = 1  # pytest's exit code for tests that failed
WIDTH = 140  # of what is printed of a test that fails


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "mta_kernels")
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "kernels", folder, ignore=ignored, dirs_exist_ok=True)
        sys.path[:0] = [folder, str(ROOT / "tests"), str(ROOT / "tests/emulator"), str(ROOT)]
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        # Once for all faults: what the tests import, and the kernels.
        for name in ("pytest", "sympy", "conformance.test_surroundings", "conformance.conftest"):
            importlib.import_module(name)
        for path in package.rglob("*.py"):
            with contextlib.suppress(ImportError):  # of packages that are not installed
                importlib.import_module(".".join(path.relative_to(folder).with_suffix("").parts))
        from conformance_faults import FAULTS

        chosen = [x for x in FAULTS if not words or any(word in f"{x.name} {x.file}" for word in words)]
        missed = 0
        for fault in chosen:
            start = time.monotonic()
            found = _found_by(fault, package)
            missed += not found
            took = time.monotonic() - start
            print(f"{fault.file}: {fault.name}: {found or 'NOT FOUND'} ({took:.0f} s)", flush=True)
        print(f"{len(chosen) - missed} of {len(chosen)} faults found")
        return missed > 0


def _found_by(fault, package: Path) -> str:
    """The first test that fails with a fault, and how."""
    source, report = package / fault.file, package.parent / "report"
    text = source.read_text()
    if text.count(fault.line) != 1:
        raise ValueError(f"{fault.name}: {text.count(fault.line)} places in {fault.file}; expected one")
    source.write_text(text.replace(fault.line, fault.instead))
    child = os.fork()
    if child == 0:
        if source.suffix == ".py":
            _load_again(source, package)
        os._exit(_tested(fault.tests, report))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    source.write_text(text)
    if code < 0:
        return f"the process ended by signal {-code}"
    if code not in (0, FAILED):
        raise RuntimeError(f"{fault.name}: pytest ended with {code}\n{report.read_text()}")
    failed = [line for line in report.read_text().splitlines() if line.startswith("FAILED")]
    return failed[0].partition("::")[2][:WIDTH] if failed else ""


def _load_again(source: Path, package: Path) -> None:
    """The module of a source as it is now, in the place of the one that was imported, wherever that was imported."""
    name = ".".join(source.relative_to(package.parent).with_suffix("").parts)
    module = sys.modules[name]
    before = {id(x): key for key, x in vars(module).items() if not isinstance(x, ModuleType)}
    linecache.checkcache(str(source))
    exec(compile(source.read_text(), str(source), "exec"), vars(module))
    for other in [x for key, x in sys.modules.items() if key.startswith("mta_kernels") and x is not module]:
        for key, x in list(vars(other).items()):
            if getattr(x, "__module__", None) == name and id(x) in before:
                setattr(other, key, vars(module)[before[id(x)]])


def _tested(tests: str, report: Path) -> int:
    """pytest's exit code, in the process that ends with it."""
    import pytest

    os.chdir(ROOT)
    os.environ["COLUMNS"] = "300"  # so that pytest says how a test fails
    with report.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(io.StringIO()):
        arguments = ["-q", "-x", "-p", "no:cacheprovider", "-o", "pythonpath=tests tests/emulator"]
        return pytest.main([*arguments, "tests/conformance", "-k", tests])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
