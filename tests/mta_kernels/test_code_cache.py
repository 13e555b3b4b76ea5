"""What is kept of compiled code: read as it was written or not at all, by other users too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mta_kernels import code_cache
from mta_kernels.nvrtc import compiler
from mta_kernels.nvrtc.compiler import Source

KERNELS = Path(__file__).parents[2] / "kernels"
CODE = b"\x7fELF" + bytes(range(256)) * 64
TORN = {
    "empty": lambda kept: b"",
    "its first bytes": lambda kept: kept[:4],
    "half of it": lambda kept: kept[: len(kept) // 2],
    "all but a byte": lambda kept: kept[:-1],
    "a byte more": lambda kept: kept + b"\0",
    "a tail of zeros": lambda kept: kept[:4096] + bytes(len(kept) - 4096),
    "zeros": lambda kept: bytes(len(kept)),
    "a rotten bit": lambda kept: kept[:5000] + bytes([kept[5000] ^ 4]) + kept[5001:],
    "as it was kept before checksums": lambda kept: kept[: -code_cache.CHECKSUM_BYTES],
}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Source]:
    """An empty cache, and what is compiled from now on, by a compiler that is stood in for."""
    sources: list[Source] = []
    monkeypatch.setenv("MTA_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "version", lambda: "13.0")
    monkeypatch.setattr(compiler, "compile_source", lambda source: (sources.append(source), (CODE, ""))[1])
    return sources


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "add.cu").write_text("// nothing")
    return Source(tmp_path / "add.cu", "sm_80")


@pytest.fixture
def umask() -> Iterator[None]:
    """The umask of the process, restored at the end."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def cached(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "cache" / "cuda").rglob("*.cubin")
    return path


@pytest.mark.parametrize("torn", TORN.values(), ids=TORN)
def test_a_torn_file_is_compiled_again_and_replaced(torn, compiled, source, tmp_path) -> None:
    assert compiler.machine_code(source) == CODE
    path = cached(tmp_path)
    path.write_bytes(torn(path.read_bytes()))
    for _ in range(2):
        assert compiler.machine_code(source) == CODE
    assert len(compiled) == 2
    assert cached(tmp_path).parent.name == "nvrtc-13.0"


def test_a_cache_that_cannot_be_read_or_written_costs_time_alone(compiled, source, tmp_path, monkeypatch) -> None:
    compiler.machine_code(source)
    path = cached(tmp_path)
    path.unlink()
    path.mkdir()  # neither read nor replaced, by root neither
    assert compiler.machine_code(source) == CODE
    monkeypatch.setenv("MTA_KERNELS_CACHE", os.devnull)
    assert compiler.machine_code(source) == CODE
    assert len(compiled) == 3
    assert [x.name for x in path.parent.iterdir()] == [path.name]  # and nothing is left of the attempt


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write all")
def test_a_folder_that_this_user_may_not_enter_costs_time_alone(compiled, source, tmp_path) -> None:
    compiler.machine_code(source)
    for mode in (0o000, 0o500):
        (tmp_path / "cache").chmod(mode)
        try:
            assert compiler.machine_code(source) == CODE
        finally:
            (tmp_path / "cache").chmod(0o700)


@pytest.mark.parametrize(
    ("mask", "of_file", "of_folder"), [(0o022, 0o644, 0o755), (0o000, 0o644, 0o777), (0o077, 0o600, 0o700)]
)
def test_who_may_read_it_is_up_to_the_umask_and_nobody_else_may_write_it(
    umask, mask, of_file, of_folder, tmp_path
) -> None:
    os.umask(mask)
    path = tmp_path / "cache" / "cuda" / "add.cubin"
    code_cache.keep_code(path, CODE)
    assert path.stat().st_mode & 0o777 == of_file
    assert [x.stat().st_mode & 0o777 for x in path.parents[:2]] == [of_folder] * 2


OTHERS = {
    "a group may write": lambda path: path.chmod(0o664),
    "all may write": lambda path: path.chmod(0o646),
    "another user's": lambda path: os.chown(path, 4321, -1),
    "a link": lambda path: path.symlink_to(path.rename(path.with_name("other"))),
}


@pytest.mark.parametrize("give", OTHERS.values(), ids=OTHERS)
def test_a_file_that_others_could_have_put_there_is_ignored_and_replaced(give, compiled, source, tmp_path) -> None:
    if give is OTHERS["another user's"] and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    compiler.machine_code(source)
    path = cached(tmp_path)
    give(path)
    for _ in range(2):
        assert compiler.machine_code(source) == CODE
    assert len(compiled) == 2
    assert not path.is_symlink()
    assert (path.stat().st_uid, path.stat().st_mode & 0o022) == (os.geteuid(), 0)


def test_processes_that_write_at_once_are_never_read_in_the_middle(tmp_path) -> None:
    path = tmp_path / "add.cubin"
    code_cache.keep_code(path, CODE)
    program = f"""
import sys
from pathlib import Path
from mta_kernels import code_cache
codes = [bytes([i]) * (1000 + 300_000 * i) for i in range(3)]
for i in range(100):
    code_cache.keep_code(Path({str(path)!r}), codes[(i + int(sys.argv[1])) % 3])
    assert code_cache.kept_code(Path({str(path)!r})) in codes
"""
    environment = {**os.environ, "PYTHONPATH": str(KERNELS)}
    command = [sys.executable, "-c", program]
    writers = [subprocess.Popen([*command, str(i)], env=environment) for i in range(2)]
    while any(writer.poll() is None for writer in writers):
        assert code_cache.kept_code(path) is not None
    assert [writer.returncode for writer in writers] == [0, 0]
    assert [x.name for x in tmp_path.iterdir()] == ["add.cubin"]
