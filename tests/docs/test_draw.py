"""The pictures of the documentation are those that the scripts draw."""

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from benchmarks import plot

DOCS = Path(__file__).parents[2] / "docs"


def drawer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw", DOCS / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PICTURES = drawer().PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_the_one_that_is_drawn(name: str) -> None:
    text = PICTURES[name]()
    assert (DOCS / "assets" / f"how-{name}.svg").read_text() == text
    assert ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title") is not None


def test_every_picture_is_on_the_page_with_words_for_it() -> None:
    page = " ".join((DOCS / "how-it-works.md").read_text().split())
    for name in PICTURES:
        before = page.partition(f"](assets/how-{name}.svg)")[0]
        assert before != page
        assert len(before.rpartition("![")[2]) > 30


def test_pictures_of_the_benchmark_are_those_of_the_stored_rows(tmp_path: Path) -> None:
    assert plot.main(["--folder", str(tmp_path)]) == 0
    drawn = sorted(tmp_path.glob("*.svg"))
    assert drawn
    for picture in drawn:
        assert (DOCS / "assets" / picture.name).read_text() == picture.read_text(), picture.name
