import json

from pergrad.reports.explorer import classes_of, groups_of, payload, script_safe
from pergrad.reports.reading import read_results
from tests.reports.edge_cases import not_finite, single
from tests.reports.result_folders import doubted


def test_the_payload_has_each_sample_once_in_order_of_rank(tmp_path) -> None:
    found = payload(read_results(doubted(tmp_path)))
    assert sorted(found["index"]) == list(range(400))
    assert found["rank"][:400] == list(range(1, 401))
    assert all(
        len(found[name]) == 400 for name in ("label", "suggested", "doubt", "kinds", "group")
    )
    assert {
        n for n, kinds in zip(found["index"], found["kinds"], strict=True) if "label" in kinds
    } == set(range(7, 120, 10))


def test_numbers_that_are_not_finite_are_null(tmp_path) -> None:
    found = payload(read_results(not_finite(tmp_path)))
    assert None in found["loss"]
    json.loads(script_safe(found))


def test_classes_say_towards_which_class_their_labels_are_doubted(tmp_path) -> None:
    (first, *others) = classes_of(read_results(doubted(tmp_path)))
    assert (first["name"], first["doubted"], first["towards"]) == ("7", 12, [("1", 12)])
    assert all(row["doubted"] == 0 for row in others)
    assert classes_of(read_results(single(tmp_path / "single"))) == []


def test_groups_have_their_members_and_say_whether_labels_differ(tmp_path) -> None:
    (group,) = groups_of(read_results(doubted(tmp_path)))
    assert (group["members"], group["differ"], group["left_out"]) == ([199, 200, 201], False, 0)
