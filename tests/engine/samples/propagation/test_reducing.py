"""Layouts through reductions, scans, softmaxes and sorts."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.samples.propagation.dependence import Batched, assert_followed

Along = Callable[[Tensor, int], object]


def _has_derivative(function: Callable[..., tuple[Tensor, ...]]) -> bool:
    try:
        function(torch.ones(2, requires_grad=True), dim=0)[0].backward()
    except RuntimeError:
        return False
    return True


REDUCTIONS: dict[str, Along] = {
    "sum": lambda x, d: (x.sum(d), x.sum(dim=d, keepdim=True), torch.sum(x, (d,))),
    "mean": lambda x, d: (x.mean(d), torch.mean(x, dim=[d], keepdim=True), x.mean(axis=d)),
    "nansum": lambda x, d: (x.nansum(d), x.nanmean(d)),
    "max": lambda x, d: (x.max(d)[0], x.max(d, keepdim=True).values, torch.min(x, dim=d)[0]),
    "amax": lambda x, d: (x.amax(d), x.amin((d,), keepdim=True)),
    "prod": lambda x, d: (x.prod(d), x.prod(d, keepdim=True)),
    "std": lambda x, d: (x.std(d), x.var(d, unbiased=False), x.var(dim=d, correction=0)),
    "std_mean": lambda x, d: (torch.std_mean(x, d), torch.var_mean(x, dim=d, keepdim=True)),
    "logsumexp": lambda x, d: (x.logsumexp(d), torch.logsumexp(x, dim=d, keepdim=True)),
    "norm": lambda x, d: (x.norm(2, d), x.norm(dim=d), torch.norm(x, 1, d, keepdim=True)),
    "vector_norm": lambda x, d: torch.linalg.vector_norm(x, dim=d),
    "linalg.norm": lambda x, d: torch.linalg.norm(x, None, d, True),
    "median": lambda x, d: (x.median(d)[0], x.nanmedian(d)[0]),
    "mode": lambda x, d: x.mode(d)[0],
    "kthvalue": lambda x, d: (x.kthvalue(1, d)[0], torch.kthvalue(x, k=2, dim=d)[0]),
    "quantile": lambda x, d: (torch.quantile(x, 0.5, d), x.quantile(0.3, dim=d, keepdim=True)),
    "quantiles": lambda x, d: torch.quantile(x, torch.tensor([0.2, 0.7]).double(), dim=d),
    "cosine_similarity": lambda x, d: F.cosine_similarity(x, 2 * x + 1, dim=d),
    "pairwise_distance": lambda x, d: F.pairwise_distance(x.movedim(d, -1), torch.ones(3).double()),
    "trapezoid": lambda x, d: torch.trapezoid(x, dim=d),
}
# What depends on what is read off gradients, and torch 2.11 has no derivative of this one.
if _has_derivative(torch.aminmax):
    REDUCTIONS["aminmax"] = lambda x, d: tuple(torch.aminmax(x, dim=d))
SCANS: dict[str, Along] = {
    "softmax": lambda x, d: (x.softmax(d), F.softmax(x, dim=d), torch.softmax(x, d)),
    "log_softmax": lambda x, d: (x.log_softmax(d), F.log_softmax(x, d), F.softmin(x, d)),
    "gumbel_softmax": lambda x, d: F.gumbel_softmax(x, 1.0, dim=d),
    "cumsum": lambda x, d: (x.cumsum(d), x.cumprod(dim=d), x.logcumsumexp(d)),
    "cummax": lambda x, d: (x.cummax(d)[0], torch.cummin(x, dim=d)[0]),
    "normalize": lambda x, d: (F.normalize(x, dim=d), F.normalize(x, 2.0, d)),
    "renorm": lambda x, d: torch.renorm(x, 2, d, 0.5),
    "glu": lambda x, d: F.glu(torch.cat([x, x], d), d),
    "diff": lambda x, d: (x.diff(dim=d), torch.diff(x, 1, d), torch.diff(x, n=2, dim=d)),
    "sort": lambda x, d: (x.sort(d)[0], torch.sort(x, dim=d, descending=True).values),
    "stable sort": lambda x, d: torch.sort(x, stable=True, dim=d)[0],
    "topk": lambda x, d: (x.topk(2, d)[0], torch.topk(x, k=1, dim=d)[0]),
}


@pytest.mark.parametrize("name", [*REDUCTIONS, *SCANS])
@pytest.mark.parametrize("along", [0, 1, 2, -1])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_reduction_is_followed_unless_it_crosses_samples(name: str, along: int, dim: int) -> None:
    function = {**REDUCTIONS, **SCANS}[name]
    # `renorm` keeps apart what lies along its dimension, and mixes the rest.
    crosses = (along % 3 == dim) != (name == "renorm")
    x = Batched((3, 3, 3), dim)
    assert_followed(3, lambda t: function(t, along), x, exact=not crosses)


@pytest.mark.parametrize("name", [*REDUCTIONS, *SCANS])
def test_reduction_of_rows_told_by_their_owner_is_not_false(name: str) -> None:
    function = {**REDUCTIONS, **SCANS}[name]
    x = Batched((3, 3, 3), 1, owners=(2, 0, 2))
    for along in (0, 1, 2):
        assert_followed(3, lambda t, along=along: function(t, along), x, exact=False)


TO_ONE: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "norm": lambda x: x.norm(),
    "norm of order one": lambda x: x.norm(1),
    "std": lambda x: x.std(),
    "std, unbiased": lambda x: x.std(False),
    "logsumexp of several": lambda x: x.logsumexp((0, 1, 2)),
    "sum of several": lambda x: (x.sum((0, 1)), x.sum((1, 2)), x.mean((-1, -2)), x.amax((0, 2))),
    "sum of none": lambda x: x.sum(()),
    "softmax, dimension not named": lambda x: x.flatten(1).softmax(-1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "trace": lambda x: x[0].trace(),
    "sort by default": lambda x: (x.sort()[0], x.sort(descending=True)[0], x.msort()),
    "topk by default": lambda x: (x.topk(2)[0], x.topk(2, sorted=True)[0]),
    "kthvalue by default": lambda x: x.kthvalue(2)[0],
    "glu by default": lambda x: F.glu(torch.cat([x, x], -1)),
    "normalize by default": lambda x: F.normalize(x),
    "gumbel_softmax by default": lambda x: F.gumbel_softmax(x, 1.0),
    "cosine_similarity by default": lambda x: F.cosine_similarity(x, 2 * x + 1),
    "quantile by default": lambda x: torch.quantile(x, 0.5),
    "diff by default": lambda x: (x.diff(), torch.diff(x, 2)),
    "maximum of two": lambda x: (torch.max(x, 2 * x), torch.max(x, x.transpose(0, 1))),
    "count_nonzero": lambda x: x * x.count_nonzero(1).unsqueeze(1),
}


@pytest.mark.parametrize("name", TO_ONE)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_reduction_over_default_or_several_dimensions_is_not_false(name: str, dim: int) -> None:
    assert_followed(3, TO_ONE[name], Batched((3, 3, 3), dim), exact=False)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice:UserWarning")
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("function", [F.softmax, F.log_softmax, F.softmin])
def test_softmax_of_the_implicit_dimension_is_not_false(
    function: Callable[[Tensor], Tensor], rank: int
) -> None:
    for dim in range(rank):
        assert_followed(3, function, Batched((3, 3, 3)[:rank], dim), exact=False)


def test_reductions_of_one_sample_are_not_false() -> None:
    for name, function in TO_ONE.items():
        if name != "sum of none":
            assert_followed(1, function, Batched((1, 3, 3)), exact=False)
