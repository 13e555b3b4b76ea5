"""A small repository with revisions of this project, and processes that write results without measuring."""

import subprocess
from pathlib import Path

from written_runs import rounds, write_run

from mtabench.environment import git_state

GIT = ("git", "-c", "user.name=A. Person", "-c", "user.email=person@example.org", "-c", "init.defaultBranch=main")


def git(folder, *words):
    return subprocess.run([*GIT, "-C", str(folder), *words], check=True, capture_output=True, text=True).stdout.strip()


def make_repository(folder, revisions=2):
    """A repository with a package called mtabench that has nothing in it, in so many commits."""
    git_folder = folder / "repository"
    (git_folder / "mtabench").mkdir(parents=True)
    (git_folder / "mtabench" / "__main__.py").touch()
    git(git_folder, "init", "--quiet")
    for number in range(revisions):
        (git_folder / "mtabench" / "code.py").write_text(f"revision = {number}\n")
        git(git_folder, "add", "--all")
        git(git_folder, "commit", "--quiet", "--message", f"revision {number}")
    return git_folder


class Processes:
    """Stands for `run_module`: each process writes at once what `results(folder, words, number)` says it measured.

    That is the cells and their samples or failures as `write_run` takes them, or an exit code and a last line.
    """

    def __init__(self, results):
        self.results, self.calls, self.code = results, [], 0

    def __call__(self, module, words, folder, environment, receive):
        assert module == "mtabench"
        assert environment["PYTHONPATH"].split(":")[:2] == [str(folder), f"{folder}/kernels"]
        self.calls.append((Path(folder), tuple(words)))
        found = self.results(Path(folder), words, len(self.calls))
        receive("[1/1] a cell")
        if isinstance(found, tuple):
            receive(found[1])
            return found[0]
        sha, dirty = git_state(Path(folder))
        out = Path(words[words.index("--out") + 1])
        number = f"{len(self.calls):03}"
        write_run(out, found, f"run{number}", f"2026-01-02T03:{number[:1]}{number[1:2]}:0{number[2:]}Z",
                  git_sha=sha, git_dirty=dirty)  # fmt: skip
        return self.code

    @property
    def sides(self):
        """Which side each process was of."""
        return [Path(words[words.index("--out") + 1]).name.rpartition("-")[0] for _, words in self.calls]


def process_rounds(ms, number, noise=0.002):
    """Samples of a process around `ms`, ten rounds of ten; its number decides the noise."""
    return rounds(ms, noise=noise, seed=number)
