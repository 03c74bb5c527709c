"""Records how each parameter is used: by which function, and on which rung of the ladder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, Protocol, TypeAlias, get_args

__all__ = ["RUNGS", "Journal", "Rooted", "Rung"]

Rung: TypeAlias = Literal["rule", "derived", "broadcast", "expanded", "vmap", "masked VJP", "loop"]
RUNGS: tuple[Rung, ...] = get_args(Rung)


class Rooted(Protocol):
    """Declares what the journal reads from a weight."""

    @property
    def roots(self) -> Iterable[str]:
        """Names of the parameters that the weight is made of."""


class Journal:
    """Counts the uses of each recorded parameter by function and rung."""

    def __init__(self) -> None:
        self.uses: dict[str, Counter[tuple[str, Rung]]] = {}

    def note(self, weights: Iterable[Rooted], function: str, rung: Rung) -> None:
        for name in dict.fromkeys(root for w in weights for root in w.roots):
            self.uses.setdefault(name, Counter())[function, rung] += 1

    def rung_of(self, name: str) -> Rung | None:
        """Returns the slowest rung that a parameter is used on; None if it is not used."""
        rungs = [rung for _, rung in self.uses.get(name, ())]
        return max(rungs, key=RUNGS.index) if rungs else None
