"""What the tests of `mtabench.processes` call in fresh processes."""

import os
import signal
import subprocess
import sys
import time


def send_some(send, *values):
    for value in values:
        send(value)


def print_and_raise(send):
    print("nothing to see")
    raise RuntimeError("planted")


def exit_at_once(send, code):
    send("before")
    os._exit(code)


def kill_itself(send, number):
    os.kill(os.getpid(), number)


def abort_with_a_message(send):
    print("terminate called", file=sys.stderr, flush=True)
    os.abort()


def hang_with_a_child(send):
    child = subprocess.Popen(["sleep", "1000"])
    send((os.getpid(), child.pid))
    time.sleep(1000)


def leave_a_child_behind(send):
    send(os.getpid())
    if not os.fork():
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGKILL)
