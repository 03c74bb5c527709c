from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pergrad.kernels import gram
from pergrad.kernels.gram import (
    gram_microseconds,
    gram_squared_norms,
    mended_squared_norms,
)
from pergrad.kernels.tile import tile_microseconds, tile_squared_norms
from pergrad.reductions.choosing import chooser_for
from pergrad.runtime import MACHINES

SHAPES = [(3, 5, 7, 9), (1, 1, 3, 4), (2, 70, 40, 33), (2, 130, 16, 24), (3, 16, 16, 16)]


def _exact(g: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("nto,nti->noi", g.double(), x.double()).flatten(1).square().sum(1)


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_those_of_the_gradients(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> None:
    n, t, o, i = shape
    g, x = _random((n, t, o), device, dtype), _random((n, t, i), device, dtype)
    torch.testing.assert_close(gram_squared_norms([g], [x])[0], _exact(g, x), rtol=1e-5, atol=0)
    torch.testing.assert_close(tile_squared_norms(g, x), _exact(g, x), rtol=1e-5, atol=0)


def test_problems_of_different_shapes_share_a_launch(
    device: torch.device, dtype: torch.dtype
) -> None:
    gs = [_random((2, t, o), device, dtype) for t, o in ((5, 3), (33, 8), (1, 40), (70, 16))]
    xs = [
        _random((2, g.shape[1], i), device, dtype) for g, i in zip(gs, (7, 24, 2, 5), strict=True)
    ]
    exact = torch.stack([_exact(g, x) for g, x in zip(gs, xs, strict=True)])
    torch.testing.assert_close(gram_squared_norms(gs, xs), exact, rtol=1e-5, atol=0)


def test_inputs_may_have_any_strides(device: torch.device, dtype: torch.dtype) -> None:
    g = _random((6, 7, 2), device, dtype).movedim(2, 0)  # (2, 6, 7)
    x = _random((2, 5, 12), device, dtype).mT[:, ::2]  # (2, 6, 5)
    shared = _random((1, 6, 5), device, dtype).expand(2, -1, -1)
    for one in (x, shared):
        torch.testing.assert_close(
            gram_squared_norms([g], [one])[0], _exact(g, one), rtol=1e-5, atol=0
        )
        torch.testing.assert_close(tile_squared_norms(g, one), _exact(g, one), rtol=1e-5, atol=0)


def _cancelling(
    n: int, t: int, o: int, i: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Pairs of positions with the same input, whose gradients differ by a hundredth of a hundredth."""
    x, g = _random((n, t, i), device, torch.float32), _random((n, t, o), device, torch.float32)
    share = 1e-4 if dtype == torch.float32 else 1e-2
    nearly = g * (1 + share * _random((n, t, o), device, torch.float32))
    return torch.cat([g, -nearly], 1).to(dtype), torch.cat([x, x], 1).to(dtype)


def test_what_cancels_is_computed_again_from_the_gradients(
    device: torch.device, dtype: torch.dtype
) -> None:
    sizes = ((20, 40, 24), (40, 70, 90), (8, 16, 16))
    g, x = zip(*(_cancelling(3, *size, device, dtype) for size in sizes), strict=True)
    gs, xs = list(g), list(x)
    gs[1][2], xs[1][2] = _random((80, 70), device, dtype), _random((80, 90), device, dtype)
    exact = torch.stack([_exact(g, x) for g, x in zip(gs, xs, strict=True)])
    torch.testing.assert_close(gram_squared_norms(gs, xs), exact, rtol=1e-3, atol=0)
    of_pairs = [
        (g.float() @ g.float().mT) * (x.float() @ x.float().mT) for g, x in zip(gs, xs, strict=True)
    ]
    coarse = torch.stack([one.sum((1, 2)).double() for one in of_pairs])
    if dtype == torch.float32:
        assert ((coarse - exact).abs() / exact).max() > 0.01  # what inner products alone give


def test_only_what_is_cancelled_is_mended(device: torch.device, dtype: torch.dtype) -> None:
    g, x = _random((4, 5, 6), device, dtype), _random((4, 5, 7), device, dtype)
    found = torch.tensor([5.0, 1e-9, float("nan"), -1.0], dtype=torch.float64, device=device)
    mended = mended_squared_norms(found, torch.ones_like(found), g, x)
    assert mended[0] == 5.0
    torch.testing.assert_close(mended[1:], _exact(g, x)[1:], rtol=1e-5, atol=0)


def test_a_sample_that_is_not_finite_touches_no_other(device: torch.device) -> None:
    g, x = _random((3, 20, 8), device, torch.float32), _random((3, 20, 6), device, torch.float32)
    exact = _exact(g, x)
    g[1, 3, 2] = float("nan")
    for found in (gram_squared_norms([g], [x])[0], tile_squared_norms(g, x)):
        assert found[1].isnan()
        torch.testing.assert_close(found[[0, 2]], exact[[0, 2]], rtol=1e-5, atol=0)


def test_results_are_the_same_each_time(device: torch.device, dtype: torch.dtype) -> None:
    g, x = _random((2, 100, 40), device, dtype), _random((2, 100, 24), device, dtype)
    assert gram_squared_norms([g], [x]).equal(gram_squared_norms([g], [x]))
    assert tile_squared_norms(g, x).equal(tile_squared_norms(g, x))


def test_many_positions_make_tiles_the_cheaper_way() -> None:
    few, many = (16, 64, 1024, 1024, torch.bfloat16), (16, 4096, 256, 256, torch.bfloat16)
    assert gram_microseconds(*few) < tile_microseconds(*few)
    assert gram_microseconds(*many) > tile_microseconds(*many)


def test_alone_a_problem_is_never_cheaper() -> None:
    sizes = (16, 512, 768, 768, torch.bfloat16)
    assert gram_microseconds(*sizes, is_alone=True) >= gram_microseconds(*sizes)


def test_exact_float32_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = chooser_for(MACHINES["cuda", "eager"], True)

    def way(dtype: torch.dtype, precision: str | None) -> str:
        sizes = (16, 512, 768), (16, 512, 768), dtype, dtype, 2**28, precision
        return gpu.pick("launch of an outer product", sizes)

    assert way(torch.float32, "tf32x3") == "shared"
    monkeypatch.setattr(gram, "float32_precision", lambda: "ieee")
    assert way(torch.float32, "ieee") == "alone"
    assert way(torch.bfloat16, None) == "shared"
