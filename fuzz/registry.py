"""Defines ingredients, the lines of which programs are made, and the table of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import cleandoc
from typing import Literal

__all__ = ["INGREDIENTS", "KINDS", "Ingredient", "Kind", "Sizes", "add", "lines"]

Kind = Literal["any", "vec", "seq", "img"]
# Shapes by kind; "any" fits all of them, since the last dimension is always D.
KINDS: dict[Kind, str] = {"vec": "$B, $D", "seq": "$B, $T, $D", "img": "$B, $T, $D, $D"}


@dataclass(frozen=True)
class Sizes:
    """The batch size, the number of positions and the number of features."""

    B: int
    T: int
    D: int


@dataclass(frozen=True)
class Ingredient:
    """A few lines of a model that turn the activation `h` into another one.

    The text may have `$B`, `$T`, `$D` (sizes) and `$k` (the number of the step), and choices `<<a|b>>`.
    """

    name: str
    forward: str
    init: str
    takes: Kind
    gives: Kind
    classes: tuple[int, ...]  # of issue 19, that it may show
    rate: float  # how often it is drawn, compared with others
    is_layer: bool  # has parameters and is drawn often
    mixes: bool
    may_refuse: bool  # a refusal is an answer, too
    only_if: str  # a condition on the sizes
    between: str  # runs between the two batches, with `model`
    after: str  # runs when the program has ended
    residual: bool  # may be drawn as h + step(h)
    mode: str  # how the program runs if it has this ingredient


INGREDIENTS: dict[str, Ingredient] = {}


def add(
    name: str,
    forward: str,
    init: str = "",
    *,
    kind: Kind = "any",
    to: Kind | None = None,
    classes: tuple[int, ...] = (),
    rate: float = 1.0,
    layer: bool = False,
    mixes: bool = False,
    may_refuse: bool = False,
    only_if: str = "",
    between: str = "",
    after: str = "",
    residual: bool = True,
    mode: str = "",
) -> None:
    """Adds an ingredient to the table."""
    if name in INGREDIENTS:
        raise ValueError(f"there is an ingredient {name!r} already; choose another name")
    INGREDIENTS[name] = Ingredient(
        name=name,
        forward=cleandoc(forward),
        init=cleandoc(init),
        takes=kind,
        gives=kind if to is None else to,
        classes=classes,
        rate=rate,
        is_layer=layer,
        mixes=mixes,
        may_refuse=may_refuse or mixes,
        only_if=only_if,
        between=between,
        after=after,
        residual=residual and to is None,
        mode=mode,
    )


def lines(*texts: str) -> str:
    """Joins lines, of which some have a name."""
    return "\n".join(texts)
