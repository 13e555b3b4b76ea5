"""Without a GPU, Triton's kernels run in its interpreter; the flag must be set before they are imported."""

import os
import signal
import threading

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:  # a process a core: more threads would wait for each other
    torch.set_num_threads(1)

# A shell that runs the tests in the background makes them ignore Ctrl-C, which some of them test.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The same examples in every run, so that a change that did not break anything cannot fail the build.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
