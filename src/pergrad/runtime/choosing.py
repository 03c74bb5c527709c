"""Picks one of several ways to compute the same: on each machine, the one of least cost.

A choice has a name, and its ways have names: functions that take the same arguments and give the same
numbers, listed by the module that has them. A chooser has a table for one machine: for each choice the ways
that run there, each with a cost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeAlias

from pergrad.runtime.caches import cached

__all__ = ["NEVER", "Chooser", "Costs", "Table", "cheapest"]

NEVER = float("inf")

# The cost of each way, as a function of the problem (shapes and types, as a rule); all in one unit.
Costs: TypeAlias = Mapping[str, Callable[..., float]]
# For each choice the costs of its ways, or the only way that runs there.
Table: TypeAlias = Mapping[str, str | Costs]


class Chooser:
    """Picks the ways of one machine; of several tables the last one that has a choice counts."""

    def __init__(self, *tables: Table) -> None:
        self.table: dict[str, str | Costs] = {}
        for table in tables:
            self.table.update(table)
        self._only = {choice: way for choice, way in self.table.items() if isinstance(way, str)}

    def pick(self, choice: str, problem: tuple[Hashable, ...] = ()) -> str:
        """Gives the name of the cheapest way, the first of several that cost the same.

        >>> chooser = Chooser({"sort": {"insertion": lambda n: n * n, "merge": lambda n: 8 * n}})
        >>> chooser.pick("sort", (5,)), chooser.pick("sort", (100,))
        ('insertion', 'merge')
        """
        only = self._only.get(choice)
        return cheapest(self, choice, problem) if only is None else only


@cached("picked ways, by chooser and problem", most=1000)
def cheapest(chooser: Chooser, choice: str, problem: tuple[Hashable, ...]) -> str:
    """Compares the costs; kept by chooser, choice and problem, since a step asks the same as the last one."""
    costs = chooser.table[choice]
    assert not isinstance(costs, str)
    return min(costs, key=lambda way: costs[way](*problem))
