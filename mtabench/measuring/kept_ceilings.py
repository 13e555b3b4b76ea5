"""Measured ceilings in `ceilings.json` beside the results, so that the rows of a folder refer to the same ones."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mta_kernels.code_cache import write_whole
from mtabench.errors import UsageError
from mtabench.git import make_folder
from mtabench.measuring.ceilings import Ceilings

FILE_NAME = "ceilings.json"
MOST_BYTES = 1 << 20  # an entry takes about 200
# What ceilings hold for; an entry is of one dtype besides.
PLACE = ("device", "driver", "torch")
RATES = ("copy_gbytes_s", "matmul_tflops", "read_gbytes_s")
LATER_RATES = ("read_gbytes_s",)  # files from before it was measured do not have it


def check_ceilings(path: Path) -> None:
    """Raise UsageError if there is a file that is not one of ceilings."""
    _entries(path)


def read_ceilings(path: Path, environment: Mapping[str, Any]) -> dict[str, Ceilings]:
    """By dtype what the file says of this device, driver and torch (as environment.describe names them).

    Nothing if there is no file. Raises UsageError for a file that is not one of ceilings.
    """
    return {entry["dtype"]: _ceilings(entry) for entry in _entries(path) if _place(entry) == _place(environment)}


def keep_ceilings(path: Path, environment: Mapping[str, Any], ceilings: Mapping[str, Ceilings]) -> None:
    """Put ceilings by dtype into the file, in the place of what it says of the same device, driver and torch.

    Raises UsageError if the file can't be written, or if it is not one of ceilings.
    """
    kept = [entry for entry in _entries(path) if _place(entry) != _place(environment) or entry["dtype"] not in ceilings]
    here = dict(zip(PLACE, _place(environment), strict=True))
    measured = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    for dtype, found in ceilings.items():
        rates = {name: float(f"{rate:.6g}") for name in RATES if (rate := getattr(found, name)) is not None}
        kept.append(here | {"dtype": dtype} | rates | {"measured_utc": measured})
    try:
        make_folder(path.parent)
        write_whole(path, (json.dumps(kept, indent=1) + "\n").encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another --out") from error


def _entries(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        if not path.is_file():
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES:,} bytes")
        entries = json.loads(text)
        for entry in entries:
            rates = [entry[name] for name in RATES if name not in LATER_RATES or name in entry]
            if not all(isinstance(rate, float) and 0 < rate < float("inf") for rate in rates):
                raise ValueError("a rate is not a positive number")
            (*_place(entry), entry["dtype"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"{path} is not a file of ceilings ({error}); give another, or if it was one remove it, "
            "and `mtabench env --measure` writes it anew"
        ) from error
    return entries


def _ceilings(entry: Mapping[str, Any]) -> Ceilings:
    return Ceilings(**{name: entry[name] for name in RATES if name in entry})


def _place(facts: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(facts[name] or "" for name in PLACE)  # a CPU has no driver
