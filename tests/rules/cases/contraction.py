"""Contractions with a weight."""

from __future__ import annotations

import torch

from tests.rules.cases.case import Case, data, weight

__all__ = ["CASES"]

# An equation, and the shapes of x and of the weight.
_PRODUCTS: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
    ("bi,oi->bo", (5, 4), (6, 4)),
    ("bi,io->bo", (4, 4), (4, 6)),
    ("bi,io", (5, 4), (4, 6)),
    ("bti,io->bto", (5, 3, 4), (4, 6)),
    ("...i,io->...o", (5, 3, 4), (4, 6)),
    ("...i,...i->...", (5, 3, 4), (4,)),
    ("tbi,io->tbo", (3, 5, 4), (4, 6)),
    ("bti,hio->bhto", (5, 3, 4), (2, 4, 6)),
    ("bhti,hio->bhto", (5, 2, 3, 4), (2, 4, 6)),
    ("bthi,iho->bto", (5, 3, 2, 4), (4, 2, 6)),
    ("bthi,ihog->bgto", (5, 3, 2, 4), (4, 2, 3, 2)),
    ("bij,oji->bo", (5, 4, 3), (6, 3, 4)),
    ("bi,i->bi", (5, 4), (4,)),
    ("bi,i->b", (5, 4), (4,)),
    ("bij,ij->bij", (5, 4, 3), (4, 3)),
    ("bi,o->bio", (5, 4), (3,)),
    ("bi,->bi", (5, 4), ()),
    ("bti,io->bo", (5, 3, 4), (4, 6)),
    ("bti,to->bo", (5, 3, 4), (3, 6)),
    ("bnd,nm->bmd", (5, 3, 4), (3, 3)),
    ("bi,oi->bo", (1, 4), (6, 4)),
]


def _einsum(equation: str, x: tuple[int, ...], w: tuple[int, ...]) -> list[Case]:
    terms, arrow, result = equation.partition("->")
    first, second = terms.split(",")
    swapped = f"{second},{first}{arrow}{result}"
    return [
        Case(torch.einsum, (equation, data(*x), weight(*w)), samples=(1,)),
        Case(torch.einsum, (swapped, weight(*w), data(*x)), samples=(2,)),
    ]


def _others() -> list[Case]:
    x, v, w = data(5, 3, 4), weight(3), weight(4, 6)
    return [
        Case(torch.einsum, ("bti,t,io->bo", x, v, w), samples=(1,)),
        Case(torch.einsum, ("bi,oij->bo", data(5, 4), weight(6, 4, 2)), samples=(1,)),
        Case(torch.einsum, ("bii,io->bo", data(5, 4, 4), w), samples=(1,)),
        Case(torch.tensordot, (x, w, 1)),
        Case(torch.tensordot, (x, weight(3, 4, 6))),
        Case(torch.tensordot, (x, weight(4, 6, 3)), {"dims": ([2, 1], [0, 2])}),
        Case(torch.tensordot, (x, weight(6), 0)),
    ]


CASES = [*(case for product in _PRODUCTS for case in _einsum(*product)), *_others()]
