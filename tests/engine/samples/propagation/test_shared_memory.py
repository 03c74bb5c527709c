"""Data that is written through views: the owners of rows follow the memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Layout, Owners, Samples, Scope
from pergrad.engine.samples.propagation.shared_memory import layout_of_base, layout_of_view

B = 4
ORDER = [2, 0, 3, 1]
# Views of a tensor (B, 2, 3), and the dimension of their samples.
VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "itself": (lambda t: t[:], 0),
    "transposed": (lambda t: t.transpose(0, 2), 2),
    "first": (lambda t: t[:, 0], 0),
    "column": (lambda t: t.permute(2, 1, 0)[1], 1),
    "flat": (lambda t: t.flatten(1)[:, ::2], 0),
    "reversed features": (lambda t: t.as_strided((2, B), (3, 6), 1), 1),
}


def owner_of(layout: Layout, size: int = B) -> list[int]:
    assert isinstance(layout, Samples | Owners)
    assert layout.size == size
    return layout.owner_of_each(torch.device("cpu")).tolist()


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("order", [range(B), ORDER])
def test_a_constant_has_the_rows_that_are_written_to_a_view(name: str, order: list[int]) -> None:
    scope, base, (view_of, dim) = Scope(B), torch.zeros(B, 2, 3), VIEWS[name]
    owners = scope.owners(dim, torch.tensor(order))
    found = layout_of_base(base, scope.constant(), view_of(base), owners)
    assert owner_of(found) == list(order)
    assert found.dim == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("order", [range(B), ORDER])
def test_a_view_has_the_rows_that_are_written_to_its_base(name: str, order: list[int]) -> None:
    scope, base, (view_of, dim) = Scope(B), torch.zeros(B, 2, 3), VIEWS[name]
    written = scope.owners(0, torch.tensor(order))
    for before in (scope.constant(), scope.samples(dim)):
        found = layout_of_view(base, written, view_of(base), before)
        assert owner_of(found) == list(order)
        assert found.dim == dim  # type: ignore[union-attr]


def test_rows_that_are_written_one_by_one_make_up_the_whole() -> None:
    scope, base = Scope(B), torch.zeros(B, 3)
    layout: Layout = scope.constant()
    for n, owner in enumerate(ORDER):
        one = Owners(scope, 0, torch.tensor([owner]), True).of_one(base[n])
        layout = layout_of_base(base, layout, base[n], one)
    assert owner_of(layout) == ORDER


def test_a_view_of_rows_that_nobody_has_written_keeps_its_layout() -> None:
    scope, base = Scope(B), torch.zeros(2 * B, 3)
    part = layout_of_base(base, scope.constant(), base[:B], scope.owners(0, torch.tensor(ORDER)))
    assert owner_of(layout_of_view(base, part, base[:B], scope.constant())) == ORDER
    assert layout_of_view(base, part, base[B:], scope.constant()) == scope.constant()


def test_constants_and_samples_in_line_change_nothing() -> None:
    scope, base = Scope(B), torch.zeros(B, 2, 3)
    rows = scope.samples(0)
    assert layout_of_base(base, rows, base[:, 1], scope.constant()) is rows
    assert layout_of_base(base, rows, base[:, 1], rows) is rows
    assert layout_of_view(base, rows, base[:, 1], rows) is rows
