"""Revisions of a git checkout, each in a folder of its own, so that its code can be run as it was.

It is a checkout of this project, or one of another whose kernels stand in files that --impl names.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mtabench.environment import OWN_CODE
from mtabench.errors import MtabenchError, UsageError
from mtabench.git import git, has_changes
from mtabench.registry import is_reference, parse_reference

SUITE = Path("mtabench", "__main__.py")  # which only checkouts of this project have
SHORT = 12


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit by its whole hash, and its name as typed; `dirty` is the working tree on top of it."""

    sha: str
    name: str
    dirty: bool = False

    @property
    def words(self) -> str:
        """The revision for a person."""
        return f"{self.name} ({self.sha[:SHORT]}{', with uncommitted changes' if self.dirty else ''})"


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout: `files` are what each of its revisions must hold, relative to its root.

    `own` is whether it is of this project, so that each revision is measured by its own suite. Processes start in
    `start`, relative to the root, as a person's paths do.
    """

    root: Path
    own: bool = True
    files: tuple[Path, ...] = (SUITE,)
    start: Path = Path()


def find_checkout(typed: Sequence[str] = ()) -> Checkout:
    """The checkout that the current folder is in, given what --impl names besides names of ours; raises UsageError."""
    try:
        root = Path(git(Path.cwd(), "rev-parse", "--show-toplevel"))
    except MtabenchError as error:
        raise UsageError(
            f"{Path.cwd()} cannot be used as a git checkout ({error}); run this in a checkout of the project"
        ) from error
    own = (root / SUITE).exists()
    if not own and not typed:
        raise UsageError(
            f"{root} is the checkout of another project: it has no mtabench, so name its kernels, as "
            "--impl ./mine.py:attention; or run this in a checkout of mtabench"
        )
    files = tuple(_inside(root, text) for text in typed if is_reference(text))
    start = Path.cwd().resolve().relative_to(root.resolve()) if files else Path()
    return Checkout(root, own, ((SUITE,) if own else ()) + files, start)


def _inside(root: Path, typed: str) -> Path:
    """The path of a file that --impl names, relative to the checkout; raises UsageError for one outside."""
    path = parse_reference(typed).path
    whole = path.resolve()
    if path.is_absolute() or root.resolve() not in whole.parents:
        raise UsageError(
            f"--impl {typed} would be the same file for both revisions; expected a file of the checkout {root}, by its "
            "path from the current folder"
        )
    return whole.relative_to(root.resolve())


def resolve(root: Path, name: str, option: str) -> Revision:
    """The commit that a branch, tag or hash names; raises UsageError for one that is not there."""
    try:
        sha = git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except MtabenchError as error:
        raise UsageError(
            f"{option} {name!r} is no revision of {root}; give a branch, a tag or a commit that "
            "`git rev-parse` knows (a shallow clone has few: git fetch --unshallow)"
        ) from error
    return Revision(sha, name)


def past(root: Path, commits: str) -> list[tuple[Revision, datetime]]:
    """The commits of a range with their times in UTC, the newest first; commits of merged branches are left out.

    Raises UsageError for a range that has none.
    """
    words = ("log", "--first-parent", "--format=%H %ct", "--end-of-options", commits, "--")
    try:
        found = [line.split() for line in git(root, *words).splitlines()]
    except MtabenchError as error:
        raise UsageError(
            f"{commits!r} is no range of commits of {root} ({error}); give one as v1.0..main or HEAD~20.. "
            "(a shallow clone has few commits: git fetch --unshallow)"
        ) from error
    if not found:
        raise UsageError(f"{commits} has no commit; give the older one first, as v1.0..main or HEAD~20..")
    times = [(sha, datetime.fromtimestamp(int(seconds), UTC)) for sha, seconds in found]
    return [(Revision(sha, f"{time:%Y-%m-%d}"), time) for sha, time in times]


def branch_of(root: Path) -> str:
    """The branch that is checked out; raises UsageError if none is."""
    branch = git(root, "branch", "--show-current")
    if not branch:
        raise UsageError(f"{root} has no branch checked out; type git switch main")
    return branch


def working_tree(checkout: Checkout) -> Revision:
    """The checkout as it is now: HEAD, and whether its code differs from it."""
    head = resolve(checkout.root, "HEAD", "--head")
    code = (*OWN_CODE, *map(str, checkout.files)) if checkout.own else (".",)
    return Revision(head.sha, "the working tree", has_changes(checkout.root, code))


@contextmanager
def folders_of(checkout: Checkout, revisions: Mapping[str, Revision]) -> Iterator[dict[str, Path]]:
    """A worktree of each revision, by the given names, removed at the end however it comes.

    A dirty revision is the checkout itself. The others lie in folders whose paths are equally long if their names are.
    A path's length can change times (Mytkowicz et al., "Producing wrong data without doing anything obviously wrong!",
    ASPLOS 2009).
    """
    root = checkout.root
    with tempfile.TemporaryDirectory(prefix="mtabench-") as parent:
        folders = {name: root if found.dirty else Path(parent, name) for name, found in revisions.items()}
        parts: list[Path] = []
        try:
            for name, found in revisions.items():
                if not found.dirty:
                    git(root, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--quiet",
                         str(folders[name]), found.sha)  # fmt: skip
                    _add_submodules(root, folders[name], found, parts)
                for file in checkout.files:
                    if not (folders[name] / file).exists():
                        what = "mtabench" if file == SUITE else file
                        raise UsageError(f"{found.words} has no {what} in it; choose a later revision")
            yield folders
        finally:
            for folder in set(folders.values()) - {root}:
                if folder.exists():
                    git(root, "worktree", "remove", "--force", str(folder))
            for one in (root, *dict.fromkeys(parts)):
                git(one, "worktree", "prune")


def _add_submodules(root: Path, folder: Path, revision: Revision, parts: list[Path]) -> None:
    """Fill the submodules of a worktree from the checkout's, which `parts` gets; what the checkout lacks stays empty.

    Raises UsageError for a commit that the checkout's submodule does not have.
    """
    if not (folder / ".gitmodules").exists():
        return
    entries = [entry.partition("\t") for entry in git(folder, "ls-files", "--stage", "-z").split("\0")]
    for facts, _, path in (entry for entry in entries if entry[0].startswith("160000 ")):
        sha, there = facts.split()[1], root / path
        if not (there / ".git").exists():
            continue
        try:
            git(there, "cat-file", "-e", f"{sha}^{{commit}}")
        except MtabenchError:
            raise UsageError(
                f"{revision.words} has the submodule {path} at {sha[:SHORT]}, which is not here; type "
                f"git -C {there} fetch origin {sha}"
            ) from None
        parts.append(there)
        git(there, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--quiet", str(folder / path), sha)
        _add_submodules(there, folder / path, revision, parts)
