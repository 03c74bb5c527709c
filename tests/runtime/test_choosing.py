from pergrad.runtime.choosing import NEVER, Chooser


def test_cheapest_way_is_picked_and_the_first_of_equals() -> None:
    costs = {"a": lambda n: 10.0, "b": lambda n: float(n), "c": lambda n: NEVER}
    chooser = Chooser({"sum": costs})
    assert [chooser.pick("sum", (n,)) for n in (9, 10, 11)] == ["b", "a", "a"]


def test_later_tables_count_and_choosers_do_not_share_their_picks() -> None:
    everywhere = {"sum": {"a": lambda n: float(n), "b": lambda n: 5.0}, "norm": "plain"}
    plain, other = (
        Chooser(everywhere),
        Chooser(everywhere, {"sum": "b", "norm": {"c": lambda: 0.0}}),
    )
    assert (plain.pick("sum", (1,)), other.pick("sum", (1,))) == ("a", "b")
    assert (plain.pick("norm"), other.pick("norm")) == ("plain", "c")
