"""The command `mtabench ci init`: write workflows for GitHub Actions into a project."""

import json
import re
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import mtabench
from mtabench.comparing.pairs import SweepWords
from mtabench.comparing.revisions import branch_of, find_checkout
from mtabench.console import make_console, say
from mtabench.errors import UsageError
from mtabench.results.outputs import check_outputs, write_text

TEMPLATES = Path(mtabench.__file__).parent / "workflows"
WORKFLOWS = {
    "gate": "fails a pull request that makes a cell slower",
    "dashboard": "measures each commit of {branch}, and publishes the dashboard",
}
ACTION = re.compile(r"\./|[\w.-]+/[\w.-]+(/[\w./-]+)?@[\w./-]+")
WORD = re.compile(r"[\w./:,=+%@^*-]+")  # what a shell leaves as it is, and YAML in a block


def run(sweep: SweepWords, action: str | None, runner: str, overwrite: bool) -> int:
    """Write .github/workflows/mtabench-gate.yml and mtabench-dashboard.yml; raises UsageError, then neither is."""
    sweep.check()
    checkout = find_checkout(sweep.own_code)
    if Path.cwd().resolve() != checkout.root.resolve():
        raise UsageError(f"workflows start in {checkout.root}; type this there, with paths from there")
    words = " ".join(sweep.words)
    for word in sweep.words:
        if not WORD.fullmatch(word) or Path(word).is_absolute():
            raise UsageError(
                f"{word!r} cannot stand in a workflow; expected words without spaces, quotes or / in front"
            )
    labels = [label.strip() for label in runner.split(",")]
    if not all(re.fullmatch(r"[\w.-]+", label) for label in labels):
        raise UsageError(f"--runner {runner!r} has no labels of a runner; expected one such as self-hosted,linux,gpu")
    action = action or _origin()
    if not ACTION.fullmatch(action):
        raise UsageError(f"--action {action!r} is no action; expected one such as OWNER/mtabench@v0.1.0")
    branch = branch_of(checkout.root)
    filled = {"ACTION": action, "RUNNER": ", ".join(labels), "BRANCH": branch, "SWEEP": words}
    paths = {name: checkout.root / f".github/workflows/mtabench-{name}.yml" for name in WORKFLOWS}
    for path in paths.values():
        check_outputs({"--overwrite": path}, (), overwrite)
    console = make_console()
    for name, path in paths.items():
        text = (TEMPLATES / f"{name}.yml").read_text()
        write_text(path, re.sub("|".join(filled), lambda found: filled[found[0]], text))
        say(console, f"{path.relative_to(checkout.root)}: {WORKFLOWS[name].format(branch=branch)}")
    say(console, f"next: commit both, register a runner with the labels {filled['RUNNER']}, and choose")
    say(console, "      GitHub Actions as the source in the repository's settings of Pages: docs/ci.md")
    return 0


def _origin() -> str:
    """The action of the commit that was installed, if pip got it from an address of git; raises UsageError."""
    try:
        origin = json.loads(metadata.distribution("mtabench").read_text("direct_url.json") or "{}")
        path = urlsplit(origin["url"]).path.removesuffix(".git").strip("/")
        return f"{path}@{origin['vcs_info']['commit_id']}"
    except (metadata.PackageNotFoundError, KeyError):
        raise UsageError(
            "nothing says where the action is, since mtabench was not installed from a git address; give it, as "
            "--action OWNER/mtabench@v0.1.0"
        ) from None
