"""`python -m mtabench` is `mtabench`. Ctrl-C is one sentence from here on: what commands need is imported later."""

from importlib import import_module

from mtabench.ending import run_and_exit


def main() -> None:
    """Run the command line; an error that a person can act on is one sentence on standard error."""
    try:
        run_and_exit(lambda: import_module("mtabench.cli").command_line())
    except SystemExit as end:
        import_module("mtabench.processes").leave(end.code)


if __name__ == "__main__":
    main()
