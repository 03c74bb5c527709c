"""Functions that only move elements say where the samples have gone; others say nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Owners, Samples, Scope
from pergrad.engine.samples.moving import layouts_after_moves

B, T = 4, 3
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "rotated": lambda t: torch.rot90(t),
    "turned": lambda t: torch.rot90(t, 2),
    "reversed": lambda t: t.flip(0),
    "repeated": lambda t: t.repeat(2, 1),
    "chosen": lambda t: t[[2, 2, 0]],
    "windows": lambda t: t.unfold(0, 2, 2).reshape(2, -1)[:, :1],
}


def single(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], list[Tensor]]:
    return lambda t: [function(t)]


def owners_of(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """The samples of all elements, from a tensor that holds its sample in each of them."""
    return function(torch.arange(len(t), dtype=t.dtype).unsqueeze(1).expand(t.shape))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64])
@pytest.mark.parametrize("name", MOVES)
def test_moved_rows_keep_their_sample(name: str, dtype: torch.dtype) -> None:
    function, scope = MOVES[name], Scope(B)
    t = torch.randint(0, 5, (B, T)).to(dtype)
    layouts = layouts_after_moves(single(function), t, scope.samples(0), [function(t)])
    assert layouts is not None
    (layout,) = layouts
    assert isinstance(layout, Samples | Owners)
    expected = owners_of(function, t)
    found = layout.owner_of_each(t.device)
    shape = [-1 if d == layout.dim else 1 for d in range(expected.dim())]
    torch.testing.assert_close(found.view(shape).expand(expected.shape), expected.long())


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t + 1,
        lambda t: t.cumsum(0),
        lambda t: t.sort(0).values,  # moves by value: the numbers are in order
        lambda t: t.view(-1)[torch.arange(B * T).view(T, B).T],  # samples along both dimensions
        lambda t: t[:0],
    ],
)
def test_other_functions_have_no_layout(function: Callable[[Tensor], Tensor]) -> None:
    t = torch.randint(0, 50, (B, T))
    assert layouts_after_moves(single(function), t, Scope(B).samples(0), [function(t)]) is None


def test_numbers_that_a_dtype_cannot_hold_have_no_layout() -> None:
    t = torch.zeros(B, 600, dtype=torch.bfloat16)
    assert layouts_after_moves(single(torch.flipud), t, Scope(B).samples(0), [t.flipud()]) is None


def test_parts_of_the_rows_have_the_samples_of_their_rows() -> None:
    t = torch.rand(B, T)

    def parts(t: Tensor) -> list[Tensor]:
        return [*t.vsplit([1]), t[2], t[:, 0]]

    layouts = layouts_after_moves(parts, t, Scope(B).samples(0), parts(t))
    assert layouts is not None
    owners = [layout.owner_of_each(t.device).tolist() for layout in layouts]  # type: ignore[union-attr]
    assert owners == [[0], [1, 2, 3], [2] * T, [0, 1, 2, 3]]
    assert layouts_after_moves(parts, t, Scope(B).samples(0), [t]) is None
