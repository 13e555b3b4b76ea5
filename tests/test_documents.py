"""Links in documents lead somewhere, and decisions have their parts and stand in their index."""

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path for place in (".", "docs/**", "kernels/**", "results/**", "tests/**") for path in ROOT.glob(f"{place}/*.md")
)
DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


@functools.cache
def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_nowhere(page: Path) -> list[str]:
    """Links of a page to no file, or to no heading of one."""
    lost = []
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    return lost


def test_links_lead_somewhere():
    assert len(PAGES) > 50
    assert [lost for page in PAGES for lost in leads_nowhere(page)] == []


def test_files_that_contributing_names_exist():
    named = set(re.findall(r"`((?:\w+/)+[\w.]+\.\w+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    missing = {path for path in named if not ((ROOT / path).exists() or (ROOT / "kernels/mta_kernels" / path).exists())}
    assert missing == {"mtabench/charts/kinds/NAME.py", "mtabench/implementations/NAME.py"}


def test_a_decision_has_its_parts():
    for page in DECISIONS:
        title, blank, date, *_ = text = page.read_text().splitlines()
        assert title.startswith("# "), page
        assert blank == "", page
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date), page
        parts = [found[1] for line in text if (found := re.match(r"\*\*(\w+)", line))]
        assert parts == ["Decision", "Why", "Cost"], page


def test_the_index_has_every_decision_and_numbers_are_used_once():
    index = (ROOT / "docs/decisions/README.md").read_text()
    lines = re.findall(r"^- \[(\d{3}) (.*)\]\((.*)\)$", index, re.MULTILINE)
    assert sorted(lines) == [(page.name[:3], page.read_text().splitlines()[0][2:], page.name) for page in DECISIONS]
    assert len({page.name[:3] for page in DECISIONS}) == len(DECISIONS)


def test_a_number_that_sources_name_is_a_decision_or_says_where_it_is_now():
    table = (ROOT / "docs/decisions/README.md").read_text().partition("## Earlier numbers")[2]
    known = {page.name[:3] for page in DECISIONS} | set(re.findall(r"\d{3}", table))
    named = re.compile(r"(?:[Dd]ecisions?|docs/decisions/)[ /]*((?:\d{2,3}(?:, | and )?)+)")
    sources = [path for place in ("kernels", "mtabench", "tests", "docs") for path in (ROOT / place).rglob("*.*")]
    texts = [path.read_text() for path in sources if path.suffix in (".py", ".cu", ".cuh", ".md")]
    numbers = {
        number.zfill(3) for text in texts for found in named.findall(text) for number in re.findall(r"\d+", found)
    }
    assert len(numbers) > 10
    assert numbers <= known
