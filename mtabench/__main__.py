"""`python -m mtabench` is `mtabench`. Ctrl-C is one sentence, or nothing: what commands need is imported later."""

import os
import signal

_can_stop = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _can_stop:  # until the imports below can say a sentence
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from importlib import import_module  # noqa: E402

from mtabench.exit_handling import run_and_exit  # noqa: E402

if _can_stop:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """Run the command line; an error that a person can act on is one sentence on standard error."""
    try:
        run_and_exit(lambda: import_module("mtabench.cli").command_line())
    except SystemExit as end:
        import_module("mtabench.processes").leave(end.code)


if __name__ == "__main__":
    main()
