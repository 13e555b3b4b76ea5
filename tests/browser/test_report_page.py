"""The page of `mtabench report` in a real browser: it draws, filters, sorts, and runs nothing that a file says."""

import pytest
from archived import archived
from hostile_cells import TEXTS, poison
from page_faults import looks, page_faults, tab_to
from written_runs import case, rounds, write_run

from mtabench.commands import report
from mtabench.palette import PAGE

PLAIN = {"taps": None}

pytestmark = pytest.mark.usefixtures("page")


def mixed_run(path):
    """Two convolutions; eager runs out of memory, compile fails, plain attention beside them; with samples."""
    cells = {}
    for conv in ((6, 11), (3, 3)):
        for step, seq in enumerate((1024, 2048, 4096)):
            shape = {"taps": conv}
            cells[case(seq, **shape)] = rounds(2.0**step) if seq < 4096 else ("oom", "out of memory: 26 GiB")
            cells[case(seq, "triton", **shape)] = rounds(0.1 * 2.0**step, seed=step)
            cells[case(seq, "compile", **shape)] = ("error", "RuntimeError: broke")
    for step, seq in enumerate((1024, 2048, 4096)):
        cells[case(seq, "sdpa-flash", **PLAIN)] = rounds(0.03 * 2.0**step, seed=step)
    return write_run(path, cells)


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """Pages by name: committed results without samples, a run with failures and samples, and a hostile one."""
    folder = tmp_path_factory.mktemp("reports")
    runs = {
        "h200": archived("history/fwd-23aa81e671e0.csv"),  # whose numbers the tests name; it has no samples
        "mixed": mixed_run(folder / "mixed.csv"),
        "hostile": poison(mixed_run(folder / "hostile.csv")),
    }
    pages = {name: folder / f"{name}.html" for name in runs}
    for name, run in runs.items():
        report.run(run, pages[name], False)
    return pages


@pytest.fixture
def opened(page, reports):
    """`opened(name)` opens a report from disk and waits until its charts are drawn."""

    def open_(name):
        page.goto(reports[name].as_uri())
        page.wait_for_selector("#time .chart svg [data-row]")
        return page

    return open_


def columns(page):
    return page.locator("#cells thead th").evaluate_all("all => all.map(one => one.textContent.trim())")


def values(page, column):
    number = columns(page).index(column) + 2  # the first cell holds the button for details
    return page.locator(f"#cells tbody tr:not(.detail) td:nth-child({number})").all_inner_texts()


def points(page, chart="time"):
    """How many cells each panel of a chart that can be seen has a point of."""
    return page.locator(f"#{chart} figure:visible").evaluate_all(
        """all => all.map(one => {
            const seen = [...one.querySelectorAll("[data-row]")].filter(point => point.checkVisibility());
            return new Set(seen.map(point => point.dataset.row)).size;
        })"""
    )


def test_charts_draw_every_timed_cell(opened):
    page = opened("h200")
    assert page.title() == "fwd-23aa81e671e0 on NVIDIA H200"
    assert points(page) == [30, 30]
    assert points(page, "speedup") == [30, 30]
    box = page.locator("#time .chart svg").first.bounding_box()
    assert box["width"] > 400
    assert box["height"] > 200


def test_three_large_figures_and_three_charts_stand_before_the_tables(opened):
    page = opened("h200")
    assert [figure.split("\n") for figure in page.locator("#figures div").all_inner_texts()] == [
        [
            "as long as plain attention by sdpa-cudnn: hopper, geometric mean of 10 shapes",
            "1.74\N{MULTIPLICATION SIGN} ± 0.55 %",
        ],
        ["as fast as eager: hopper, geometric mean of 10 shapes", "110\N{MULTIPLICATION SIGN} ± 0.53 %"],
        ["cells with a valid time; 7 did not settle", "60 of 60"],
    ]
    assert page.locator("#figures dd").evaluate_all(
        "all => all.every(one => parseFloat(getComputedStyle(one).fontSize) > 30)"
    )
    tops = [page.locator(name).bounding_box()["y"] for name in ("#figures", "#overhead", "#time", "#speedup", "#cells")]
    assert tops == sorted(tops)
    assert tops[1] < 500
    assert points(page, "overhead") == [30, 30]


def rgb(colour):
    return f"rgb({', '.join(str(part) for part in bytes.fromhex(colour[1:]))})"


def test_times_that_did_not_settle_are_hollow_and_marked(opened):
    page = opened("h200")
    assert sum(text.startswith("~") for text in values(page, "median ms")) == 7
    fills = page.locator("#time [data-row]").evaluate_all("all => all.map(one => getComputedStyle(one).fill)")
    assert fills.count(rgb(PAGE["paper"].light)) == 7
    page.locator("#cells p", has_text="median: ~ did not settle: the 95 % interval is wider").wait_for()


def test_a_choice_filters_tables_and_charts(opened):
    page = opened("h200")
    page.select_option("#filters select[name=impl]", "triton")
    page.select_option("#filters select[name=head_dim]", "128")
    assert set(values(page, "impl")) == {"triton"}
    assert page.locator("#cells [role=status]").inner_text() == "5 of 60 cells"
    assert points(page) == [5]
    assert page.locator("#time figcaption:visible").all_inner_texts() == ["head dim 128, convolution 6x11"]
    page.select_option("#filters select[name=impl]", "sdpa-flash")
    assert points(page) == []
    assert page.locator("#time").inner_text() == "No cell that the filters let through has one."


def test_headers_sort_both_ways_and_keep_empty_cells_last(opened):
    page = opened("mixed")
    header = page.locator("#cells thead th", has_text="median")
    header.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    medians = values(page, "median ms")
    timed = [float(text) for text in medians if text]
    assert timed == sorted(timed)
    assert medians[-8:] == [""] * 8
    header.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    assert values(page, "median ms")[: len(timed)] == sorted(
        (text for text in medians if text), key=float, reverse=True
    )
    assert page.locator("#cells [aria-sort]").count() == 1


def test_failures_are_words_and_a_list_and_no_mark_in_a_chart(opened):
    page = opened("mixed")
    words = page.locator("#time .caption").first.inner_text()
    assert "no valid time: eager at 4k (out of memory); compile everywhere (error)" in words
    assert points(page) == [8, 8]  # the times alone
    page.get_by_role("button", name="Details of compile").first.click()
    assert "RuntimeError: broke" in page.locator("#cells tr.detail").inner_text()


def test_details_show_the_row_and_a_command_to_copy(opened):
    page = opened("mixed")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Details of triton").first.click()
    detail = page.locator("#cells tr.detail")
    assert "ci95 high ms" in detail.inner_text()
    command = detail.locator("code").inner_text()
    assert command.startswith("mtabench fwd --impl triton --seq 1024")
    detail.get_by_role("button", name="Copy").click()
    detail.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == command


def test_hostile_texts_stay_text(opened):
    page = opened("hostile")
    for button in page.get_by_role("button", name="Details").all()[:3]:
        button.click()
    for text in TEXTS[:3]:
        assert page.get_by_text(text, exact=True).count()
    page.locator("#time [data-row]").first.hover(force=True)
    assert page.evaluate("document.querySelectorAll('main img, main a, main script, main iframe').length") == 0
    assert page.title().startswith("hostile")
    assert page.get_by_role("button", name="Copy").count() == 0  # no command of this file is one of ours
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_everything_can_be_done_with_the_keyboard(opened):
    page = opened("mixed")

    tab_to(page, "#filters select[name=impl]")
    page.keyboard.type("tri")
    assert set(values(page, "impl")) == {"triton"}
    tab_to(page, "#cells .table-scroll")
    tab_to(page, "#cells th button")
    page.keyboard.press("Enter")
    assert page.locator("#cells th").first.get_attribute("aria-sort") == "ascending"
    tab_to(page, "#cells .opener button")
    page.keyboard.press("Space")
    assert page.locator("#cells tr.detail").count() == 1


@pytest.mark.parametrize(("name", "width", "scheme"), [*looks("h200", "mixed"), ("hostile", 390, "light")])
def test_nothing_is_cut_pale_or_covered(page, opened, screenshot, name, width, scheme):
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    opened(name)
    page.get_by_role("button", name="Details").first.click()
    assert page_faults(page) == []
    screenshot(f"report-{name}-{width}-{scheme}")
