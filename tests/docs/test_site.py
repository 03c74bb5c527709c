"""The site builds without a warning, loads nothing from elsewhere, and shows every public name."""

import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

import pergrad
from pergrad import audit, errors, testing
from tests.reports.browser import browsing

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
# What a browser fetches by itself, unlike the target of a link.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(LOADED.get(tag, ""))
        if address is not None:
            self.addresses.append(address)


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        loads = _Loads()
        loads.feed(page.read_text())
        assert loads.addresses
        outside = [a for a in loads.addresses if re.match(r"(https?:)?//", a)]
        assert not outside, f"{page}: {outside}"


def test_styles_load_nothing_from_elsewhere(site: Path) -> None:
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//|@import", sheet.read_text()), sheet


def test_search_finds_pages_from_a_folder(
    site: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = "return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
    ask = """
        const box = document.querySelector('.md-search__input');
        const toggle = document.querySelector('#__search');
        toggle.checked = true;
        toggle.dispatchEvent(new Event('change', {bubbles: true}));
        box.focus();
        box.value = 'glossary';
        box.dispatchEvent(new Event('keyup', {bubbles: true}));
    """
    with browsing(tmp_path_factory.mktemp("profile")) as browser:
        browser.open(site / "howto" / "clipping.html")
        browser.run(ask)
        until = time.monotonic() + 60
        while not browser.run(found) and time.monotonic() < until:
            time.sleep(0.1)
        assert any("glossary.html" in address for address in browser.run(found))
        assert browser.console() == []
        assert all(address.startswith("file:") for address in browser.requests())


def test_every_picture_of_the_benchmark_is_on_its_page() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    pictures = [
        p for kind in ("benchmark", "scaling") for p in (ROOT / "docs/assets").glob(f"{kind}*")
    ]
    assert pictures
    for picture in pictures:
        assert f"assets/{picture.name}" in page


def test_reference_has_every_public_name(site: Path) -> None:
    shown = {
        target
        for page in REFERENCE.glob("*.md")
        for target in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    }
    names = {target.rpartition(".")[2] for target in shown}
    modules = (pergrad, audit, errors, testing)
    wanted = {name for module in modules for name in module.__all__} - {"__version__"}
    assert wanted <= names
    rendered = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    for target in shown:
        assert f'id="{target}"' in rendered, target


def test_reference_shows_examples_as_code_and_inner_products_as_text(site: Path) -> None:
    quantities = (site / "reference" / "quantities.html").read_text()
    assert "<blockquote>" not in quantities
    assert "&lt;g_n, direction&gt;" in quantities
    assert quantities.count('<div class="highlight">') >= 9  # an example for each quantity
