"""What git says of a checkout, whatever a hook exports and a person's configuration hides."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mtabench import RESULTS
from mtabench.errors import MtabenchError

# What a hook of git exports points at one repository, and would do so in every folder.
NOT_INHERITED = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_NAMESPACE", "GIT_SHALLOW_FILE", "GIT_GRAFT_FILE", "GIT_REPLACE_REF_BASE",
    "GIT_INTERNAL_SUPER_PREFIX", "GIT_QUARANTINE_PATH",
)  # fmt: skip
STATUS = (
    "-c", "core.fsmonitor=false", "status", "--porcelain", "-z", "--no-renames", "--untracked-files=all",
    "--ignore-submodules=none",
)  # fmt: skip
HEAD_BYTES = 2000
# How files that mtabench writes begin, or what their first lines hold: results, samples, ceilings, pages.
BEGINNINGS = (b"schema_version,run_id,", b"run_id,cell,round,sample,ms", b'{"schema_version":')
MARKS = (b'<meta name="generator" content="mtabench">', b'"matmul_tflops"')
SITE_MARKER = ".mtabench-dashboard"  # in the folder of a dashboard
MOST_FILES = 10_000  # of a checkout within the checkout


def clean_environment() -> dict[str, str]:
    """The environment without what would point git at one repository."""
    return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}


def git(folder: Path, *words: str, timeout_s: float | None = None) -> str:
    """What git prints; raises MtabenchError with its last words, and what they advise, if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            errors="replace",
            env=clean_environment() | {"LC_ALL": "C"},
            timeout=timeout_s,
        )
    except OSError as error:
        raise MtabenchError(f"git cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise MtabenchError(f"git takes longer than {timeout_s:g} s") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        if any("dubious ownership" in line for line in lines):
            raise MtabenchError(f"git trusts no checkout of another owner before you type: {lines[-1]}")
        last = lines[-1] if lines else f"git ended with exit code {done.returncode}"
        raise MtabenchError(last.removeprefix("fatal: "))
    return done.stdout.strip("\n")


def has_changes(root: Path, paths: Sequence[str] = (".",), timeout_s: float | None = None) -> bool:
    """Whether files of a checkout differ from its commit, but for what mtabench writes; raises MtabenchError."""
    entries = git(root, *STATUS, "--", *paths, timeout_s=timeout_s).split("\0")
    return any(not _is_output(root, Path(entry[3:])) for entry in entries if entry)


def make_folder(folder: Path, exist_ok: bool = True) -> None:
    """Make a folder; the folder of results without a name of their own hides its content from git.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=exist_ok)
    for one in (folder, *folder.parents):
        if one.name == RESULTS and not (one / ".gitignore").exists():
            (one / ".gitignore").write_text("# Written by mtabench.\n*\n", encoding="utf-8")


def _is_output(root: Path, path: Path) -> bool:
    """Whether a path in a checkout is of a file that mtabench wrote, or of a checkout that holds such files alone."""
    whole = root / path
    if RESULTS in path.parts:
        return True
    if not whole.is_dir():
        return _was_written(whole)
    found = 0
    for folder, folders, names in os.walk(whole):
        folders[:] = [name for name in folders if name != ".git"]
        found += len(names)
        if found > MOST_FILES or not all(_was_written(Path(folder, name)) for name in names if name != ".git"):
            return False
    return bool(found)


def _was_written(file: Path) -> bool:
    """Whether mtabench wrote a file, by its head; of charts, locks and dashboards, by what lies beside them."""
    if (file.parent / SITE_MARKER).exists():
        return True
    if file.parent.name.endswith("-charts"):
        beside = file.parent.with_name(f"{file.parent.name.removesuffix('-charts')}.csv")
        return file.suffix in (".png", ".svg") and _begins_as_ours(beside)
    if file.name.startswith(".") and file.suffix in (".lock", ".part"):
        name = file.name[1:].removesuffix(file.suffix)
        return _begins_as_ours(file.with_name(name)) or _begins_as_ours(file.with_name(Path(name).stem))
    return _begins_as_ours(file)


def _begins_as_ours(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            head = opened.read(HEAD_BYTES)
    except OSError:
        return False
    return head.removeprefix(b"\xef\xbb\xbf").startswith(BEGINNINGS) or any(mark in head for mark in MARKS)
