"""Texts that somebody else wrote, made safe for where they are shown; they come out as text and do nothing there."""

import html
import os
import re
from collections.abc import Iterable

# What GitHub turns into links, or into a message to somebody; it leaves code alone.
_LINKED = re.compile(r"://|www\.|@|#\d|:[a-z+-][\w+-]*:", re.IGNORECASE)
_MARKDOWN = re.compile(r"[\\`*_{}\[\]#|~!$]")
# Commands that GitHub's runner finds in a log: `::name` where a line starts, `##[name]` anywhere.
_COMMAND = re.compile(r"^\s*::|##(?=\[)", re.MULTILINE)


def printable(text: str) -> str:
    r"""The text with what a terminal obeys instead of showing made visible: ESC is `\x1b`, and so on.

    Unicode does not call these printable: control characters, marks that change the direction of writing, line
    separators, and every space but the plain one.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quoted(text: str) -> str:
    """A text from a file inside a sentence: in quotes, on one line, and not longer than a person reads."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def in_log(text: str) -> str:
    """Lines of output in which GitHub's runner finds no command; elsewhere they stay as they are."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return text
    return _COMMAND.sub(lambda match: f"{match[0][:-1]}\\x{ord(match[0][-1]):x}", text)


def in_markdown(text: str) -> str:
    """A text in a paragraph or a cell of a table of GitHub's Markdown, where it is neither markup nor a link."""
    linked = bool(_LINKED.search(text))
    text = html.escape(printable(text), quote=False)
    text = _MARKDOWN.sub(lambda match: f"\\{match[0]}", text)
    if not linked:
        return text
    # Links are found in the source and in the resulting text. Entities hide from the one, code from the other, and a
    # comment splits an address.
    for character in ":.":
        text = text.replace(character, f"&#{ord(character)};")
    text = text.replace("@", "@<!-- -->")
    return f"<code>{text}</code>"


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]], right: Iterable[bool]) -> list[str]:
    """The lines of a table in Markdown, of texts that are safe already; columns of numbers are those to the `right`."""
    marks = ["---:" if one else "---" for one in right]
    return [f"| {' | '.join(row)} |" for row in (header, marks, *rows)]
