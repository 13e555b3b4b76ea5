"""The page of `mtabench dashboard` in a real browser: what got slower stands first, and a link restores a view."""

import math
from collections import Counter
from pathlib import Path

import pytest
from hostile_cells import TEXTS, poison
from page_faults import looks, page_faults, tab_to
from simulated_histories import a_year, columns, row, sha, stepped, write, write_histories

from mtabench.commands import dashboard
from mtabench.dashboard.data import DashboardSettings, dashboard_data, site_files, write_site
from mtabench.dashboard.findings import find
from mtabench.dashboard.histories import Archive, Collector

RESULTS = Path(__file__).parents[2] / "results"
REPOSITORY = "https://github.com/owner/name"
LARGE = (200, 500)  # runs, cells
SECONDS_TO_OPEN = 2.0

pytestmark = pytest.mark.usefixtures("page")


def build(results, out, title="Performance history"):
    dashboard.run(results, out, REPOSITORY, title, "2%", 30)
    return out / "index.html"


@pytest.fixture(scope="session")
def dashboards(tmp_path_factory):
    """Pages by name: a year of made-up runs, the committed results, and a hostile one."""
    folder = tmp_path_factory.mktemp("dashboards")
    for run in range(2):
        rows = [row(run, 1.0 + run / 10, seq=f"{n}") for n in range(1, 21)]
        poison(write(folder / f"hostile/{run}.csv", rows))
    plain = {"op": "attention", "impl": "sdpa-flash", "conv_q": "", "conv_k": ""}
    alike = [({"seq": "1024"}, [1.0, 1.1]), ({"seq": "1024", **plain}, [1.0, 1.1])]
    alike += [({"seq": "2048"}, [1.0, 0.9]), ({"seq": "2048", **plain}, [1.0, 0.9])]
    other = [({"seq": "4096"}, [1.0, 1.2]), ({"seq": "4096", **plain}, [1.0, 1.0])]
    machine = write_histories(folder / "machine", alike + other)
    return {
        "machine": build(machine, folder / "machine-site"),
        "year": build(a_year(folder / "year"), folder / "year-site"),
        "hostile": build(folder / "hostile", folder / "hostile-site", title=TEXTS[1]),
    }


@pytest.fixture
def opened(page, dashboards):
    """`opened(name, hash)` opens a dashboard from disk and waits until its chart is drawn."""

    def open_(name, view=""):
        page.goto(dashboards[name].as_uri() + view)
        drawn(page)
        return page

    return open_


def drawn(page):
    page.wait_for_selector("#chosen-chart svg .point")


def labels(page):
    """Of the cells shown."""
    return page.locator("#cells-table tbody td:first-child button").all_inner_texts()


def shown(page):
    return page.locator("#cells-table [role=status]").inner_text()


def chosen(page):
    return page.locator("#chosen-title").inner_text()


def go(page, views):
    """So many views on in the history of the page, once it has heard of it: `page.go_back` returns before that."""
    page.evaluate(
        """views => new Promise(done => {
            addEventListener("popstate", () => setTimeout(done), {once: true});
            history.go(views);
        })""",
        views,
    )


def choose(page, label):
    page.locator("#cells-table").get_by_role("button", name=label, exact=True).click()
    drawn(page)


def open_runs(page):
    """The rows of the table of a cell's runs, once they are there: the page makes them later than the click."""
    page.locator("#chosen-runs summary").click()
    rows = page.locator("#chosen-runs tbody tr")
    rows.first.wait_for()
    return rows


def test_the_first_screen_says_what_got_slower_when_and_by_which_commit(opened):
    page = opened("year")
    verdict = page.locator("#verdict").inner_text()
    assert verdict.startswith("15 cells got slower, 1 cell fails that did not before, 1 cell got faster")
    first = page.locator("#slower-list tbody tr").first
    assert "+5.9 %" in first.inner_text()
    assert "1 Feb 2026" in first.inner_text()
    assert "14 cells: 8 bwd triton, 6 fwd triton" in first.inner_text()
    link = first.get_by_role("link")
    assert link.inner_text() == f"{sha(30)[:7]}..{sha(31)[:7]}"
    assert link.get_attribute("href") == f"{REPOSITORY}/compare/{sha(30)}...{sha(31)}"
    assert first.bounding_box()["y"] < 400
    assert page.locator("#chosen-chart svg").bounding_box()["y"] < 500


def test_the_chart_draws_every_run_and_marks_the_change(opened):
    page = opened("year")
    choose(page, "fwd triton 2048 d64")
    assert page.locator("#chosen-chart .point").count() == page.locator("#chosen-chart .met").count() == 40
    texts = page.locator("#chosen-chart svg text").all_text_contents()
    assert any(text.startswith("+6.9") or text.startswith("+7") for text in texts)
    box = page.locator("#chosen-chart svg").bounding_box()
    assert box["width"] > 300
    assert box["height"] > 200
    page.locator("#chosen-chart .met").last.hover(force=True)
    tooltip = page.locator("#tooltip").inner_text()
    assert sha(39) in tooltip
    assert "2026-02-09" in tooltip


def test_filters_filter(opened):
    page = opened("year")
    page.select_option("#cells-table select[name=impl]", "triton")
    page.select_option("#cells-table select[name=head_dim]", "128")
    page.select_option("#cells-table select[name=state]", "slower")
    assert shown(page) == "7 of 29 cells"
    assert set(labels(page)) == {
        *(f"fwd triton {seq} d128" for seq in (2048, 4096, 8192)),
        *(f"bwd triton {seq} d128" for seq in (1024, 2048, 4096, 8192)),
    }
    page.fill("#cells-table input[name=find]", "bwd triton 4096")
    assert labels(page) == ["bwd triton 4096 d128"]


def test_a_link_shows_a_cell_and_each_choice_is_a_step_back(opened, page, browser):
    opened("year")
    first = chosen(page)
    choose(page, "fwd eager 1024 d64")
    choose(page, "bwd triton 8192 d64")
    other = browser.new_page()
    other.goto(page.url)
    drawn(other)
    assert chosen(other) == "bwd triton 8192 d64"
    other.close()
    for views, expected in ((-1, "fwd eager 1024 d64"), (-1, first), (1, "fwd eager 1024 d64")):
        go(page, views)
        assert chosen(page) == expected


def test_what_no_commit_explains_is_folded_below_what_one_may(opened):
    page = opened("machine")
    assert page.locator("#verdict").inner_text().startswith("1 cell maybe slower, 4 cells changed with no commit")
    first = page.locator("#slower-list tbody tr").first
    assert "+20.0 %" in first.inner_text()
    # One word and no red for one cell that is not sure.
    assert first.locator(".number span").get_attribute("class") == "warn"
    assert page.locator("#cells-table td .warn").all_inner_texts() == ["+20.0 %", "maybe slower"]
    assert chosen(page) == "fwd triton 4096"
    folded = page.locator("#slower-list details")
    assert folded.locator("summary").inner_text() == ("1 change to slower, probably the machine: no commit explains it")
    assert folded.locator("tbody tr").count() == 0
    folded.locator("summary").click()
    assert "plain attention changed alike" in folded.locator("tbody tr").first.inner_text()
    assert folded.locator("tbody .number span").first.get_attribute("class") == "quiet"
    assert page.locator("#faster-list p").first.inner_text() == "Nothing got faster that a commit may explain."
    page.locator("#cells-table").get_by_role("button", name="fwd triton 1024", exact=True).click()
    drawn(page)
    assert page.locator("#chosen-changes span").first.get_attribute("class") == "quiet"
    assert "no commit explains it" in page.locator("#chosen-changes").inner_text()


def test_hostile_texts_stay_text(opened):
    page = opened("hostile")
    assert page.locator("h1").inner_text() == TEXTS[1]
    assert TEXTS[0] in page.locator("main").inner_text()
    page.locator("#slower-list").get_by_role("button", name="Details").first.click()
    page.locator("#cells-table button.cell").first.click()
    open_runs(page)
    drawn(page)
    page.locator("#chosen-chart .met").last.hover(force=True)
    assert page.evaluate("document.querySelectorAll('main img, main script, main iframe, main svg a').length") == 0
    links = page.locator("main a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
    ours = ("data.json", "badge.json")
    assert all(link in ours or link.startswith(f"{REPOSITORY}/co") for link in links)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_everything_can_be_done_with_the_keyboard(opened):
    page = opened("year")

    tab_to(page, "#slower-list .opener button")
    page.keyboard.press("Enter")
    tab_to(page, "#slower-list tr.detail button.cell")
    page.keyboard.press("Space")
    assert chosen(page) == page.evaluate("document.activeElement.textContent")
    tab_to(page, "#cells-table select[name=impl]")
    page.keyboard.type("ea")
    assert shown(page) == "8 of 29 cells"
    tab_to(page, "#cells-table button.cell")
    page.keyboard.press("Enter")
    assert chosen(page) == "fwd eager 1024 d64"


@pytest.mark.parametrize(("name", "width", "scheme"), looks("year", "machine", "hostile"))
def test_nothing_is_cut_pale_or_covered(page, opened, screenshot, name, width, scheme):
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    opened(name)
    page.locator("#slower-list").get_by_role("button", name="Details").first.click()
    for folded in page.locator("main details:not(#chosen-runs) > summary").all():
        folded.click()
    open_runs(page)
    assert page_faults(page) == []
    screenshot(f"dashboard-{name}-{width}-{scheme}")


def large_archive():
    """Many runs of many cells, as if read from files; a tenth of the cells got slower in the twentieth run from the
    last."""
    runs, cells = LARGE
    shapes, times = [], []
    for number in range(cells):
        shape = {"seq": f"{1024 * 2 ** (number % 5)}", "head_dim": f"{64 * (1 + number // 5 % 2)}"}
        shape |= {"conv_q": f"{1 + number // 10 % 10}", "pass": ("fwd", "bwd")[number // 100 % 2]}
        shapes.append(shape | {"impl": f"impl-{number // 200}"})
        times.append(stepped(runs, runs - 20, 0.06 if number % 10 == 0 else 0.0, 1 + number / 100, seed=number))
    collector = Collector()
    for run in range(runs):
        rows = [row(run, one[run], **shape) for shape, one in zip(shapes, times, strict=True)]
        collector.add(columns(rows), f"run-{run}.csv")
    return Archive(*collector.histories(), runs, collector.rows, 0, Counter(), [])


@pytest.mark.slow
def test_a_large_history_opens_quickly(page, tmp_path):
    """From navigation to the drawn chart; the best of five counts, for the machine may be busy."""
    archive = large_archive()
    findings = find(archive.runs, archive.histories, 0.02, 30)
    settings = DashboardSettings("Performance history", 0.02, 30, REPOSITORY, "2026-08-01T00:00:00Z")
    write_site(tmp_path, site_files(dashboard_data(archive, findings, settings)))
    index = tmp_path / "index.html"
    assert index.stat().st_size < 6e6
    seconds = []
    while len(seconds) < 5 and min(seconds, default=math.inf) > SECONDS_TO_OPEN:
        page.goto(index.as_uri())
        page.wait_for_function("performance.getEntriesByName('data-ready').length")
        seconds.append(page.evaluate("performance.getEntriesByName('data-ready')[0].startTime") / 1000)
    assert min(seconds) < SECONDS_TO_OPEN
    assert page.locator("#verdict").inner_text().startswith("50 cells got slower")
    page.fill("#cells-table input[name=find]", "impl-2 16384")
    assert shown(page) == "20 of 500 cells"
