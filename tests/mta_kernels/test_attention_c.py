"""The C rungs against float64, and how they are compiled: by which compiler, where it goes, and what is said if not."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from mta_ladder import attention, attention_reference, c_compiler, rung_unsupported

RUNGS = ("c-loops", "c-tiled")
pytestmark = pytest.mark.skipif(
    rung_unsupported("c-loops", device="cpu", dtype=torch.float32, head_dim=64) is not None, reason="no C compiler"
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """NaN in whatever a kernel does not write."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: empty(*sizes, **options).fill_(float("nan")))


def make(batch, heads, kv_heads, rows, keys, head_dim, value_dim=None):
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (batch, heads, rows, head_dim),
        (batch, kv_heads, keys, head_dim),
        (batch, kv_heads, keys, value_dim or head_dim),
    )
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def assert_right(out, q, k, v, **options):
    """The error is at most twice eager's, or a few rounding steps."""
    exact = attention_reference(q.double(), k.double(), v.double(), **options)

    def error(result):
        return ((result - exact).norm() / exact.norm()).item()

    assert out.dtype == torch.float32
    assert error(out) <= max(2 * error(attention_reference(q, k, v, **options)), 5e-7)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 1, 1),
        (2, 4, 2, 65, 65, 40),
        (1, 6, 2, 97, 97, 64),  # a row more than a block of queries
        (1, 2, 1, 33, 300, 80, 24),  # the last of many positions
        (1, 1, 1, 1, 129, 128, 17),  # one query, a key more than a block
        (2, 1, 1, 192, 256, 16, 256),
    ],
    ids=str,
)
def test_shapes(rung, shape, causal):
    q, k, v = make(*shape)
    assert_right(attention(q, k, v, causal=causal, rung=rung), q, k, v, causal=causal)


@pytest.mark.parametrize("rung", RUNGS)
def test_nan_is_passed_on_and_stays_in_its_row(rung):
    q, k, v = make(1, 2, 2, 100, 100, 32)
    q[0, 0, 50, 3] = float("nan")
    out = attention(q, k, v, rung=rung)
    assert out[0, 0, 50].isnan().all()
    assert out.isnan().sum() == 32


def test_the_tiled_exponential_is_as_exact_as_it_says():
    """With scores 0 and x <= 0 and values 0 and 1, the output is e^x / (1 + e^x)."""
    x = torch.linspace(-87, 0, 20001)
    ones = torch.ones(len(x), 1, 1, 1)
    q, k = x[:, None, None, None], torch.cat([0 * ones, ones], dim=2)
    out = attention(q, k, k, causal=False, scale=1.0, rung="c-tiled").flatten().double()
    exact = x.double().sigmoid()
    # Beside the polynomial: x log2(e) is rounded, which counts x times as much, and so are a sum and a quotient.
    allowed = 1.2e-7 + 2**-23 * (2 + x.abs().double())
    assert ((out - exact).abs() <= allowed * exact).all()
    tiny = attention(q[:1] - 1000, k[:1], k[:1], causal=False, scale=1.0, rung="c-tiled")
    assert tiny.item() == 0


def test_the_number_of_threads_changes_nothing():
    q, k, v = make(1, 3, 1, 300, 300, 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = attention(q, k, v, rung="c-tiled")
        torch.set_num_threads(2)
        assert torch.equal(attention(q, k, v, rung="c-tiled"), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rung", RUNGS)
def test_what_they_do_not_take_is_said(rung):
    assert "CPU" in rung_unsupported(rung, device="cuda", dtype=torch.float32, head_dim=64)
    assert "float32" in rung_unsupported(rung, device="cpu", dtype=torch.bfloat16, head_dim=64)
    with pytest.raises(ValueError, match=r"cannot run this: .*float32"):
        attention(*(x.half() for x in make(1, 1, 1, 5, 5, 8)), rung=rung)


# How they are compiled. Each test has a compiler of its own name, so that no function is one that was loaded before.


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


def test_a_library_is_kept_and_not_compiled_again(compiler, tmp_path):
    log = compiler()
    assert reason() is None
    (library,) = (tmp_path / "cache" / "c").iterdir()
    assert library.name.startswith("c_tiled-")
    c_compiler._loaded.cache_clear()
    assert reason() is None
    assert len(log.read_text().splitlines()) == 1


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
    q, k, v = make(1, 2, 2, 100, 100, 32)
    assert_right(c_compiler.attention(q, k, v, causal=True, scale=32**-0.5, source="c_tiled.c"), q, k, v)
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
        attention(*make(1, 1, 1, 3, 3, 9), rung="c-tiled")
