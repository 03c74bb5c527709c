"""The report as a file: what is in it, that it is whole, and that nothing in it can do harm."""

import errno
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pergrad.errors import InterruptedAuditError, PergradError
from pergrad.reports import write_report
from tests.reports.edge_cases import CASES, HOSTILE, duplicates, hostile
from tests.reports.result_folders import clustered, write_folder

VOID = {"meta", "link", "img", "input", "br", "rect", "line", "path"}
LABELS = [("zero", "one", "two", "three")[n % 4] for n in range(300)]


class Page(HTMLParser):
    """Tags with their attributes, the text, and whether every tag is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attributes) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data) -> None:
        if not self._open or self._open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(folder) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES)
def test_every_case_gives_a_page_that_is_well_formed_and_loads_nothing(folder_of, case) -> None:
    page = page_of(folder_of(case))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href"):
            address = attributes.get(name, "data:")
            assert address.startswith(("data:", "#")), (tag, address)
            if address.startswith("#") and tag == "a":
                assert address[1:] in ids
    assert "nan" not in re.findall(r"[a-z]+", page.text.lower())


@pytest.mark.parametrize("case", CASES)
def test_every_picture_and_chart_is_told_in_words(folder_of, case) -> None:
    page = page_of(folder_of(case))
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    charts = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert all(picture["alt"] for picture in pictures)
    assert all("aria-labelledby" in chart or chart.get("aria-hidden") == "true" for chart in charts)
    assert sum("aria-labelledby" in chart for chart in charts) == 2


def test_whatever_comes_from_the_audit_is_escaped(tmp_path) -> None:
    page = page_of(hostile(tmp_path))
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert [script.get("type") for script in scripts] == ["application/json", None]
    assert not any(attributes.get("src") == "x" for _, attributes in page.tags)
    assert HOSTILE in page.text
    assert "49" not in page.text.split(HOSTILE)[0]


def test_a_policy_forbids_all_but_what_is_within(tmp_path) -> None:
    page = page_of(write_folder(tmp_path, clustered()))
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert re.search(r"script-src 'sha256-[\w+/]+={0,2}'", policy)


def test_the_page_says_what_was_found_and_how(tmp_path) -> None:
    folder = write_folder(
        tmp_path, clustered(), labels=LABELS, known_wrong=range(15), notes=["a remark"]
    )
    text = page_of(folder).text
    for words in (
        "Look first at 7 of 300 samples.",
        "labelled",
        "Push against it",
        "Compared with the samples known to be wrong",
        "All 15 samples known to be wrong are among the 10% ranked highest",
        "holds",
        "The gradient noise suggests batches of about",
        "9f2c1ab34e77d0c1",
        "51d0b7e29a3c8846",
        "5,797 samples per second",
        "pergrad audit my_project.train:audit_spec",
        "a remark",
    ):
        assert words in text


def test_parts_that_are_not_known_are_left_out(tmp_path) -> None:
    folder = write_folder(tmp_path, clustered())
    (folder / "pushes.parquet").unlink()
    text = page_of(folder).text
    assert "Compared with the samples known to be wrong" not in text
    assert "Push against it" not in text
    assert "no picture of sample" in text


def test_a_report_made_again_is_the_same(tmp_path) -> None:
    folder = write_folder(tmp_path, clustered(), labels=LABELS)
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


def test_a_report_that_cannot_be_written_leaves_the_last_one(tmp_path, monkeypatch) -> None:
    folder = write_folder(tmp_path, clustered())
    before = write_report(folder).read_bytes()

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_space)
    with pytest.raises(InterruptedAuditError, match=r"report\.html"):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == before
    assert not [p.name for p in folder.iterdir() if "unfinished" in p.name]


def test_a_folder_without_an_audit_gets_no_report(tmp_path) -> None:
    with pytest.raises(PergradError, match="holds no finished audit"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_pictures_do_not_make_the_page_heavy(tmp_path) -> None:
    """Random noise of 400 × 300 is as hard to compress as it gets: 80 MB as it is."""
    assert write_report(duplicates(tmp_path)).stat().st_size < 4e6
