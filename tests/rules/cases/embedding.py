"""Table look-ups, one by one and in bags."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rules.cases.case import Case, data, index, weight

__all__ = ["CASES"]


def embedding() -> list[Case]:
    def case(shape: tuple[int, ...], **options: Any) -> Case:
        return Case(F.embedding, (index(*shape), weight(5, 3)), options)

    every: list[dict[str, Any]] = [
        {},
        {"padding_idx": 2},
        {"padding_idx": -1},
        {"padding_idx": 0, "scale_grad_by_freq": True},
        {"scale_grad_by_freq": True},
        {"max_norm": 0.7},
        {"max_norm": 0.7, "norm_type": 1.0},
        {"max_norm": 0.7, "norm_type": float("inf"), "padding_idx": -2},
        {"sparse": True},
        {"sparse": True, "padding_idx": 1},
    ]
    shapes = [(6,), (4, 6), (3, 2, 4), (5, 5), (1, 3)]
    return [
        *(case(shape, **options) for options in every for shape in shapes),
        Case(F.embedding, (index(4, 6), weight(5, 3), 1, 0.9, 2.0, True, False)),
        Case(
            F.embedding,
            (),
            {"padding_idx": 1, "weight": weight(5, 3), "input": index(4, 6)},
            samples=("input",),
        ),
    ]


def bag(
    shape: tuple[int, ...] | Tensor,
    *,
    lengths: list[int] | None = None,
    weighted: bool = False,
    **options: Any,
) -> Case:
    """Make a call with a bag for each sample; with `lengths` the bags come flat, with offsets."""
    x = shape if isinstance(shape, Tensor) else index(*shape)
    args: list[Any] = [x, weight(5, 3)]
    samples = [0]
    for extra in (data(*x.shape) if weighted else None, lengths and torch.tensor(lengths)):
        samples += [len(args)] * (extra is not None)
        args.append(extra)

    def call(x: Tensor, w: Tensor, scores: Tensor | None, lengths: Tensor | None) -> Tensor:
        if lengths is None:
            return F.embedding_bag(x, w, per_sample_weights=scores, **options)
        inside = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
        ends = lengths.cumsum(0)
        starts = torch.cat([torch.zeros(1, dtype=torch.long), ends])
        if not options.get("include_last_offset"):
            starts = starts[:-1]
        scores = None if scores is None else scores[inside]
        return F.embedding_bag(x[inside], w, starts, per_sample_weights=scores, **options)

    given = {"input": args[0], "weight": args[1], "offsets": lengths, **options}
    if weighted:
        given["per_sample_weights"] = args[2]
    return Case(F.embedding_bag, tuple(args), {}, samples, call, given)


# torch's own gradient is wrong for scale_grad_by_freq where rows differ in how often they occur.
EVEN = torch.tensor([[0, 1, 2, 0, 1, 2], [4, 3, 0, 3, 4, 0], [1, 1, 1, 1, 1, 1]])


def embedding_bag() -> list[Case]:
    shapes = [(4, 6), (5, 5), (1, 3), (3, 1)]
    return [
        *(bag(shape, mode=mode) for shape in shapes for mode in ("sum", "mean", "max")),
        *(bag((4, 6), mode=mode, padding_idx=2) for mode in ("sum", "mean", "max")),
        bag((4, 6)),
        bag((4, 6), padding_idx=-1),
        bag((4, 6), mode="sum", weighted=True),
        bag((4, 6), mode="sum", weighted=True, padding_idx=1),
        bag((4, 6), max_norm=0.7),
        bag((4, 6), max_norm=0.7, norm_type=1.0),
        bag(EVEN, mode="sum", scale_grad_by_freq=True),
        bag(EVEN, mode="mean", scale_grad_by_freq=True),
        bag((4, 6), mode="sum", sparse=True),
        *(bag((3, 4), mode=mode, lengths=[4, 1, 2]) for mode in ("sum", "mean", "max")),
        bag((3, 4), lengths=[1, 4, 4], include_last_offset=True),
        bag((3, 4), lengths=[1, 4, 4], padding_idx=1),
        bag((3, 4), lengths=[2, 3, 1], mode="sum", weighted=True),
        bag((3, 4), lengths=[2, 0, 4], mode="sum"),
    ]


def by_index() -> list[Case]:
    table = weight(5, 3)
    found = [index(4), index(4, 2), index(5, 5), index(1, 3), index(4, 2) - 5, index(4).int()]
    return [
        *(Case(Tensor.__getitem__, (table, rows), samples=(1,)) for rows in found),
        *(Case(Tensor.__getitem__, (weight(5), rows), samples=(1,)) for rows in found[:2]),
        Case(Tensor.__getitem__, (weight(5, 2, 3), index(4, 2)), samples=(1,)),
    ]


CASES = [*embedding(), *embedding_bag(), *by_index()]
