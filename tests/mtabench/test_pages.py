"""Pages hold everything they need, and what comes from a file can end no script and start none."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

import mtabench
from mtabench.pages.page import build_page, embedded_json, shown_text

HOSTILE = "</script><script>alert(1)</script><!--\N{LINE SEPARATOR}&amp;"


def script_elements(page):
    return re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)


def test_hostile_data_and_titles_end_no_element():
    page = build_page(f"<title>{HOSTILE}", "<p>ours</p>", {"text": HOSTILE}, ["table.js"])
    kinds = [attributes for attributes, _ in script_elements(page)]
    assert kinds == [' type="application/json" id="data"', "", ""]  # the data, page.js, table.js
    data = script_elements(page)[0][1]
    assert json.loads(data) == {"text": HOSTILE}
    assert data.isascii()
    assert not set(data) & set("<>&")
    assert "<script>alert" not in page


def test_the_policy_lets_run_the_scripts_of_the_page_and_no_other():
    page = build_page("t", "", {}, ["table.js"])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    scripts = [text for attributes, text in script_elements(page) if not attributes]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert f"script-src {allowed};" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe-eval" not in policy
    assert "http" not in policy


def test_data_without_a_json_form_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        embedded_json({"x": float("nan")})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (None, ""),
        ("two\nlines", "two lines"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\N{RIGHT-TO-LEFT OVERRIDE}b", "a\\u202eb"),
        ("x" * 10, "x" * 7 + "…"),
    ],
)
def test_texts_become_printable_and_bounded(text, shown):
    assert shown_text(text, most=8 if text and len(text) == 10 else 400) == shown


def test_colours_stand_in_the_palette_alone():
    """Beside it only implementations have colours of their own."""
    found = [
        path.name
        for path in Path(mtabench.__file__).parent.rglob("*")
        if path.suffix in (".py", ".css", ".js") and "implementations" not in path.parts
        if re.search(r"#[0-9a-fA-F]{3}([0-9a-fA-F]{3})?\b", path.read_text())
    ]
    assert set(found) <= {"palette.py", "style.py"}
