"""One HTML file that holds everything it needs.

What comes from a results file travels as JSON and is put on the page by `textContent` alone. Should a hole be left
nevertheless, the Content-Security-Policy lets no script run but ours, known by their hashes, and no request leave.
"""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path

from mtabench.escaping import printable
from mtabench.palette import style_sheet

GENERATOR = '<meta name="generator" content="mtabench">'  # distinguishes our pages from a reader's own files
ASSETS = Path(__file__).parent / "assets"
MOST_CHARACTERS = 400  # of a text from a results file
# What a JSON text may hold that ends a script element, opens a comment in it, or ends a line of JavaScript.
ESCAPED = {character: f"\\u{ord(character):04x}" for character in "<>&\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}"}


def build_page(title: str, body: str, data: object, scripts: Sequence[str], styles: Sequence[str] = ()) -> str:
    """A whole page: `title` above `body`, light or dark as the system is.

    `title` is text and may come from anywhere. `body` is HTML of ours: nothing from a file belongs in it. `data` is
    what the page shows, in JSON's types without NaN; scripts read it by `pageData()`. `scripts` are the names of
    files in `assets/`, run in this order behind page.js. `styles` are style sheets in `assets/` that follow
    theme.css. Write the page as UTF-8 with "\\n" at the ends of lines: the hashes are of these bytes.

    Raises ValueError for a NaN or infinity in `data`.
    """
    ours = list(map(_asset, ("page.js", *scripts)))
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in ours]
    policy = "; ".join(
        (
            "default-src 'none'",
            "script-src " + " ".join(f"'sha256-{one}'" for one in hashes),
            "style-src 'unsafe-inline'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    name = html.escape(title)
    parts = (
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        GENERATOR,
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        '<link rel="icon" href="data:,">',
        f"<title>{name}</title>",
        *(f"<style>\n{sheet}</style>" for sheet in (style_sheet(), *map(_asset, ("theme.css", *styles)))),
        "</head>",
        "<body>",
        f"<header><h1>{name}</h1></header>",
        "<noscript><p>This page is drawn by the scripts inside it, and scripts are turned off.</p></noscript>",
        f"<main>\n{body.replace(' %', '&nbsp;%')}\n</main>",  # a number stays with its sign
        f'<script type="application/json" id="data">{embedded_json(data)}</script>',
        *map(_element, ours),
        "</body>",
        "</html>",
    )
    return "\n".join(parts) + "\n"


def embedded_json(data: object) -> str:
    """JSON that can stand in a script element, in ASCII. Raises ValueError for NaN and infinities."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character, escape in ESCAPED.items():
        text = text.replace(character, escape)
    return text


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _element(script: str) -> str:
    """A script in the page; none may hold what would end it early, for its hash would then be of another text."""
    if "</script" in script.lower() or "<!--" in script or "\r" in script:
        raise ValueError("a script for a page may hold neither </script nor <!-- nor a carriage return")
    return f"<script>{script}</script>"


def shown_text(value: object, most: int = MOST_CHARACTERS) -> str:
    """A text on one line, cut after `most` characters; what is not printable is made visible."""
    text = "" if value is None else str(value)
    clean = printable(" ".join(text[: most + 1].split()))
    return f"{clean[: most - 1]}…" if len(clean) > most else clean
