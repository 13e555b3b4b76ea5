"""What commands print with --json: one document, of the same form whatever the command; docs/json.md has the fields."""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

VERSION = 1  # rises when a field goes or changes its meaning, and not when one is added


def print_json(command: str, data: Mapping[str, Any]) -> None:
    """Print the document of a command."""
    print(json.dumps({"version": VERSION, "command": command, "data": plain(data)}, indent=2, allow_nan=False))


@contextmanager
def others_to_stderr() -> Iterator[None]:
    """Within, what anything else prints goes to standard error, such as a person's kernel or its compiler."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def plain(value: Any) -> Any:
    """A value as JSON has it: null for a number that is not finite, since JSON has no NaN."""
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
