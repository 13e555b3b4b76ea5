"""The GitHub workflows: commands and files that exist, few rights, and nothing of a fork on our own runner.

Without PyYAML what can be read line by line is still checked; the test requirements have it.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEXTS = {path.stem: path.read_text() for path in WORKFLOWS}
PAGE = (ROOT / "docs/ci.md").read_text()


def commands(text):
    """What the steps run, a line each."""
    return re.findall(r"^\s+run: (.+)$", text, re.MULTILINE)


def test_there_are_tests_and_a_gate():
    assert set(TEXTS) == {"test", "gate"}
    assert commands(TEXTS["test"])
    assert sum(" ab " in command for command in commands(TEXTS["gate"])) == 3


@pytest.mark.parametrize("name", TEXTS)
def test_commands_are_sound_shell_and_their_files_exist(name):
    for command in commands(TEXTS[name]):
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), command
        for word in shlex.split(command):
            if re.fullmatch(r"(\./)?(scripts|results)/\S+", word):
                assert (ROOT / word).exists(), word


@pytest.mark.parametrize("text", [*TEXTS.values(), PAGE], ids=[*TEXTS, "docs/ci.md"])
def test_commands_of_the_suite_exist_with_their_options(text):
    import typer

    from mtabench.cli import app

    known = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in typer.main.get_command(app).commands.items()
    }
    used = re.findall(r"\bmtabench (ab|noise|inspect|compare|fwd|bwd|decode)\b([^`\n]*)", text)
    assert used or "mtabench" not in text
    for command, words in used:
        taken = known[command].union(*(known[word] for word in words.split() if word in known))
        for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", words):
            assert option in taken | {"--help"}, f"mtabench {command} {words}"


@pytest.mark.parametrize("name", TEXTS)
def test_rights_are_few_and_actions_are_githubs_own(name):
    text = TEXTS[name]
    assert re.findall(r"^permissions:\n((?:  .*\n)+)", text, re.MULTILINE) == ["  contents: read\n"]
    assert text.count("permissions:") == 1
    assert "pull_request_target" not in text
    assert "secrets" not in re.sub(r"#.*", "", text)
    actions = re.findall(r"uses: (.+)", text)
    assert actions
    for action in actions:
        assert re.fullmatch(r"actions/(checkout|setup-python|upload-artifact)@v\d+", action)
    assert text.count("actions/checkout@") == text.count("persist-credentials: false")
    assert text.count("runs-on:") == text.count("timeout-minutes:")


def test_code_of_forks_and_names_of_branches_do_nothing_on_our_runner():
    gate = TEXTS["gate"]
    assert "github.event.pull_request.head.repo.full_name == github.repository" in gate
    for command in commands(gate):
        assert "${{" not in command, "text from outside would be run by the shell"


def test_the_page_names_what_the_workflows_do():
    for words in ("gate.yml", "test.yml", "mtabench ab", "mtabench inspect --baseline", "JUnit", "self-hosted"):
        assert words in PAGE


@pytest.mark.parametrize("name", TEXTS)
def test_the_workflows_are_yaml_as_github_reads_it(name):
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(TEXTS[name])
    assert {"name", "permissions", "concurrency", "jobs"} <= set(workflow)
    assert True in workflow  # the key `on`, which YAML 1.1 takes for a yes
    ran = []
    for job in workflow["jobs"].values():
        assert {"runs-on", "steps", "timeout-minutes"} <= set(job)
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            ran += [step["run"]] if "run" in step else []
    assert ran == commands(TEXTS[name])
