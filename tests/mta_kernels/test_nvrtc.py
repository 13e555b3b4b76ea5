"""CUDA sources to machine code, what is kept of it, and launches."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mta_kernels.nvrtc import compiler, driver
from mta_kernels.nvrtc.compiler import Source


def test_machine_code_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reason = compiler.missing_package()
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv("MTA_KERNELS_CACHE", str(tmp_path))
    (tmp_path / "add.cu").write_text("// nothing")
    compiled: list[Source] = []
    monkeypatch.setattr(compiler, "compile_source", lambda source: (compiled.append(source), (b"\x7fELF", ""))[1])
    one, other = (Source(tmp_path / "add.cu", "sm_80", {"A": a}) for a in (1, 2))
    elsewhere = Source(tmp_path / "add.cu", "sm_90", {"A": 1})
    for source in (one, one, other, elsewhere):
        assert compiler.machine_code(source) == b"\x7fELF"
    assert compiled == [one, other, elsewhere]


def test_a_compiler_without_words_leaves_python_as_it_is(tmp_path: Path) -> None:
    """NVRTC writes its log into bytes, a single zero if it has no words; Python shares bytes of one character."""
    if reason := compiler.missing_package():
        pytest.skip(reason)
    (tmp_path / "nothing.cu").write_text("// nothing")
    script = (  # constants of a module that is compiled anew are its own
        f"import sys, torch; sys.pycache_prefix = {str(tmp_path)!r}\n"
        "from pathlib import Path; from mta_kernels.nvrtc.compiler import Source, compile_source\n"
        f"_, words = compile_source(Source(Path({str(tmp_path / 'nothing.cu')!r}), 'compute_90'))\n"
        "print([words, *(x for x in range(256) if bytes([x]) != bytearray([x]))])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['']"


class Driver:
    """libcuda's `cuLaunchKernelEx`: keeps what it is launched with, and needs a context in each thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[tuple] = []
        self.entered: list[int] = []
        self.result, self.device, self.stream = 0, 0, 7
        self.thread = threading.local()  # an identity is given again to a later thread
        self.thread.has_context = True
        monkeypatch.setattr(driver, "_libcuda", lambda: SimpleNamespace(cuLaunchKernelEx=self.launch))
        driver._idle_launches.cache_clear()
        self.interrupt = None
        monkeypatch.setattr(driver, "_enter_context", self.enter)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.stream + device, raising=False)
        monkeypatch.setattr(torch.cuda, "device", self.on_device)

    def enter(self, device: int) -> None:
        self.entered.append(device)
        self.thread.has_context = True

    def on_device(self, device: int) -> nullcontext:
        self.device = device
        return nullcontext()

    def launch(self, config, kernel, pointers, extra) -> int:
        if not hasattr(self.thread, "has_context"):
            return driver.INVALID_CONTEXT
        config = config._obj
        if self.interrupt:
            interrupt, self.interrupt = self.interrupt, None
            interrupt()
        numbers = [ctypes.c_int.from_address(pointer).value for pointer in pointers]
        grid = (*config.blocks, *config.threads, config.shared_memory, config.stream)
        self.launched.append((kernel.value, *grid, *numbers, config.attribute_count, extra))
        return self.result


@pytest.fixture
def libcuda(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_a_launch_is_repeated_with_what_its_arguments_hold_then(libcuda: Driver) -> None:
    first, second = ctypes.c_int(3), ctypes.c_int(4)
    launches = driver.LaunchSequence(
        driver.Launch(ctypes.c_void_p(99), (5, 2), 128, 1000, 0, first, second),
        driver.Launch(ctypes.c_void_p(97), (6,), 64, 0, 0, first),
    )
    launches()
    first.value, libcuda.stream = 11, 8
    launches()
    libcuda.stream = 0
    launches()
    assert libcuda.launched == [
        (99, 5, 2, 1, 128, 1, 1, 1000, 7, 3, 4, 0, None),
        (97, 6, 1, 1, 64, 1, 1, 0, 7, 3, 0, None),
        (99, 5, 2, 1, 128, 1, 1, 1000, 8, 11, 4, 0, None),
        (97, 6, 1, 1, 64, 1, 1, 0, 8, 11, 0, None),
        (99, 5, 2, 1, 128, 1, 1, 1000, None, 11, 4, 0, None),
        (97, 6, 1, 1, 64, 1, 1, 0, None, 11, 0, None),
    ]
    libcuda.stream = 8
    driver.launch(ctypes.c_void_p(98), (1, 2, 3), 32, 0, 0, second)
    assert libcuda.launched[6:] == [(98, 1, 2, 3, 32, 1, 1, 0, 8, 4, 0, None)]


def test_a_launch_like_an_earlier_one_has_its_own_arguments(libcuda: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on another stream or device, and where two threads launch at a time."""
    laid_out = []
    make = driver.Launch.__init__
    monkeypatch.setattr(driver.Launch, "__init__", lambda self, *x, **y: (laid_out.append(x), make(self, *x, **y))[1])

    def launch(*numbers: int, kernel: int = 99, blocks: int = 5, device: int = 0, **options) -> None:
        arguments = map(ctypes.c_int, numbers)  # which nobody else keeps
        driver.launch(ctypes.c_void_p(kernel), (blocks, 2), 128, 0, device, *arguments, **options)

    launch(1, 2)
    launch(3, 4)
    libcuda.stream = 8
    launch(5, 6)
    assert len(laid_out) == 1
    assert [x[8:11] for x in libcuda.launched] == [(7, 1, 2), (7, 3, 4), (8, 5, 6)]
    libcuda.interrupt = lambda: launch(7, 8)
    launch(9, 10)
    assert len(laid_out) == 2
    assert [x[8:11] for x in libcuda.launched[3:]] == [(8, 7, 8), (8, 9, 10)]
    launch(1, 2, blocks=6)
    launch(1, 2, kernel=98)
    launch(1, 2, follows=True)
    launch(1, 2, device=1)
    launch(1)
    assert len(laid_out) == 7
    assert [x[0:2] + x[8:-1] for x in libcuda.launched[5:]] == [
        (99, 6, 8, 1, 2, 0), (98, 5, 8, 1, 2, 0), (99, 5, 8, 1, 2, 1), (99, 5, 9, 1, 2, 0), (99, 5, 8, 1, 0),
    ]  # fmt: skip


def test_a_thread_without_a_context_enters_that_of_the_device(libcuda: Driver) -> None:
    """As autograd's threads begin."""
    launch = driver.LaunchSequence(driver.Launch(ctypes.c_void_p(99), (1,), 128, 0, 0, ctypes.c_int(3)))
    for launches in (2, 4):
        thread = threading.Thread(target=lambda: [launch(), launch()])
        thread.start()
        thread.join()
        assert len(libcuda.launched) == launches
    launch()
    assert libcuda.entered == [0, 0]


def test_what_needs_a_context_is_asked_again_in_one(libcuda: Driver) -> None:
    found = []
    results = iter([(driver.INVALID_CONTEXT, None), (0, 5), (1, None)])
    for _ in range(2):
        found.append(driver.in_context(3, lambda: next(results)))
    assert (found, libcuda.entered) == ([(0, 5), (1, None)], [3])


def test_what_the_driver_refuses_is_an_error(libcuda: Driver) -> None:
    pytest.importorskip("cuda.bindings")
    libcuda.result = 701
    with pytest.raises(RuntimeError, match="refused: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        driver.launch(ctypes.c_void_p(99), (1,), 128, 0, 0, ctypes.c_int(3))


def test_the_configuration_is_laid_out_as_the_driver_reads_it() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    theirs = bindings.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 1, 2, 3
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 4, 5, 6
    theirs.sharedMemBytes, theirs.hStream = 7, bindings.CUstream(8)
    ours = driver.LaunchConfig.from_address(theirs.getPtr())
    assert (*ours.blocks, *ours.threads, ours.shared_memory, ours.stream) == (1, 2, 3, 4, 5, 6, 7, 8)
    assert (ours.attributes, ours.attribute_count) == (None, 0)


def test_a_launch_that_follows_tells_the_driver_so(libcuda: Driver) -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    launch = driver.Launch(ctypes.c_void_p(99), (1,), 128, 0, 0, ctypes.c_int(3), follows=True)
    assert launch.config.attribute_count == 1
    theirs = bindings.CUlaunchAttribute(launch.config.attributes)
    wanted = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert (theirs.id, theirs.value.programmaticStreamSerializationAllowed) == (wanted, 1)


def test_a_tensor_map_outlives_what_the_driver_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded by a driver that writes 1, 2, 3 ... into it."""
    bindings = pytest.importorskip("cuda.bindings.driver")
    from mta_kernels.conv_attention.hopper import tensor_maps

    def encode(*options):
        found = bindings.CUtensorMap()
        found.opaque = [bindings.cuuint64_t(n) for n in range(1, 17)]
        return bindings.CUresult.CUDA_SUCCESS, found

    monkeypatch.setattr(bindings, "cuTensorMapEncodeTiled", encode)
    found = tensor_maps.encode(torch.zeros(64, 64, dtype=torch.float16), [64, 64], [64], [64, 64])
    assert list(found.words) == list(range(1, 17))


def test_a_sequence_keeps_what_its_launches_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads arguments at each launch, so they must live as long as what repeats it."""
    monkeypatch.setattr(driver, "_libcuda", lambda: SimpleNamespace(cuLaunchKernelEx=lambda *_: 0))
    launch = driver.Launch(ctypes.c_void_p(), (1,), 32, 0, 0, ctypes.c_int(7))
    alive = weakref.ref(launch)
    sequence = driver.LaunchSequence(launch)
    del launch
    gc.collect()
    assert alive() is not None
    del sequence
    gc.collect()
    assert alive() is None
