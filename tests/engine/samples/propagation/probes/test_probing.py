"""Layouts of functions that no table lists: found by a probe with one sample more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import pergrad
from pergrad.engine.samples.propagation.probes import probing
from pergrad.runtime.caches import Cache
from pergrad.testing import assert_near
from tests.engine.samples.propagation.dependence import Batched, assert_followed


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


FOLLOWED: dict[str, Callable[[Tensor], object]] = {
    "diag_embed": lambda x: torch.diag_embed(x),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "triangles": lambda x: (x.tril(), torch.triu(x, 1)),
    "inverse": lambda x: torch.linalg.inv(x + 9 * torch.eye(3).double()),
    "solve": lambda x: torch.linalg.solve(x + 9 * torch.eye(3).double(), x),
    "determinant": lambda x: torch.linalg.det(x),
    "fourier": lambda x: torch.fft.irfft(torch.fft.rfft(x), n=3),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x)),
    "tensordot": lambda x: torch.tensordot(x, ones(3, 2), ([2], [0])),
    "at least": lambda x: (torch.atleast_2d(x), torch.atleast_3d(x[:, 0])),
    "cross": lambda x: torch.linalg.cross(x, 2 * x + 1),
    "powers": lambda x: torch.vander(x[:, 0, 0].detach(), 3) * x[:, 0],
}


@pytest.mark.parametrize("count", [3, 2, 1])
@pytest.mark.parametrize("name", FOLLOWED)
def test_unlisted_function_that_keeps_the_order_is_followed(name: str, count: int) -> None:
    assert_followed(count, FOLLOWED[name], Batched((count, 3, 3)), exact=count > 1)


NOT_FALSE: dict[str, Callable[[Tensor], object]] = {
    **FOLLOWED,
    "diagonal through the samples": lambda x: (x.diagonal(), x.diagonal(1), x.diagonal(-1)),
    "cartesian_prod": lambda x: torch.cartesian_prod(x[:, 0, 0], ones(2)),
    "cartesian_prod from the left": lambda x: torch.cartesian_prod(ones(2), x[:, 0, 0]),
    "combinations": lambda x: torch.combinations(x[:, 0, 0]),
    "meshgrid": lambda x: torch.meshgrid(x[:, 0, 0], ones(3), indexing="ij"),
    "meshgrid of columns": lambda x: torch.meshgrid(ones(3), x[:, 0, 0], indexing="xy"),
    "strided": lambda x: x.as_strided((3, 3), (1, 3)),
    "fourier over the samples": lambda x: torch.fft.fft(x, dim=0).real,
    "split of rows": lambda x: (torch.vsplit(x, [1]), torch.hsplit(x, [1]), torch.dsplit(x, 3)),
    "gradient along": lambda x: torch.gradient(x, dim=0),
    "trapezoid along": lambda x: torch.cumulative_trapezoid(x, dim=0),
    "covariance": lambda x: (torch.cov(x[:, 0]), torch.corrcoef(x[:, 0])),
    "put": lambda x: x.put(torch.arange(9), x[:, 0]),
    "histogram order": lambda x: x[x[:, 0, 0].sort(stable=True)[1]],
    "unique": lambda x: x[torch.unique(x.detach().round().flatten(), return_inverse=True)[1][:3]],
}


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", NOT_FALSE)
def test_unlisted_function_is_not_false(name: str, dim: int) -> None:
    assert_followed(3, NOT_FALSE[name], Batched((3, 3, 3), dim), exact=False)


def reversed_rows(x: Tensor) -> Tensor:
    if has_torch_function((x,)):
        return handle_torch_function(reversed_rows, (x,), x)
    return x.flip(0)


def doubled(x: Tensor) -> Tensor:
    if has_torch_function((x,)):
        return handle_torch_function(doubled, (x,), x)
    return torch.cat([x, x])


@pytest.mark.parametrize("function", [reversed_rows, doubled])
def test_function_of_ones_own_is_not_false(function: Callable[[Tensor], Tensor]) -> None:
    assert_followed(3, function, Batched((3, 2)), exact=False)


def test_probe_depends_on_the_values_of_its_other_arguments() -> None:
    """A probe's answer is kept; the next call with other arguments must not be given it."""
    x = Batched((3, 3, 3))
    for offset in (0, 1, -1, 2, 0):
        assert_followed(3, lambda t, k=offset: torch.diagonal(t, k, 1, 2), x)
        assert_followed(3, lambda t, k=offset: torch.diagonal(t, k, 0, 1), x, exact=False)
    for dim in (0, 1, 2):
        assert_followed(
            3, lambda t: torch.fft.fft(t, dim=2).real, Batched((3, 3, 3), dim), exact=False
        )


def test_answers_kept_from_probes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_ANSWERS", Cache(__name__, "answers", most=3))
    for size in range(2, 9):
        assert_followed(3, lambda t: torch.diag_embed(t), Batched((3, size)))
        assert 0 < len(probing._ANSWERS) <= 3


def test_other_values_have_the_strides_of_the_argument() -> None:
    found = []

    def of_columns(x: Tensor) -> Tensor:
        if has_torch_function((x,)):
            return handle_torch_function(of_columns, (x,), x)  # type: ignore[no-any-return]
        found.append(x.stride())
        return x * 2.0

    assert_followed(3, lambda x: of_columns(x.transpose(0, 1)), Batched((3, 2, 5)), exact=True)
    assert {*found} == {(5, 10, 1)}


def test_private_operators_are_not_run_on_other_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may trust their values: indices that are out of range would spoil the memory."""
    model, ids = nn.Linear(2, 3).double(), torch.tensor([0, 1, 1, 2])

    def loss(model: nn.Module, x: Tensor, index: Tensor) -> Tensor:
        ends = getattr(torch, "_convert_indices_from_coo_to_csr")(index, 5)  # noqa: B009
        return model(x).square().sum(1) * ends[-1]

    def fail(*_: Any) -> None:
        raise AssertionError("it runs on numbers of elements")

    monkeypatch.setattr(probing, "layouts_after_moves", fail)
    x, index = torch.randn(4, 2, dtype=torch.float64), torch.tensor([0, 0, 1, 3])
    found = pergrad.norms(model, loss, x, index, owners=ids)
    plain = pergrad.norms(model, lambda m, x: 4 * m(x).square().sum(1), x, owners=ids)
    assert_near(found, plain)
