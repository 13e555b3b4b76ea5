"""The report as Markdown: what the page says, for where a page cannot be opened."""

from __future__ import annotations

from mtabench.escaping import in_markdown
from mtabench.prose import plural
from mtabench.report.data import Report, command_of
from mtabench.results.result_view import markdown_of

MARK = "<!-- mtabench report -->"  # tells our files from a reader's own
MOST_CELLS = 1000  # GitHub shows files of up to 512 KB


def markdown(report: Report) -> str:
    """The whole text. Nothing from the file is markup or a link in it."""
    lines = [MARK, "", f"# {in_markdown(report.title)}", ""]
    for one in report.figures:
        lines.append(f"- **{one.value}** {one.interval} {in_markdown(one.words)}".replace("**  ", "** "))
    lines += [f"- {in_markdown(sentence)}" for sentence in (*report.summary, *report.notes)]
    if len(report.rows) > MOST_CELLS:
        lines += ["", f"The table has the first {MOST_CELLS:,} of {len(report.rows):,} cells; the summary is of all."]
    lines += ["", "## Cells", "", markdown_of(report.view, MOST_CELLS)]
    commands = list(filter(None, map(command_of, report.rows[:MOST_CELLS])))
    if commands:  # of few characters (see data.COMMAND), so that a fence holds them
        lines += ["## Measure again", "", "<details>", f"<summary>{plural(len(commands), 'command')}</summary>", ""]
        lines += ["```", *commands, "```", "", "</details>", ""]
    return "\n".join(lines).rstrip() + "\n"
