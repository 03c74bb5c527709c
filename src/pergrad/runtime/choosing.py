"""Picks the cheapest of several algorithms for each machine.

A choice has a name, and so has each of its ways: functions that take equal arguments and return equal
numbers, listed by the module that defines them. A chooser has the table of one machine: for each choice, the
ways that run there and their costs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeAlias

from pergrad.runtime.caches import cached

__all__ = ["NEVER", "Chooser", "Costs", "Table", "cheapest"]

NEVER = float("inf")

# The cost of each way, as a function of the problem (usually shapes and dtypes); all in one unit.
Costs: TypeAlias = Mapping[str, Callable[..., float]]
# For each choice, the costs of its ways, or the only way.
Table: TypeAlias = Mapping[str, str | Costs]


class Chooser:
    """Picks the ways of one machine; later tables override earlier ones."""

    def __init__(self, *tables: Table) -> None:
        self.table: dict[str, str | Costs] = {}
        for table in tables:
            self.table.update(table)
        self._only = {choice: way for choice, way in self.table.items() if isinstance(way, str)}

    def pick(self, choice: str, problem: tuple[Hashable, ...] = ()) -> str:
        """Returns the name of the cheapest way, the first one if several cost the same.

        >>> chooser = Chooser({"sort": {"insertion": lambda n: n * n, "merge": lambda n: 8 * n}})
        >>> chooser.pick("sort", (5,)), chooser.pick("sort", (100,))
        ('insertion', 'merge')
        """
        only = self._only.get(choice)
        return cheapest(self, choice, problem) if only is None else only


@cached("picked ways, by chooser and problem", most=1000)
def cheapest(chooser: Chooser, choice: str, problem: tuple[Hashable, ...]) -> str:
    """Compares the costs; cached, since problems repeat from step to step."""
    costs = chooser.table[choice]
    assert not isinstance(costs, str)
    return min(costs, key=lambda way: costs[way](*problem))
