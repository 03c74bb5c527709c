"""Five tasks of a new user, in a real browser."""

import json

import pytest

from pergrad.reports import write_report
from tests.reports.browser import browsing
from tests.reports.result_folders import clustered, doubted, write_folder

SEVENS = set(range(7, 120, 10))
SET = """
const [id, value] = arguments;
const element = document.getElementById(id);
element.value = value;
element.dispatchEvent(new Event("input", {bubbles: true}));
element.dispatchEvent(new Event("change", {bubbles: true}));
"""
SHOWN = """
return [...document.querySelectorAll("#explorer-rows tr[data-n]")].map(
    row => Number(row.querySelector("th").textContent.slice(1)));
"""
CLICK = "document.querySelector(arguments[0]).click()"
EXPORT = "return document.getElementById('export').value"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [doubted(tmp_path_factory.mktemp("audit"), settled=settled) for settled in (False, True)]


@pytest.fixture(params=[1280, 390], ids=["desktop", "phone"])
def opened(browser, folders, request):
    browser.open(write_report(folders[0]), width=request.param)
    yield browser
    assert browser.console() == []


def test_find_the_ten_most_doubtful_sevens_and_export_them(opened) -> None:
    opened.run(SET, "by-class", "7")
    opened.run(SET, "by-kind", "label")
    opened.run(SET, "sort", "doubt")
    ten = opened.run(SHOWN)[:10]
    assert len(ten) == 10
    assert set(ten) <= SEVENS
    for index in ten:
        opened.run(CLICK, f"input[aria-label='Select sample {index}']")
    assert {int(n) for n in opened.run(EXPORT).split(", ")} == set(ten)
    assert opened.run("return document.getElementById('chosen').textContent") == "10 selected"
    opened.run(SET, "export-as", "csv")
    lines = opened.run(EXPORT).splitlines()
    assert lines[0] == "index,label,suggested,confidence,loss"
    assert all(line.split(",")[1:3] == ['"7"', '"1"'] for line in lines[1:])
    opened.run(SET, "export-as", "subset")
    scope = {"dataset": list(range(400))}
    pytest.importorskip("torch")
    exec(opened.run(EXPORT), scope)
    assert len(scope["kept"]) == 390
    opened.run(SET, "export-as", "relabel")
    exec(opened.run(EXPORT), scope)
    assert scope["new_labels"] == dict.fromkeys(sorted(ten, key=ten.index), "1")
    changed = scope["Relabelled"]([(n, 7) for n in range(400)])
    assert [changed[ten[0]], changed[300], len(changed)] == [(ten[0], 1), (300, 7), 400]
    opened.run(CLICK, "#copy")
    opened.run(CLICK, "#download")


def test_see_why_one_is_doubted(opened) -> None:
    opened.run(SET, "search", "#17")
    opened.run(CLICK, "#explorer-rows th button")
    why = opened.run("return document.querySelector('.details').textContent")
    assert "the other samples would call it 1" in why
    assert "they give its own label" in why
    right = "return document.querySelector('.details ul').getBoundingClientRect().right"
    assert opened.run(right) <= opened.run("return document.documentElement.clientWidth")
    meaning = opened.run("return document.querySelector('.explorer abbr').title")
    assert "leave-one-out" in meaning


def test_find_a_group_of_duplicates(opened) -> None:
    opened.run(CLICK, "button[data-group='1']")
    assert set(opened.run(SHOWN)) == {199, 200, 201}
    opened.run(SET, "by-group", "")
    opened.run(SET, "by-kind", "duplicate")
    assert {199, 200, 201} <= set(opened.run(SHOWN))


def test_the_numbers_at_the_top_lead_to_their_samples(opened) -> None:
    opened.run(CLICK, "button[data-kind='duplicate']")
    assert set(opened.run(SHOWN)) == {199, 200, 201}
    assert opened.run("return document.getElementById('by-kind').value") == "duplicate"


@pytest.mark.parametrize("width", [1280, 390])
def test_what_is_selected_stays_in_sight_of_a_long_table(browser, folders, width) -> None:
    browser.open(write_report(folders[0]), width=width, motion="reduce")
    place = "return document.querySelector('.export').getBoundingClientRect().bottom"
    browser.run("document.getElementById('explorer').scrollIntoView()")
    assert browser.run(place) > 900
    browser.run(CLICK, "#explorer-rows input")
    browser.run("document.getElementById('explorer').scrollIntoView()")
    assert browser.run(place) <= 900
    for _ in range(12):  # the row that has the focus is above it
        browser.press("j", 74)
    row, above = browser.run("""
        return [document.activeElement.getBoundingClientRect().bottom,
            document.querySelector('.export').getBoundingClientRect().top]""")
    assert row <= above


def test_compare_two_audits_before_and_after_relabelling(browser, folders) -> None:
    before, after = folders
    browser.open(write_report(after, before=before))
    text = browser.run("return document.getElementById('comparison').innerText")
    assert "12 labels have changed between the two audits." in text
    assert "12 are settled" in text
    rows = browser.run(
        "return [...document.querySelectorAll('#comparison details tbody tr')].map(r => r.innerText)"
    )
    assert rows[0].split() == ["#7", "7", "1"]
    assert len(rows) == 12


def test_the_table_of_classes_says_which_labels_are_doubted_and_leads_there(opened) -> None:
    row = opened.run("return document.querySelector('#classes tbody tr').innerText").split()
    assert row[0] == "7"
    assert row[2] == "12"
    opened.run(CLICK, "button[data-class='7']")
    assert set(opened.run(SHOWN)) == SEVENS


def test_keys_search_move_tick_and_explain(opened) -> None:
    opened.press("/", 191)
    assert opened.run("return document.activeElement.id") == "search"
    opened.run("document.activeElement.blur()")
    for _ in range(2):
        opened.press("j", 74)
    second = opened.run(SHOWN)[1]
    assert (
        opened.run("return document.activeElement.querySelector('th').textContent") == f"#{second}"
    )
    opened.press("x", 88)
    assert opened.run(EXPORT) == str(second)
    opened.press("Enter", 13)
    assert opened.run("return document.querySelectorAll('.details').length") == 1


def test_scores_and_suggestions_filter_and_sort(opened) -> None:
    opened.run(SET, "by-suggested", "1")
    opened.run(SET, "least", "0.2")
    assert set(opened.run(SHOWN)) == SEVENS
    opened.run(SET, "least", "")
    opened.run(SET, "sort", "index")
    found = opened.run(SHOWN)
    assert found == sorted(found)


def test_without_labels_there_are_neither_empty_columns_nor_their_filters(
    browser, tmp_path
) -> None:
    browser.open(write_report(write_folder(tmp_path, clustered(40))), width=1280)
    heads = "return [...document.querySelectorAll('table.explorer thead th')]"
    shown = browser.run(f"{heads}.filter(th => th.offsetParent).map(th => th.textContent.trim())")
    assert shown == ["select", "preview", "sample", "norm", "loss", "group"]
    assert browser.run("return document.getElementById('by-class').offsetParent") is None
    assert browser.run("return document.getElementById('by-kind').offsetParent !== null")
    assert browser.console() == []


TURNED = "\u202eone"  # whatever follows it is shown from right to left
LONG = "a name of many words " * 6
NAMES = ["0", TURNED, "2", LONG, "4", "5", "6", "\u05e9\u05d1\u05e2", "8", "9"]
PLACES = """
const cell = document.querySelector("#explorer-rows tr[data-n] td:nth-child(5)");
const range = document.createRange();
range.selectNodeContents(cell.lastChild);
const [name, share, whole] = [cell.firstChild, range, cell].map(part => part.getBoundingClientRect());
return [name.right, share.left, share.right, whole.right, cell.lastChild.textContent, cell.firstChild.title];
"""


@pytest.mark.parametrize(("label", "name"), [("\u05e9\u05d1\u05e2", TURNED), (LONG, LONG)])
def test_names_of_any_direction_and_length_leave_their_probability_in_its_place(
    browser, tmp_path, label, name
) -> None:
    browser.open(write_report(doubted(tmp_path, names=NAMES)), width=1280)
    browser.run(SET, "by-class", label)
    *places, share, title = browser.run(PLACES)
    assert places == sorted(places)  # the name, then its probability, within the cell
    assert (share[0], share[-1], title) == (" ", "%", name)
    why = browser.run("return document.getElementById('samples').textContent")
    assert not any(TURNED[0] in words for words in json.loads(why)["why"][0])


def test_the_relabelling_script_takes_any_name_and_items_that_are_dicts(browser, tmp_path) -> None:
    browser.open(write_report(doubted(tmp_path, names=NAMES)), width=1280)
    browser.run(SET, "search", "#17")
    browser.run(CLICK, "input[aria-label='Select sample 17']")
    browser.run(SET, "export-as", "relabel")
    script = browser.run(EXPORT)
    assert TURNED[0] not in script
    pytest.importorskip("torch")
    scope = {}
    exec(script, scope)
    assert scope["new_labels"] == {17: TURNED}
    for given, expected in [(7, 1), ("seven", TURNED)]:
        items = [{"x": n, "label": given} for n in range(20)]
        changed = scope["Relabelled"](items, NAMES)
        assert [changed[17], changed[3]] == [{"x": 17, "label": expected}, items[3]]


def test_what_a_number_means_is_one_hover_away(opened) -> None:
    titles = "return [...document.querySelectorAll(arguments[0])].map(part => part.title)"
    for part in ("h1", "#classes thead abbr", "#first .numbers > div", ".explorer thead abbr"):
        found = opened.run(titles, part)
        assert found
        assert all(len(words) > 20 for words in found)
