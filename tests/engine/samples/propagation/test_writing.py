"""Gathers, scatters and writes: the values of the indices decide whose row is whose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pergrad
from pergrad.engine.samples.layouts import Owners, Scope
from pergrad.engine.samples.propagation import Call
from pergrad.engine.samples.propagation.writing import layout_after_write
from pergrad.errors import MixedSamplesError
from tests.engine.soundness.judge import Case, Cases, exact_or_refused, rows_of_losses

CASES = Cases()
B, N = 4, 3  # graphs, and nodes of each
# Graphs with different numbers of edges, as one: node n·N + i is node i of graph n.
EDGES = torch.tensor(
    [
        [n * N + i, n * N + (i + step) % N]
        for n in range(B)
        for i in range(N)
        for step in ((1, 2) if n % 2 else (1,))
    ]
).T


@pytest.fixture(autouse=True)
def _float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def graphs(size: int) -> tuple[Tensor, ...]:
    return (torch.randn(size, N, 3),)


def convolution(scatter: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A graph convolution: gathers along the edges, scatters back, and a layer after it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        nodes = x.flatten(0, 1)
        sent = m.a(nodes)[EDGES[0]]
        return m.b(scatter(nodes, EDGES[1], sent).tanh()).view(x.shape)

    return forward


def _columns(index: Tensor, like: Tensor) -> Tensor:
    return index.unsqueeze(1).expand_as(like)


SCATTERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "scatter_add": lambda x, to, z: torch.zeros_like(x).scatter_add(0, _columns(to, z), z),
    "scatter_add in place": lambda x, to, z: torch.zeros(B * N, 3).scatter_add_(
        0, _columns(to, z), z
    ),
    "scatter_reduce amax": lambda x, to, z: z.new_zeros(B * N, 3).scatter_reduce(
        0, _columns(to, z), z, "amax", include_self=False
    ),
    "scatter_reduce mean": lambda x, to, z: torch.zeros_like(x).scatter_reduce_(
        0, _columns(to, z), z, "mean"
    ),
    "index_add": lambda x, to, z: torch.zeros(B * N, 3).index_add_(0, to, z),
    "index_put": lambda x, to, z: torch.zeros_like(x).index_put((to,), z, accumulate=True),
    "sparse product": lambda x, to, z: torch.sparse.mm(
        torch.sparse_coo_tensor(
            torch.stack([to, torch.arange(len(to))]), torch.ones(len(to)), (B * N, len(to))
        ),
        z,
    ),
    "dense product": lambda x, to, z: torch.nn.functional.one_hot(to, B * N).double().T @ z,
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", SCATTERS)
def test_convolutions_of_graphs_side_by_side_are_exact(name: str) -> None:
    case = Case(convolution(SCATTERS[name]), "exact", batch=graphs)
    assert exact_or_refused(case.made, case.loss_fn) == "exact"


@CASES.exact()
def attention_along_edges(m: Any, x: Tensor) -> Tensor:
    z = m.a(x.flatten(0, 1))
    score = (z[EDGES[0]] * m.b(z).index_select(0, EDGES[1])).sum(1)
    top = score.new_zeros(len(z)).scatter_reduce(0, EDGES[1], score, "amax", include_self=False)
    weight = (score - top[EDGES[1]]).exp()
    total = torch.zeros(len(z)).scatter_add(0, EDGES[1], weight)
    sent = (weight / total[EDGES[1]]).unsqueeze(1) * z.gather(0, _columns(EDGES[0], z[EDGES[0]]))
    return torch.zeros_like(z).index_add(0, EDGES[1], sent).view(x.shape)


@CASES.exact()
def pooled_by_graph(m: Any, x: Tensor) -> Tensor:
    graph = torch.arange(B).repeat_interleave(N)
    return m.b(torch.zeros(B, 3).index_add(0, graph, m.a(x.flatten(0, 1))))


@CASES.exact()
def pooled_in_segments(m: Any, x: Tensor) -> Tensor:
    h = m.a(x.flatten(0, 1))
    return m.b(torch.segment_reduce(h, "max", lengths=torch.full((B,), N), axis=0))


@CASES.refused()
def an_edge_between_graphs(m: Any, x: Tensor) -> Tensor:
    edges = EDGES.clone()
    edges[0, 0] = B * N - 1
    z = m.a(x.flatten(0, 1))[edges[0]]
    return m.b(torch.zeros(B * N, 3).index_add(0, edges[1], z)).view(x.shape)


@CASES.refused()
def segments_of_several_graphs(m: Any, x: Tensor) -> Tensor:
    h = m.a(x.flatten(0, 1))
    return m.b(torch.segment_reduce(h, "sum", lengths=torch.tensor([2, 4, 3, 3]), axis=0))


def _shuffled(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(x))
    return order, m.a(x.flatten(1).view(len(x), N, 3)[order])


@CASES.exact()
def written_back_after_a_shuffle(m: Any, x: Tensor) -> Tensor:
    order, z = _shuffled(m, x)
    out = torch.empty_like(z)
    out[order] = z
    return m.b(out)


@CASES.exact()
def written_into_a_constant_after_a_shuffle(m: Any, x: Tensor) -> Tensor:
    order, z = _shuffled(m, x)
    out = torch.zeros(4, N, 3)
    out[order] = z
    return m.b(out)


@CASES.exact()
def copied_back_after_a_shuffle(m: Any, x: Tensor) -> Tensor:
    order, z = _shuffled(m, x)
    return m.b(torch.zeros_like(z).index_copy(0, order, z))


@CASES.exact()
def unpadded_and_padded(m: Any, x: Tensor) -> Tensor:
    mask = x[..., 0] > -0.5
    out = torch.zeros(B, N, 3)
    out[mask] = m.a(x[mask])
    return m.b(out)


@CASES.exact()
def unpadded_by_positions(m: Any, x: Tensor) -> Tensor:
    at = (x[..., 0].flatten() > -0.5).nonzero().flatten()
    rows = m.a(x.flatten(0, 1)[at])
    return m.b(torch.zeros(B * N, 3).index_put((at,), rows)).view(x.shape)


@CASES.exact()
def scattered_by_a_mask(m: Any, x: Tensor) -> Tensor:
    mask = x[..., :1] > 0
    rows = m.a(x[mask[..., 0]])
    return m.b(torch.zeros(B, N, 3).masked_scatter(mask.expand(B, N, 3), rows))


@CASES.exact()
def experts_into_one_result(m: Any, x: Tensor) -> Tensor:
    first = x[..., 0] > 0
    out = torch.zeros(B, N, 3)
    out[first], out[~first] = m.a(x[first]), m.b(x[~first])
    return out


@CASES.exact()
def rows_of_different_lengths(m: Any, x: Tensor) -> Tensor:
    out = torch.empty(len(x), N, 3)
    for n in range(len(x)):
        kept = 1 + n % N
        out[n, :kept], out[n, kept:] = m.a(x[n, :kept]), 0
    return m.b(out)


@CASES.refused()
def one_row_written_twice(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(B, N, 3)
    out[torch.tensor([0, 0, 1, 2])] = m.a(x)
    return m.b(out)


@CASES.refused()
def part_of_a_row_of_another(m: Any, x: Tensor) -> Tensor:
    out = m.a(x).clone()
    out[0, 0] = m.b(x)[1, 0]
    return out


@CASES.refused()
def added_to_another(m: Any, x: Tensor) -> Tensor:
    return m.a(x).index_add(0, torch.tensor([1, 2, 3, 0]), m.b(x))


@pytest.mark.parametrize("name", CASES)
def test_rows_belong_to_those_who_wrote_them_or_are_refused(name: str) -> None:
    case = CASES[name]
    made = Case(case.function, case.verdict, batch=graphs).made
    assert exact_or_refused(made, case.loss_fn) == case.verdict


def test_rows_swapped_in_place_belong_to_their_new_samples_and_losses_do_not() -> None:
    def swapped(m: Any, x: Tensor) -> Tensor:
        out = m.a(x).clone()
        out[torch.tensor([0, 1])] = m.b(x[torch.tensor([1, 0])])
        return out

    model, (x,) = Case(swapped, "exact").made()
    with pytest.raises(MixedSamplesError, match="order of the batch"):
        pergrad.grads(model, lambda m, x: m(x).sum(1), x)
    grads = pergrad.Grads()
    with pergrad.record(model, grads):
        model(x).square().sum().backward()
    _, truth = rows_of_losses(model, lambda m, x: m(x).square().sum(1), x)
    for name, rows in truth.items():
        torch.testing.assert_close(grads.result[name], rows[[1, 0, 2, 3]])


def test_rows_that_nobody_wrote_are_presumed_and_may_be_given_to_others() -> None:
    scope = Scope(3)
    t, value = torch.zeros(3, 2), torch.ones(1, 2, requires_grad=True) * 1

    def after(before: Any, row: int, owner: int) -> Any:
        own = Owners(scope, 0, torch.tensor([owner]))
        out = torch.ones(1, requires_grad=True) * 1
        args = (t, slice(row, row + 1), value)
        return layout_after_write(
            Call(scope, Tensor.__setitem__, args, {}, [out], [t, value], [before, own])
        )

    first = after(scope.constant(), 0, 0)
    assert first.owner.tolist() == [0, 1, 2]
    assert first.presumed.tolist() == [False, True, True]
    second = after(first, 1, 2)
    assert second.owner.tolist() == [0, 2, -1]  # no longer row n for sample n
    assert after(second, 2, 1).owner.tolist() == [0, 2, 1]
