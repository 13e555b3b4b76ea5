"""A real headless browser for our pages. A page that logs an error or asks for more than itself fails its test."""

import os
import shutil
from pathlib import Path

import pytest

SCREENSHOTS = Path(__file__).parents[2] / ".artifacts" / "screenshots"
QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
OWN = ("file:", "data:", "blob:")


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium without a window's own pages, which take most of the time; one for all tests of a worker."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    chromium = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if not chromium:
        pytest.skip("there is no Chromium on this machine (apt-get install chromium-headless-shell)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """An empty page of 1280 x 900 with light colours. What it complains about fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(60_000)  # a slow machine is no fault of a page
    complaints = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda sent: None if sent.url.startswith(OWN) else complaints.append(f"request: {sent.url}"))
    yield page
    context.close()
    assert not complaints


@pytest.fixture
def screenshot(page):
    """`screenshot(name)` keeps the whole page as .artifacts/screenshots/name.png, for people to look at."""
    from playwright.sync_api import TimeoutError as TooLongError

    def take(name):
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        partial = SCREENSHOTS / f"{name}.{os.getpid()}.png"
        try:
            page.screenshot(path=partial, full_page=True, timeout=20_000)
        except TooLongError:  # rarely Chromium takes none, however long one waits, and the next one at once
            page.screenshot(path=partial, full_page=True)
        partial.replace(SCREENSHOTS / f"{name}.png")

    return take
