"""The report in a real browser: nothing breaks, nothing is loaded, all of it can be read and reached."""

from itertools import pairwise
from pathlib import Path

import pytest

from pergrad.reports import write_report
from tests.reports.browser import browsing
from tests.reports.edge_cases import CASES, photo
from tests.reports.result_folders import clustered, write_folder

WIDTHS = {"desktop": 1280, "phone": 390}
CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
OPEN_ALL = "document.querySelectorAll('details').forEach(d => { d.open = true; })"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    labels = [("zero", "one", "two", "three")[n % 4] for n in range(300)]
    folder = write_folder(
        tmp_path_factory.mktemp("results"),
        clustered(),
        labels=labels,
        show=photo,
        known_wrong=range(15),
    )
    return write_report(folder)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_the_page_logs_nothing_and_asks_for_nothing(browser, page, width, scheme) -> None:
    browser.open(page, width=width, scheme=scheme)
    browser.run(OPEN_ALL)
    assert browser.console() == []
    assert browser.requests() == [page.as_uri()]
    broken = "return [...document.images].filter(i => !i.complete || !i.naturalWidth).length"
    assert browser.run(broken) == 0


@pytest.mark.parametrize("case", CASES)
def test_no_page_is_wider_than_the_screen(browser, folder_of, case) -> None:
    report = write_report(folder_of(case))
    for width in (320, 390, 768, 1280):
        browser.open(report, width=width)
        browser.run(OPEN_ALL)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.console() == []
        assert browser.run("return document.title").endswith("pergrad audit")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_all_text_and_all_marks_have_enough_contrast(browser, page, width, scheme) -> None:
    """WCAG AA: 4.5 for text, 3 for large text and for the parts of charts."""
    browser.open(page, width=width, scheme=scheme)
    browser.run(OPEN_ALL)
    measured = browser.run(CONTRAST)
    assert len(measured["found"]) > 300
    poor = [
        text for text in measured["found"] if text["contrast"] < (3 if text["isLarge"] else 4.5)
    ]
    assert poor == []
    assert {shape["shape"] for shape in measured["shapes"]} == {"bar", "rug", "axis", "part"}
    assert [shape for shape in measured["shapes"] if shape["contrast"] < 3] == []


def background(browser) -> str:
    return browser.run("return getComputedStyle(document.body).backgroundColor")


def test_the_theme_is_that_of_the_system_until_the_button_changes_it(browser, page) -> None:
    browser.open(page, scheme="light")
    browser.run("localStorage.clear()")
    light = background(browser)
    browser.open(page, scheme="dark")
    dark = background(browser)
    assert light != dark
    button = "return document.getElementById('theme')"
    assert browser.run(f"{button}.textContent") == "Light"
    browser.run(f"{button}.click()")
    assert background(browser) == light
    assert browser.run(f"{button}.textContent") == "Dark"
    browser.open(page, scheme="dark")
    assert background(browser) == light
    browser.run("localStorage.clear()")


def test_the_keyboard_reaches_everything_in_order_and_shows_where_it_is(browser, page) -> None:
    browser.open(page)
    expected = browser.run("""
        const kinds = "a[href], button, summary, input, select, textarea, [tabindex='0']";
        const found = [...document.querySelectorAll(kinds)];
        return found.filter(e => e.checkVisibility() && !e.disabled)
            .map((e, n) => { e.dataset.n = n; return n; });
    """)
    reached = []
    for _ in expected:
        browser.press("Tab", 9)
        at = browser.run("""
            const e = document.activeElement, style = getComputedStyle(e), box = e.getBoundingClientRect();
            return [Number(e.dataset.n), style.outlineStyle, parseFloat(style.outlineWidth), box.left];
        """)
        reached.append(at[0])
        assert at[1] == "solid"
        assert at[2] >= 2
        assert at[3] >= 0  # also the link to skip, which lies outside until it has the focus
    assert reached == expected
    assert len(expected) > 20


def test_enter_changes_the_theme_and_opens_what_is_folded(browser, page) -> None:
    browser.open(page)
    before = background(browser)
    browser.run("document.getElementById('theme').focus()")
    browser.press("Enter", 13)
    assert background(browser) != before
    browser.run("localStorage.clear(); document.querySelector('summary').focus()")
    browser.press("Enter", 13)
    assert browser.run("return document.querySelector('details').open")


def test_the_page_has_landmarks_and_headings_in_order(browser, page) -> None:
    browser.open(page)
    for landmark in ("header", "nav[aria-label]", "main", "footer", "h1"):
        assert browser.run(f"return document.querySelectorAll('{landmark}').length") == 1
    headings = (
        "return [...document.querySelectorAll('h1, h2, h3, h4')].map(h => Number(h.tagName[1]))"
    )
    levels = browser.run(headings)
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert browser.run("return document.documentElement.lang") == "en"
    assert browser.run("return [...document.querySelectorAll('th')].every(t => t.scope)")
    assert browser.run(
        "return [...document.querySelectorAll('tbody tr')].every(r => r.querySelector('th'))"
    )


def test_letters_in_charts_stay_readable_on_a_phone(browser, page) -> None:
    browser.open(page, width=390)
    sizes = browser.run("""
        return [...document.querySelectorAll(".chart")].map(c =>
            parseFloat(getComputedStyle(c.querySelector("text")).fontSize)
            * c.getBoundingClientRect().width / c.viewBox.baseVal.width);
    """)
    assert len(sizes) == 2
    assert min(sizes) >= 10


def test_who_asks_for_less_motion_gets_none(browser, page) -> None:
    scrolling = "return getComputedStyle(document.documentElement).scrollBehavior"
    browser.open(page)
    assert browser.run(scrolling) == "smooth"
    browser.open(page, motion="reduce")
    assert browser.run(scrolling) == "auto"


def test_links_within_the_page_stay_there_in_the_frame_of_a_notebook(
    browser, page, tmp_path
) -> None:
    inner = page.read_text().replace("&", "&amp;").replace('"', "&quot;")
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f'<!doctype html><iframe srcdoc="{inner}" height="720"></iframe>')
    browser.open(notebook)
    frame = "const d = document.querySelector('iframe').contentDocument;"
    for link in ("nav a[href='#how']", ".skip", ".tiles a"):
        browser.run(f"{frame} d.querySelector(arguments[0]).click()", link)
        assert browser.run(f"{frame} return d.querySelectorAll('#explorer').length") == 1
    folded = browser.run(f"""{frame}
        const link = d.querySelector("nav a");
        link.setAttribute("href", "#" + d.querySelector("#first details .card").id);
        link.click();
        return !d.querySelector("#first details").open;""")
    assert not folded
    assert browser.requests() == [notebook.as_uri()]
    assert browser.console() == []


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_nothing_covers_or_cuts_what_is_beside_it(browser, page, width) -> None:
    """The parts of a card lie beside or below each other."""
    browser.open(page, width=width)
    overlapping = browser.run("""
        const named = "img, h3, .others-say, .why, .numbers, h4";
        const parts = [...document.querySelector(".card").querySelectorAll(named)];
        const boxes = parts.map(p => p.getBoundingClientRect());
        const apart = (a, b) => a.right < b.left + 1 || a.bottom < b.top + 1;
        const meet = (a, b) => !apart(a, b) && !apart(b, a);
        return boxes.flatMap((a, n) => boxes.slice(n + 1).filter(b => meet(a, b))).length;
    """)
    assert overlapping == 0
