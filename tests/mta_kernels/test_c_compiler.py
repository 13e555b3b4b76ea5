"""How the C rungs are compiled: by which compiler, where it goes, and which message reports a failure."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from mta_ladder import attention, attention_reference, c_compiler, rung_unsupported

pytestmark = pytest.mark.skipif(
    rung_unsupported("c-loops", device="cpu", dtype=torch.float32, head_dim=64) is not None, reason="no C compiler"
)
Q = torch.randn(1, 2, 100, 32, generator=torch.Generator().manual_seed(0))

# Each test has a compiler of its own name, so that no function is one that was loaded before.


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Writes a script that is the compiler that CC names, with an empty cache; gives the file that counts its runs."""
    real = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    monkeypatch.setenv("MTA_KERNELS_CACHE", str(tmp_path / "cache"))

    def write(before: str = "") -> Path:
        script, log = tmp_path / "compiler", tmp_path / "log"
        script.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo "$*" >> {log};; esac\n{before}\nexec {real} "$@"\n')
        script.chmod(0o755)
        monkeypatch.setenv("CC", str(script))
        return log

    return write


def reason(source="c_tiled.c"):
    return c_compiler.unsupported(device=torch.device("cpu"), dtype=torch.float32, head_dim=64, source=source)


@pytest.mark.parametrize("kept", [0, 4, 4096])
def test_a_torn_library_is_compiled_again(compiler, tmp_path, kept):
    log = compiler()
    assert reason() is None
    (library,) = (tmp_path / "cache" / "c").iterdir()
    whole = library.read_bytes()
    library.unlink()  # this process has it mapped
    library.write_bytes(whole[:kept] + bytes(len(whole) - kept))
    for _ in range(2):
        c_compiler._loaded.cache_clear()
        assert reason() is None
    assert len(log.read_text().splitlines()) == 2
    assert library.read_bytes() == whole


def test_several_processes_may_compile_at_once(compiler, tmp_path):
    compiler("sleep 0.5")
    forked = multiprocessing.get_context("fork")
    running = [forked.Process(target=lambda: sys.exit(reason())) for _ in range(2)]
    for process in running:
        process.start()
    for process in running:
        process.join(120)
    assert [process.exitcode for process in running] == [0, 0]
    assert [path.suffix for path in (tmp_path / "cache" / "c").iterdir()] == [".so"]


def test_a_cache_that_cannot_be_written_costs_time_alone(compiler, monkeypatch):
    compiler()
    monkeypatch.setenv("MTA_KERNELS_CACHE", os.devnull)
    assert reason() is None


def test_without_openmp_it_warns_and_is_right(compiler):
    log = compiler('case "$*" in *"-fopenmp "*) echo "error: no -fopenmp here" >&2; exit 1;; esac')
    with pytest.warns(UserWarning, match=r"c_tiled.c runs on one core: .*no -fopenmp here"):
        assert reason() is None
    assert "-fopenmp-simd" in log.read_text().splitlines()[-1]
    got = c_compiler.attention(Q, Q, Q, causal=True, scale=32**-0.5, source="c_tiled.c")
    torch.testing.assert_close(got, attention_reference(Q, Q, Q))
    assert reason("c_loops.c") is None  # which uses one core anyway: no warning


def test_a_compiler_that_fails_is_quoted(compiler):
    compiler('echo "warning: hm" >&2; echo "c_tiled.c:9: fatal error: stdlib.h: No such file" >&2; exit 1')
    assert "c_tiled.c: c_tiled.c:9: fatal error: stdlib.h: No such file" in reason()


def test_no_compiler_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    assert reason() == "CC names 'no-such-compiler', and there is no such compiler"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "needs a C compiler" in reason()
    with pytest.raises(ValueError, match="needs a C compiler"):
        attention(*[Q[..., :9]] * 3, rung="c-tiled")  # which nothing compiled before


@pytest.mark.parametrize("rung", ["c-loops", "c-tiled"])
def test_what_they_do_not_take_is_said(rung):
    assert "CPU" in rung_unsupported(rung, device="cuda", dtype=torch.float32, head_dim=64)
    with pytest.raises(ValueError, match=r"cannot run this: .*float32"):
        attention(Q.half(), Q.half(), Q.half(), rung=rung)


def test_the_number_of_threads_changes_nothing():
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(attention(Q, Q, Q, rung="c-tiled"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
