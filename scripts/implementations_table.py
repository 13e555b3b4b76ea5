"""Write the table of docs/implementations.md anew, from what the implementations say of themselves."""

import re
from pathlib import Path

from mtabench.registry import markdown

PAGE = Path(__file__).parents[1] / "docs" / "implementations.md"

if __name__ == "__main__":
    PAGE.write_text(re.sub(r"(?:^\|.*\n)+", lambda _: markdown(), PAGE.read_text(), count=1, flags=re.MULTILINE))
