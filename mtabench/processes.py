"""Call a function in a fresh process, so that a crash, a kill or a hang in it ends that process alone."""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, NoReturn

PR_SET_PDEATHSIG = 1
LOOK_AGAIN_S = 1.0
# Its first argument is the module; what the folder it starts in holds comes first, as with `python -m`.
RUN_MODULE = (
    "import ctypes, runpy, sys; "
    f"ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {signal.SIGKILL:d}); "
    "module = sys.argv.pop(1); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)
EXIT_S = 10.0  # what a process has to end once its function has returned, or once it is killed
LONGEST_QUOTE = 200


class ProcessEndedError(Exception):
    """A process ended by a signal, or with an exit code other than 0; the text says which."""


def call_in_process(
    function: Callable[..., None], arguments: tuple[Any, ...], timeout_s: float, receive: Callable[[Any], None]
) -> None:
    """Call `function(send, *arguments)` in a fresh process; what it sends is given to `receive` here, one by one.

    The function is found by its name in its module, and arguments and messages are pickled. Whatever happens, Ctrl-C
    here included, the process and those that it started are gone on return. Raises TimeoutError after `timeout_s`,
    in which the start of the process counts, and ProcessEndedError if the process ended in any other way than by
    returning from the function.
    """
    deadline = time.monotonic() + timeout_s
    receiver, sender = Pipe(duplex=False)
    with receiver, tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as output:
        pickle.dump((function, arguments), request)
        request.seek(0)
        with sender:
            process = start_process(f"{__name__}:serve", sender.fileno(), output, request)
        try:
            _receive_all(process, receiver, receive, deadline, timeout_s)
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_S)
        finally:
            kill(process)
        reason = ending(process.returncode)
        if reason:
            raise ProcessEndedError(reason + last_line(output))


def run_module(
    module: str, words: Sequence[str], folder: Path, environment: Mapping[str, str], receive: Callable[[str], None]
) -> int:
    """Run `python -m module words` in `folder`, by this interpreter; each line that it prints is given to `receive`.

    The exit code, below 0 for the signal that ended it. Whatever happens, Ctrl-C here included, the process is gone
    on return, and it is killed if this process is.
    """
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", RUN_MODULE, module, *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                receive(line.rstrip("\n"))
        return process.wait()
    finally:
        kill(process)


def in_threads(functions: Sequence[Callable[[Callable[[Any], None]], None]]) -> Iterator[Any]:
    """Call each function in a thread with a callable that takes its messages; the messages of all, as they come.

    Ctrl-C ends at once: the threads are daemons, and the processes that they wait for end with them.
    """
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    over = object()

    def call(function: Callable[[Callable[[Any], None]], None]) -> None:
        try:
            function(messages.put)
        finally:
            messages.put(over)

    for function in functions:
        threading.Thread(target=call, args=(function,), daemon=True).start()
    for _ in functions:
        yield from iter(messages.get, over)


def serve(descriptor: int) -> None:
    """In the fresh process: call what stands on standard input, with messages going to an open descriptor."""
    die_with_parent()
    function, arguments = pickle.load(sys.stdin.buffer)
    with Connection(descriptor, readable=False) as sender:
        function(sender.send, *arguments)


def leave(code: str | int | None) -> NoReturn:
    """End this process, with the exit code that `sys.exit` makes of `code`.

    While the interpreter ends, one of autograd's threads for a GPU may still drop a Python object, which aborts the
    process. So where PyTorch uses a GPU, the interpreter does not end: only what is registered for that is called.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or not isinstance(code, int | None):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


def start_process(
    serve: str, descriptor: int, output: IO[bytes], request: IO[bytes] | int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a process that calls `serve`, "module:function", with a descriptor that it inherits.

    A session of its own keeps Ctrl-C at the terminal from the process, and lets it be killed with its children.
    """
    module, _, function = serve.partition(":")
    code = f"from {module} import {function}; from {__name__} import leave; {function}({descriptor}); leave(0)"
    return _start_alike([code], output, stdin=request, pass_fds=[descriptor])


def start_module(module: str, words: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start `python -m module words`, which finds what this process finds and dies with it; what it prints goes to
    `output`.
    """
    return _start_alike([RUN_MODULE, module, *words], output, stdin=subprocess.DEVNULL)


def _start_alike(program: Sequence[str], output: IO[bytes], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-u", "-P", "-c", *program],
        stdout=output,
        stderr=output,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
        **options,
    )


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _receive_all(
    process: subprocess.Popen[bytes], receiver: Connection, receive: Callable[[Any], None], deadline: float,
    timeout_s: float,
) -> None:  # fmt: skip
    """Until the process has nothing more to send; that it is over is looked at too, since its children may live on."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"stopped after {timeout_s:g} s")
        over = process.poll() is not None
        if receiver.poll(0 if over else min(left, LOOK_AGAIN_S)):
            try:
                message = receiver.recv()
            except (EOFError, OSError):
                return
            receive(message)
        elif over:
            return


def kill(process: subprocess.Popen[Any]) -> None:
    """End a process that has a session of its own, and its children; returns when it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_S)


def ending(code: int | None) -> str:
    """How a process ended, in words; an empty text if it ended well."""
    if code is None:
        return "its process cannot be ended"
    if code >= 0:
        return f"its process ended with exit code {code}" if code else ""
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    return f"its process was ended by {name}" + (", for lack of memory perhaps" if name == "SIGKILL" else "")


def last_line(output: IO[bytes]) -> str:
    """What the process printed last, as an addition to a reason."""
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines()]
    last = next(filter(None, reversed(lines)), "")
    return f"; it last printed: {last[:LONGEST_QUOTE]}" if last else ""
