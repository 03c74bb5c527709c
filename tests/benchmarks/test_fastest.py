from __future__ import annotations

from collections.abc import Iterator

from benchmarks.fastest import fastest


def _clock(taken: list[float]) -> Iterator[float]:
    """Readings before and after runs that take so long."""
    now = 0.0
    for seconds in taken:
        yield now
        now += seconds
        yield now


def test_the_fastest_run_counts_and_those_to_warm_up_do_not() -> None:
    order: list[str] = []
    functions = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    readings = _clock([0.1, 0.2, 5.0, 4.0, 3.0, 6.0])
    found = fastest(functions, 2, warm_up=1, clock=lambda: next(readings))
    assert order == ["a", "b"] * 3
    assert {name: round(seconds, 6) for name, seconds in found.items()} == {"a": 3.0, "b": 4.0}
