"""Call functions in a fresh process, so that a crash, a kill or a hang in one ends that process alone."""

import atexit
import ctypes
import math
import os
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
from types import MappingProxyType
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


class Process:
    """A fresh process that calls one function after another, until it is stopped.

    Functions are found by their names in their modules, and arguments and messages are pickled. The process has a
    session of its own, which keeps Ctrl-C at the terminal from it, and ends with the thread that started it.
    """

    def __init__(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """`environment` are variables that are others there."""
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-u", "-P", "-c"),
                    f"from {__name__} import leave, serve; serve({theirs.fileno()}); leave(0)",
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )

    def call(
        self,
        function: Callable[..., None],
        arguments: tuple[Any, ...],
        receive: Callable[[Any], None],
        timeout_s: float | None = None,
    ) -> None:
        """Call `function(send, *arguments)` there; `receive` gets here what it sends, one by one.

        Raises TimeoutError after `timeout_s`, which includes the start of the process. Raises ProcessEndedError if the
        process ended with another exit code than 0 before the function returned.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with suppress(BrokenPipeError):  # it ended before: the code below reports how
            self._pipe.send((function, arguments))
        while not isinstance(message := self._next(deadline, timeout_s), _Returned):
            receive(message)

    def _next(self, deadline: float, timeout_s: float | None) -> Any:
        """The next message; also checks that the process lives, since its children may outlive it."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"stopped after {timeout_s:g} s")
            over = self._process.poll() is not None
            if self._pipe.poll(0 if over else min(left, LOOK_AGAIN_S)):
                with suppress(EOFError, OSError):
                    return self._pipe.recv()
                over = True
            if over:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(EXIT_S)
                if reason := ending(self._process.returncode):
                    raise ProcessEndedError(reason + self._last_line())
                return _Returned()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def stop(self) -> None:
        """End the process and those that it started, whatever they do."""
        kill(self._process)

    def _last_line(self) -> str:
        """What the process printed last, as an addition to a reason."""
        self._output.seek(0)
        lines = [line.strip() for line in self._output.read().decode(errors="replace").splitlines()]
        last = next(filter(None, reversed(lines)), "")
        return f"; it last printed: {last[:LONGEST_QUOTE]}" if last else ""


class _Returned:
    """What a process sends when a function has returned."""


def call_in_process(
    function: Callable[..., None], arguments: tuple[Any, ...], timeout_s: float, receive: Callable[[Any], None]
) -> None:
    """Call a function in a process of its own, as `Process.call`, which is gone on return, Ctrl-C here included."""
    process = Process()
    try:
        process.call(function, arguments, receive, timeout_s)
    finally:
        process.stop()


def run_module(
    module: str, words: Sequence[str], folder: Path, environment: Mapping[str, str], receive: Callable[[str], None]
) -> int:
    """Run `python -m module words` in `folder`, by this interpreter; `receive` gets each line that it prints.

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
    """In the fresh process: call what comes from an open descriptor, to which messages go, until no more can come."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with Connection(descriptor) as pipe, suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            function(pipe.send, *arguments)
            pipe.send(_Returned())


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
