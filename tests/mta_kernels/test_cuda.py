"""CUDA sources to machine code, and what is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mta_kernels.cuda import compiler
from mta_kernels.cuda.compiler import Source


def test_machine_code_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reason = compiler.missing_package()
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv("MTA_KERNELS_CACHE", str(tmp_path))
    (tmp_path / "add.cu").write_text("// nothing")
    asked: list[Source] = []
    monkeypatch.setattr(compiler, "compile_source", lambda source: (asked.append(source), (b"\x7fELF", ""))[1])
    one, other = (Source(tmp_path / "add.cu", "sm_80", {"A": a}) for a in (1, 2))
    elsewhere = Source(tmp_path / "add.cu", "sm_90", {"A": 1})
    for source in (one, one, other, elsewhere):
        assert compiler.machine_code(source) == b"\x7fELF"
    assert asked == [one, other, elsewhere]
    (path, *_) = (tmp_path / "cuda").rglob("*.cubin")
    path.write_bytes(b"torn")
    for source in (one, other, elsewhere):
        compiler.machine_code(source)
    assert len(asked) == 4
