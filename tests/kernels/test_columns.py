from __future__ import annotations

import pytest
import torch
import triton.language as tl
from torch import Tensor

from pergrad.kernels import columns
from pergrad.kernels.columns import column_squared_norms, column_sums


def _exact(g: Tensor, x: Tensor | None = None) -> Tensor:
    terms = g.double() if x is None else g.double() * x.double()
    return terms.sum(1).square().sum(1)


def _some(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    shapes = ((2, 5, 3), (2, 70, 40), (2, 1, 33), (2, 300, 8))
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def test_norms_of_column_sums(device: torch.device, dtype: torch.dtype) -> None:
    gs = _some(device, dtype)
    exact = torch.stack([_exact(g) for g in gs])
    torch.testing.assert_close(column_squared_norms(gs, [], [], []), exact, rtol=1e-5, atol=0)


def test_norms_of_column_sums_of_products(device: torch.device, dtype: torch.dtype) -> None:
    gs, xs = _some(device, dtype), _some(device, torch.float32)
    exact = torch.stack([_exact(g, x) for g, x in zip(gs, xs, strict=True)])
    torch.testing.assert_close(column_squared_norms(gs, xs, [], []), exact, rtol=1e-5, atol=0)


def test_norms_of_g_alone_come_with_those_of_products(
    device: torch.device, dtype: torch.dtype
) -> None:
    gs, xs = _some(device, dtype), _some(device, torch.float32)
    gs[1] = gs[1].mT.contiguous().mT  # a launch of its own
    products = [_exact(g, x) for g, x in zip(gs, xs, strict=True)]
    exact = torch.stack([*products, _exact(gs[3]), _exact(gs[0]), _exact(gs[1])])
    found = column_squared_norms(gs, xs, [], [3, 0, 1])
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)


def _of_groups(x: Tensor, columns: int) -> Tensor:
    """(n, t, d) -> (n, 1, groups) of so many columns each."""
    return x.float().mean(1, keepdim=True).unflatten(2, (-1, columns)).mean(3)


def _of_columns(statistic: Tensor, x: Tensor) -> Tensor:
    """(n, t, 1) or (n, 1, groups) -> the same for every column of its group."""
    groups = statistic.shape[2]
    return statistic.double().repeat_interleave(x.shape[2] // groups if groups > 1 else 1, 2)


# Statistics, by the number of the pair: of its positions, of its groups of columns, of all, or shared.
STATISTICS = {
    "positions": lambda _, x: x.float().mean(2, keepdim=True),
    "groups": lambda _, x: _of_groups(x, next(k for k in (5, 3, 2, 1) if x.shape[2] % k == 0)),
    "all": lambda _, x: x.float().mean((1, 2), keepdim=True),
    "shared": lambda _, x: _of_groups(x[:1], 1).expand(len(x), -1, -1),  # by all samples
    "shared positions": lambda _, x: x[:1].float().mean(2, keepdim=True).expand(len(x), -1, -1),
    "both": lambda k, x: x.float().mean(1 + k % 2, keepdim=True),
}


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("is_turned", [False, True])
def test_what_x_is_normalized_by_is_read_with_it(
    is_turned: bool, statistics: str, device: torch.device, dtype: torch.dtype
) -> None:
    gs, xs = _some(device, torch.float32), [3 + x for x in _some(device, dtype)]
    if is_turned:
        xs[1] = xs[1].mT.contiguous().mT
    means = [STATISTICS[statistics](k, x) for k, x in enumerate(xs)]
    inverses = [torch.rand_like(mean) + 1 for mean in means]
    normalized = [
        (x.double() - _of_columns(mean, x)) * _of_columns(inverse, x)
        for x, mean, inverse in zip(xs, means, inverses, strict=True)
    ]
    products = [_exact(g, x) for g, x in zip(gs, normalized, strict=True)]
    exact = torch.stack([*products, _exact(gs[2])])
    found = column_squared_norms(gs, xs, [*means, *inverses], [2])
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=0)
    sums, squares = column_sums(gs, xs, [*means, *inverses], [2])
    torch.testing.assert_close(squares, found)
    of_products = [(g.double() * x).sum(1) for g, x in zip(gs, normalized, strict=True)]
    expected = torch.cat([*of_products, gs[2].double().sum(1)], 1)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", [0, 1])
def test_rows_may_begin_where_wide_loads_cannot(
    first: int, device: torch.device, dtype: torch.dtype
) -> None:
    g, x = torch.randn(2, 2, 20, 24, device=device).to(dtype)[..., first : first + 16].unbind()
    torch.testing.assert_close(
        column_squared_norms([g], [], [], [])[0], _exact(g), rtol=1e-5, atol=0
    )
    found = column_squared_norms([g], [x], [], [0])
    exact = torch.stack([_exact(g, x), _exact(g)])
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)


def test_sums_are_side_by_side(device: torch.device, dtype: torch.dtype) -> None:
    gs, xs = _some(device, dtype), _some(device, torch.float32)
    gs[1] = gs[1].mT.contiguous().mT  # a launch of its own
    for others in ([], xs):
        sums, squares = column_sums(gs, others, [], [])
        terms = [g.double() * x for g, x in zip(gs, others, strict=True)] if others else gs
        exact = torch.cat([one.double().sum(1) for one in terms], 1)
        torch.testing.assert_close(sums.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(squares, column_squared_norms(gs, others, [], []))


def test_sums_of_g_alone_follow_those_of_products(device: torch.device, dtype: torch.dtype) -> None:
    gs, xs = _some(device, dtype), _some(device, torch.float32)
    sums, squares = column_sums(gs, xs, [], [2, 0])
    terms = [g.double() * x for g, x in zip(gs, xs, strict=True)] + [gs[2].double(), gs[0].double()]
    exact = torch.cat([one.sum(1) for one in terms], 1)
    torch.testing.assert_close(sums.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squares, column_squared_norms(gs, xs, [], [2, 0]))


def test_columns_need_not_be_neighbours(device: torch.device, dtype: torch.dtype) -> None:
    g = torch.randn(2, 6, 50, device=device).to(dtype).mT
    shared = torch.randn(1, 50, 6, device=device).to(dtype).expand(2, -1, -1)
    torch.testing.assert_close(
        column_squared_norms([g], [], [], [])[0], _exact(g), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        column_squared_norms([g], [shared], [], [])[0], _exact(g, shared), rtol=1e-5, atol=0
    )


def test_each_tensor_may_lie_its_own_way(device: torch.device, dtype: torch.dtype) -> None:
    def lying(way: int) -> Tensor:
        x = torch.randn(2, 40, 40, device=device).to(dtype)
        return (x, x.mT, torch.randn(2, 40, 80, device=device).to(dtype)[:, :, ::2])[way]

    gs = [lying(k // 3) for k in range(9)]
    xs = [lying(k % 3) for k in range(9)]
    exact = torch.stack([_exact(g, x) for g, x in zip(gs, xs, strict=True)])
    torch.testing.assert_close(column_squared_norms(gs, xs, [], []), exact, rtol=1e-5, atol=0)
    alone = torch.stack([_exact(g) for g in gs])
    torch.testing.assert_close(column_squared_norms(gs, [], [], []), alone, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("strides", "offsets"), [((0, 8, 1), "int32"), ((0, 1, 2**26), "int64")])
def test_far_columns_are_reached_by_64_bits(strides: tuple[int, ...], offsets: str) -> None:
    place = (0, torch.Size([1, 8, 8]), strides)
    plan = columns._plan((place,), (), (), ())
    assert [settings["OFFSETS"] for *_, settings in plan.launches] == [getattr(tl, offsets)]


def test_positions_that_lie_side_by_side_are_read_wide() -> None:
    shape, strides = torch.Size([2, 64, 5]), (320, 1, 64)
    for address, alignment in ((32, 8), (8, 1)):
        plan = columns._plan(((address, shape, strides),), (), (), ())
        assert [settings["ALIGNMENT"] for *_, settings in plan.launches] == [alignment]
