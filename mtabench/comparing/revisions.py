"""Revisions of a checkout of this project, each in a folder of its own, so that its code can be run as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mtabench.errors import MtabenchError, UsageError

# What a hook of git sets points at one repository, and would do so in every folder.
NOT_INHERITED = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")
CODE = ("mtabench", "kernels", "pyproject.toml")
SHORT = 12


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit by its whole hash, and what it was asked for as; `dirty` is the working tree on top of it."""

    sha: str
    name: str
    dirty: bool = False

    @property
    def words(self) -> str:
        """The revision for a person."""
        return f"{self.name} ({self.sha[:SHORT]}{', with uncommitted changes' if self.dirty else ''})"


def find_checkout() -> Path:
    """The root of the checkout of this project that the current folder is in; raises UsageError."""
    try:
        root = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel"))
    except MtabenchError as error:
        raise UsageError(
            f"{Path.cwd()} cannot be used as a git checkout ({error}); run this in a checkout of the project"
        ) from error
    if not (root / "mtabench" / "__main__.py").exists():
        raise UsageError(f"{root} is the checkout of another project: it has no mtabench; run this in one that has")
    return root


def resolve(root: Path, name: str, option: str) -> Revision:
    """The commit that a branch, tag or hash names; raises UsageError for one that is not there."""
    try:
        sha = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except MtabenchError as error:
        raise UsageError(
            f"{option} {name!r} is no revision of {root}; give a branch, a tag or a commit that "
            "`git rev-parse` knows (a shallow clone has few: git fetch --unshallow)"
        ) from error
    return Revision(sha, name)


def working_tree(root: Path) -> Revision:
    """The checkout as it is now: HEAD, and whether its code differs from it."""
    head = resolve(root, "HEAD", "--head")
    return Revision(head.sha, "the working tree", bool(_git(root, "status", "--porcelain", "--", *CODE)))


@contextmanager
def folders_of(root: Path, revisions: Mapping[str, Revision]) -> Iterator[dict[str, Path]]:
    """A worktree of each revision, by the given names, removed at the end however it comes, SIGTERM included.

    A dirty revision is the checkout itself. The others lie in folders whose paths are as long as each other if their
    names are: a path's length is known to move what is timed (Mytkowicz et al., "Producing wrong data without doing
    anything obviously wrong!", ASPLOS 2009).
    """
    with _terminated_as_exit(), tempfile.TemporaryDirectory(prefix="mtabench-") as parent:
        folders = {name: root if found.dirty else Path(parent, name) for name, found in revisions.items()}
        try:
            for name, found in revisions.items():
                if not found.dirty:
                    _git(root, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--quiet",
                         str(folders[name]), found.sha)  # fmt: skip
                if not (folders[name] / "mtabench" / "__main__.py").exists():
                    raise UsageError(f"{found.words} has no mtabench in it; choose a later revision")
            yield folders
        finally:
            for folder in set(folders.values()) - {root}:
                if folder.exists():
                    _git(root, "worktree", "remove", "--force", str(folder))
            _git(root, "worktree", "prune")


def clean_environment() -> dict[str, str]:
    """The environment without what would point git at one repository."""
    return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}


def _git(folder: Path, *words: str) -> str:
    """What git prints; raises MtabenchError with its last words if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            errors="replace",
            env=clean_environment() | {"LC_ALL": "C"},
        )
    except OSError as error:
        raise MtabenchError(f"git cannot be run: {error.strerror}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"git ended with exit code {done.returncode}"]
        raise MtabenchError(lines[-1].removeprefix("fatal: "))
    return done.stdout.strip()


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """What cleans up on the way out does so after SIGTERM and SIGHUP as well."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
