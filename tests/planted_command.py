"""`mtabench` whose sweeps measure nothing: each writes at once what TEMPLATES has for the `MS = ...` of mine.py."""

import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from mtabench.environment import git_state


def measure(module, words, folder, environment, receive):
    """Stands for `run_module`."""
    ms = re.search(r"^MS = (.+)$", Path(folder, "mine.py").read_text(), re.M)[1]
    sha, dirty = git_state(Path(folder))
    number = time.time_ns()
    out = Path(words[words.index("--out") + 1])
    out.parent.mkdir(parents=True, exist_ok=True)
    facts = {"RUN": f"run{number}", "COMMIT": sha, "DIRTY": f"{dirty}".lower(), "eager": "mine:attention"}
    facts["2026-01-02T03:04:05Z"] = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"
    template = sorted(Path(os.environ["TEMPLATES"]).glob(f"{ms}-?.csv"))[number % 4]
    for suffix in (".csv", ".samples.csv"):
        text = template.with_suffix(suffix).read_text()
        out.with_suffix(suffix).write_text(re.sub("|".join(facts), lambda found: facts[found[0]], text))
    return 0


def plan(words, checkout=None):
    """Stands for SweepWords.plan."""
    return SimpleNamespace(cases=[None], options=SimpleNamespace(pass_="fwd"))


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    if name == "fwd":
        sys.exit(measure("mtabench", words, Path.cwd(), {}, print))
    if name in ("ab", "history"):
        from mtabench.comparing import pairs

        pairs.run_module, pairs.SweepWords.plan, pairs.announce = measure, plan, lambda *_: None
    from mtabench.cli import main

    main()
