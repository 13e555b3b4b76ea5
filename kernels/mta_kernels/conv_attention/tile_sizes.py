"""Which tile sizes a kernel takes: those measured best for its shape on this GPU, or else its own first guess.

`choice` looks up here in the same way which backend is the fastest.
Nothing is measured here (`tuner` does that, when asked): a call looks up what two files say that a process reads once,
the user's and the one in this package. Both are JSON, one file a model of GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from mta_kernels.code_cache import cache_folder, write_whole
from mta_kernels.gpu_limits import device_name

FORMAT = 1
SHIPPED = Path(__file__).parent / "tuned"

Config = TypeVar("Config")


class Key(NamedTuple):
    """What the best tiles depend on, made by `of`.

    `seq_len`, the number of keys (in decode: the capacity of the cache), is a power of two, and so is `sequences`,
    batch times KV heads. That and `group`, the query heads of a KV head, are for decode alone, and 0 elsewhere.
    """

    dtype: torch.dtype
    head_dim: int
    query_taps: int
    key_taps: int
    causal: bool
    seq_len: int
    group: int = 0
    sequences: int = 0

    @classmethod
    def of(
        cls, dtype: torch.dtype, head_dim: int, taps: Sequence[int], causal: bool, seq_len: int,
        group: int = 0, sequences: int = 0,
    ) -> Key:  # fmt: skip
        """The key of any sequence length and number of sequences, both rounded down; `taps` are query and key taps."""
        tuned_for = _power_of_two(seq_len), group, _power_of_two(sequences)
        return cls(dtype, head_dim, taps[0], taps[1], causal, *tuned_for)


KEY_TYPES = (torch.dtype, int, int, int, bool, int, int, int)


@dataclass(frozen=True)
class Entry:
    """The fields of the best config of a kernel for a key, and how that was found: times, shape, version of Triton."""

    kernel: str
    key: Key
    config: dict[str, Any]
    measured: dict[str, Any]


generation = 0  # how often `reload` was called: whoever remembers a choice asks whether it still is
_chosen: dict[tuple[str, Key, torch.device], tuple[Sequence[Any], Any]] = {}


def best_config(kernel: str, key: Key, candidates: Sequence[Config], device: torch.device) -> Config:
    """The config of `kernel` tuned for `key`, if it is among `candidates`, which all fit the GPU; else the first one.

    Among entries that agree in all but the length, the nearest power of two counts, the longer of two as near; then
    those made with this version of Triton come before others, and the user's before the shipped ones.
    `device` is a tensor's. Quickest where `candidates` holds the same objects as in the last such call: cache it.
    """
    known = _chosen.get((kernel, key, device))
    if known is not None and known[0] == candidates:
        return known[1]
    config, _ = look_up(kernel, key, candidates, device_name(device))
    _chosen[kernel, key, device] = candidates, config
    return config


def reload() -> None:
    """Read the files again at the next call: after they or the environment changed."""
    global generation
    generation += 1
    _chosen.clear()
    _tuned.cache_clear()
    files_in_effect.cache_clear()


@functools.cache
def triton_version() -> str:
    """The version of Triton installed, an empty text if it is not."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def user_file(device: str) -> Path:
    """Where tuning saves what it finds for a model of GPU: in `cache_folder`."""
    return cache_folder() / _file_name(device)


def shipped_file(device: str) -> Path:
    """The file of this package for a model of GPU, whether there is one or not."""
    return SHIPPED / _file_name(device)


@functools.cache
def files_in_effect(device: str) -> dict[Path, list[Entry]]:
    """The entries of the user's and of the shipped file for a model of GPU, of those that there are, in this order.

    A file that cannot be read is left out, with a warning that names it.
    """
    found = {}
    for path in (user_file(device), shipped_file(device)):
        try:
            found[path] = read_entries(path, device)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            warnings.warn(f"{path} is ignored: {error}", RuntimeWarning, stacklevel=2)
    return found


def read_entries(path: Path, device: str) -> list[Entry]:
    """The entries of a file for that model of GPU; raises OSError, or ValueError if it holds anything else."""
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT or content["device"] != device:
            raise ValueError(f"it has format {content['format']} for {content['device']}")
        return [_entry(record) for record in content["entries"]]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"it does not hold tuned tile sizes of {device} in format {FORMAT} ({type(error).__name__}: {error})"
        ) from None


def save(entries: Iterable[Entry], device: str, path: Path | None = None) -> Path:
    """Add entries to the file at `path`, the user's if None, in place of those of equal kernels and keys; its path.

    Any number of processes may do so at once. What cannot be read there is moved out of the way, to `NAME.old`.
    """
    path = path or user_file(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        try:
            before = read_entries(path, device)
        except FileNotFoundError:
            before = []
        except ValueError:
            before = []
            path.replace(path.with_name(f"{path.name}.old"))
        latest = {(entry.kernel, entry.key): entry for entry in (*before, *entries)}
        write_whole(path, _text(device, latest.values()).encode())
    reload()
    return path


def look_up(kernel: str, key: Key, candidates: Sequence[Config], device: str) -> tuple[Config, Entry | None]:
    """What `best_config` chooses on a GPU of that name, there or not, and the entry that says so."""
    tuned = _tuned(device).get((kernel, key._replace(seq_len=0)), []) if device else []

    def rank(entry: Entry) -> tuple[int, int, bool]:
        length = entry.key.seq_len
        distance = abs(length.bit_length() - key.seq_len.bit_length())
        return distance, -length, entry.measured.get("triton") != triton_version()

    for entry in sorted(tuned, key=rank):
        for config in candidates:
            if asdict(config) == entry.config:  # type: ignore[call-overload]
                return config, entry
    return candidates[0], None


@functools.cache
def _tuned(device: str) -> dict[tuple[str, Key], list[Entry]]:
    """Entries by kernel and all of the key but the length, the user's first."""
    found: dict[tuple[str, Key], list[Entry]] = {}
    for entries in files_in_effect(device).values():
        for entry in entries:
            found.setdefault((entry.kernel, entry.key._replace(seq_len=0)), []).append(entry)
    return found


def _entry(record: dict[str, Any]) -> Entry:
    fields = {name: record[name] for name in Key._fields if name in record}
    key = Key(**fields | {"dtype": getattr(torch, record["dtype"])})
    if tuple(map(type, key)) != KEY_TYPES or not isinstance(record["kernel"], str):
        raise ValueError(f"an entry is for {record['kernel']!r}, {key}")
    return Entry(record["kernel"], key, dict(record["config"]), dict(record["measured"]))


def _text(device: str, entries: Iterable[Entry]) -> str:
    """A file's content: a line an entry, sorted, so that two of them can be compared."""
    lines = []
    for entry in sorted(entries, key=lambda entry: (entry.kernel, str(entry.key.dtype), entry.key[1:])):
        key = {name: value for name, value in entry.key._asdict().items() if name not in Key._field_defaults or value}
        key["dtype"] = str(entry.key.dtype).removeprefix("torch.")
        lines.append(json.dumps({"kernel": entry.kernel, **key, "config": entry.config, "measured": entry.measured}))
    body = ",\n".join(f"    {line}" for line in lines)
    return f'{{\n  "format": {FORMAT},\n  "device": {json.dumps(device)},\n  "entries": [\n{body}\n  ]\n}}\n'


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The right to write `path`: a lock on a file beside it, which its holder removes at the end."""
    side_file = path.with_name(f".{path.name}.lock")
    while True:
        with side_file.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:  # else its last holder removed it meanwhile
                try:
                    yield
                finally:
                    side_file.unlink()
                return


def _power_of_two(number: int) -> int:
    """`number` rounded down; 0 stays."""
    return 1 << number.bit_length() >> 1


def _file_name(device: str) -> str:
    return f"{'-'.join(re.findall('[a-z0-9]+', device.lower()))}.json"
