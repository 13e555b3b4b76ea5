"""Without a GPU, Triton's kernels run in its interpreter; the flag must be set before they are imported."""

import gc
import os
import signal
import sys
import threading
from importlib.util import find_spec

if "PYTEST_XDIST_WORKER" in os.environ:  # a process a core: more threads would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's and numpy's, which look when they are imported
# torch.compile would build nine programs to see which vectors of this CPU its compiler knows, then use them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        import quick_interpreter

        quick_interpreter.make_quick()

# A shell that runs the tests in the background makes them ignore Ctrl-C, which some of them test.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


_imported = 0  # modules whose objects are frozen

# The same examples in every run, so that a change that did not break anything cannot fail the build.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture
def without_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """`backend="auto"` takes what it takes on a user's CPU, in a part of the time of Triton's interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(autouse=True)
def no_earlier_calls() -> None:
    """No call is taken for one of another test: what a test puts in the place of a kernel is called."""
    if replay := sys.modules.get("mta_kernels.conv_attention.replay"):
        replay._seen.clear()
        replay._seen_backward.clear()
    if api := sys.modules.get("mta_kernels.multi_token_attention.api"):
        api._checked.clear()


@pytest.fixture(autouse=True)
def idle_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings are taken beside whatever else this machine does: processes of a test run share its cores."""
    monkeypatch.setattr("mtabench.measuring.ceilings.run_delays_s", dict)


def pytest_collection_finish() -> None:
    freeze_modules()


def pytest_runtest_logfinish() -> None:
    freeze_modules()


def freeze_modules() -> None:
    """A sweep collects garbage for each shape: at torch and all else that was imported, it need not look."""
    global _imported
    if len(sys.modules) != _imported:
        gc.collect()
        gc.freeze()
        _imported = len(sys.modules)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
