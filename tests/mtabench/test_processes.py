"""Processes that crash, hang, raise or are killed: what is reported of them, and that nothing is left of them."""

import os
import signal
import subprocess
import sys
import time

import process_functions as functions
import pytest

from mtabench.processes import ProcessEndedError, call_in_process, run_module


def call(function, *arguments, timeout_s=60, receive=None):
    """What the function sent."""
    received = []
    call_in_process(function, arguments, timeout_s, receive or received.append)
    return received


def assert_gone(*pids):
    deadline = time.monotonic() + 20
    for pid in pids:
        while running(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def running(pid):
    """Whether a process runs: one that ended and that nobody waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_is_sent_arrives_in_order():
    large = "x" * 10**6
    assert call(functions.send_some, 1, large, None) == [1, large, None]


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (functions.exit_at_once, (3,), "its process ended with exit code 3"),
        (functions.kill_itself, (signal.SIGSEGV,), "its process was ended by SIGSEGV"),
        (functions.kill_itself, (signal.SIGKILL,), "its process was ended by SIGKILL, for lack of memory perhaps"),
        (functions.kill_itself, (signal.SIGRTMIN + 2,), f"its process was ended by signal {signal.SIGRTMIN + 2}"),
        (functions.abort_with_a_message, (), "ended by SIGABRT; it last printed: terminate called"),
        (functions.print_and_raise, (), "exit code 1; it last printed: RuntimeError: planted"),
    ],
)
def test_how_a_process_ended(capfd, function, arguments, reason):
    with pytest.raises(ProcessEndedError) as caught:
        call(function, *arguments)
    assert str(caught.value).endswith(reason)
    assert capfd.readouterr() == ("", "")


def test_what_was_sent_before_the_end_arrives():
    received = []
    with pytest.raises(ProcessEndedError):
        call(functions.exit_at_once, 1, receive=received.append)
    assert received == ["before"]


def test_a_hanging_process_is_killed_with_its_children():
    received = []
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="stopped after 2 s"):
        call(functions.hang_with_a_child, timeout_s=2, receive=received.append)
    assert time.monotonic() - started < 20
    assert_gone(*received[0])


def test_a_child_that_outlives_its_process_holds_nothing_up():
    with pytest.raises(ProcessEndedError, match="SIGKILL"):
        call(functions.leave_a_child_behind)


def test_ctrl_c_kills_the_process():
    pids = []

    def receive(found):
        pids.extend(found)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        call(functions.hang_with_a_child, receive=receive)
    assert_gone(*pids)


def test_a_process_ends_with_the_one_that_called_it():
    script = """
import process_functions as functions
from mtabench.processes import call_in_process
call_in_process(functions.hang_with_a_child, (), 60, lambda pids: print(*pids, flush=True))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as caller:
        process, child = map(int, caller.stdout.readline().split())
        caller.kill()
    assert_gone(process)
    os.kill(child, signal.SIGKILL)


def environment(folder):
    return os.environ | {"PYTHONPATH": str(folder)}


def test_a_module_runs_in_its_folder_with_its_words(tmp_path):
    (tmp_path / "prints.py").write_text(
        "import os, sys\nprint(__name__, sys.argv, os.getcwd())\nprint('last', file=sys.stderr)\nsys.exit(3)\n"
    )
    lines = []
    assert run_module("prints", ["--a", "b c"], tmp_path, environment(tmp_path), lines.append) == 3
    assert lines == [f"__main__ {[str(tmp_path / 'prints.py'), '--a', 'b c']} {tmp_path}", "last"]


def test_a_module_is_killed_with_the_process_that_waits_for_it(tmp_path):
    (tmp_path / "waits.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(1000)\n")
    script = (
        "import os; from pathlib import Path; from mtabench.processes import run_module\n"
        f"run_module('waits', [], Path({str(tmp_path)!r}), dict(os.environ), lambda line: print(line, flush=True))"
    )
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    waiting = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=paths, text=True)
    pid = int(waiting.stdout.readline())
    waiting.kill()
    waiting.wait(20)
    waiting.stdout.close()
    assert_gone(pid)


PROGRAM = """
import atexit, os, sys, types
from mtabench.processes import leave
class Dropped:
    def __del__(self):  # as a thread of autograd's may, while the interpreter ends
        os.abort()
dropped = Dropped()
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: {on_gpu}))
atexit.register(print, "last words")
print("first and", end=" ")
leave({code!r})
"""


@pytest.mark.parametrize("code", [0, 4, None])
def test_the_interpreter_of_a_process_that_used_a_gpu_does_not_end(code):
    def ended(on_gpu):
        program = PROGRAM.format(on_gpu=on_gpu, code=code)
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    done = ended(on_gpu=True)
    assert (done.returncode, done.stdout, done.stderr) == (code or 0, "first and last words\n", "")
    assert ended(on_gpu=False).returncode == -signal.SIGABRT  # what it is kept from
