"""Texts of strangers, made safe for terminals, logs, Markdown, LaTeX and spreadsheets."""

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtabench.escaping import in_log, in_markdown, printable

ANY = st.text(
    st.sampled_from("\\`*_{}[]<>#|~!$&@:./=+-()ab1 \t\n\x1b\u202e") | st.characters(exclude_categories=["Cs"])
)


def test_what_a_terminal_obeys_becomes_visible():
    assert printable("a é 中 b") == "a é 中 b"
    assert printable("\x1b[31m\x07\t\r\n\x9b\x00") == "\\x1b[31m\\x07\\t\\r\\n\\x9b\\x00"
    assert printable("\u202eabc\u2066\u200b\u2028\ufeff\U000e0041") == (
        "\\u202eabc\\u2066\\u200b\\u2028\\ufeff\\U000e0041"
    )


@pytest.mark.parametrize(
    ("line", "there"),
    [
        ("::error::x", ":\\x3aerror::x"),
        ("  ::add-mask::x", "  :\\x3aadd-mask::x"),
        ("a\n::error::x", "a\n:\\x3aerror::x"),
        ("a ##[error]x", "a #\\x23[error]x"),
        ("at::native::add", "at::native::add"),
        ("## heading", "## heading"),
    ],
)
def test_github_finds_no_command_in_a_log(monkeypatch, line, there):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert in_log(line) == there
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert in_log(line) == line


@given(ANY)
def test_markdown_has_no_markup_but_its_own(text):
    made = in_markdown(text)
    bare = re.sub(r"^<code>|</code>$|<!-- -->", "", made)
    assert not re.search(r"(?<!\\)(\\\\)*[`*_{}\[\]#|~!$](?!\d+;)", bare.replace("&#", "&"))
    assert not re.search(r"[<>]|://|www\.", bare)
    assert ("@" in made) == ("@<!-- -->" in made)
    shown = re.sub(r"\\([!-/:-@\[-`{-~])|(&#?\w+;)", lambda match: match[1] or html.unescape(match[2]), bare)
    assert shown == printable(text)


def test_markdown_that_needs_no_escape_stays_readable():
    text = "fwd triton bf16 batch 1 heads 16 seq 4096: -1.20 to +3.00 %, torch 2.11.0+cu130 (KV 4)"
    assert in_markdown(text) == text
    assert in_markdown("a|b_c") == "a\\|b\\_c"
    assert in_markdown("https://evil.example").startswith("<code>https&#58;//")
