"""Rows of samples beside data of others: nothing says whose the result is, unless only the data was moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad
from pergrad.testing import assert_near
from tests.engine.soundness.judge import Model, rows_of_losses, squares

Program = Callable[[Any, Tensor], Tensor]


def model(function: Program) -> Model:
    torch.manual_seed(0)
    parts = {
        "k": nn.Parameter(torch.randn(3, 1, 2)),
        "pairs": nn.Parameter(torch.randn(3, 3, 3)),
        "s": nn.Parameter(torch.rand(3)),
    }
    return Model(function, **parts).double()


def moved(m: Any, x: Tensor) -> Tensor:
    return m.a(x).flip(0)


def written(h: Tensor, mask: Tensor) -> Tensor:
    h = h.clone()
    h[mask] = 0.0
    return h


def with_columns_of(x: Tensor, other: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:] = other[:, 1:]
    return x


# Whose samples' gradients these are depends on the data as much as on the rows: refused.
MOVED: dict[str, Program] = {
    "sum": lambda m, x: x + moved(m, x),
    "stack": lambda m, x: torch.stack([moved(m, x), x], 1).sum(1),
    "product of matrices": lambda m, x: x[:, None] @ moved(m, x)[:, :, None],
    "outer product": lambda m, x: torch.bmm(x[:, :, None], moved(m, x)[:, None, :]),
    "einsum": lambda m, x: torch.einsum("bi,bi->b", x, moved(m, x)),
    "attention": lambda m, x: F.scaled_dot_product_attention(
        x[:, :, None], moved(m, x)[:, :, None], moved(m, x)[:, :, None]
    ),
    "loss": lambda m, x: F.mse_loss(moved(m, x), x, reduction="none"),
    "loss of targets": lambda m, x: F.cross_entropy(moved(m, x), x.argmax(1), reduction="none"),
    "distance": lambda m, x: F.pairwise_distance(x, moved(m, x)),
    "product of vectors": lambda m, x: torch.linalg.cross(x, moved(m, x)),
    "picked elements": lambda m, x: moved(m, x).gather(1, x.argsort(1)[:, :2]),
    "picked by two indices": lambda m, x: moved(m, x)[torch.arange(len(x)), x.argmax(1)],
    "written where data says": lambda m, x: written(moved(m, x), x > 0),
    "written beside data": lambda m, x: with_columns_of(x, moved(m, x)),
    "scattered": lambda m, x: moved(m, x).masked_scatter(x > 0, x),
}
# The same where a weight is used on both: by rules, decompositions, and the rungs without a rule.
WITH_WEIGHTS: dict[str, Program] = {
    "bilinear": lambda m, x: F.bilinear(moved(m, x), x, m.pairs),
    "einsum of three": lambda m, x: torch.einsum("bi,bj,ij->b", x, moved(m, x), m.w),
    "addmm": lambda m, x: torch.addmm(moved(m, x), x, m.w),
    "addcmul": lambda m, x: torch.addcmul(moved(m, x), x, m.s),
    "where": lambda m, x: torch.where(x > 0, moved(m, x), m.s),
    "lerp": lambda m, x: torch.lerp(moved(m, x), m.s.expand(len(x), 3), x),
    "product": lambda m, x: moved(m, x) * m.s * x,
    "derived weight": lambda m, x: F.bilinear(moved(m, x), x, m.pairs.exp()),
    "bias of one sample": lambda m, x: F.conv1d(x[:, None], m.k, m.a(x)[1]),
    "bias of a column": lambda m, x: F.conv1d(x[:, None], m.k, m.a(x)[:3, 0]),
}
# The samples are moved to another dimension of the same size, and data of all samples is beside them.
ACROSS: dict[str, Program] = {
    "sum": lambda m, x: x + m.a(x).mT,
    "product": lambda m, x: m.a(x).transpose(0, 1) * x,
    "stack": lambda m, x: torch.stack([x, m.a(x).T], -1),
    "where": lambda m, x: torch.where(x > 0, m.a(x).T, x),
    "mask": lambda m, x: m.a(x).T.masked_fill(x > 0, 0.0),
    "loss": lambda m, x: F.smooth_l1_loss(m.a(x).T, x, reduction="none"),
    "no handler": lambda m, x: torch.linalg.cross(m.a(x).T, x),
    "addcmul of a weight": lambda m, x: torch.addcmul(m.a(x).T, x, m.s),
    "derived weight": lambda m, x: torch.addcmul(m.a(x).T, x, m.s.exp()),
    "triangle": lambda m, x: x + m.a(x).triu().T,
    "flat": lambda m, x: (x.reshape(-1) * m.a(x).T.reshape(-1)).view(3, 3),
    "targets": lambda m, x: F.cross_entropy(
        m.a(x[:, None].expand(3, 3, 3)).transpose(0, 1).reshape(9, 3),
        (x > 0).long().reshape(-1),
        reduction="none",
    ).view(3, 3),
}
# Data that all samples share, or that moves with them, is beside no other sample.
ALONG: dict[str, Program] = {
    "moved along": lambda m, x: (x.T + m.a(x).T).T,
    "constant": lambda m, x: (m.a(x).T + torch.ones(3, 3, dtype=x.dtype).triu()).T,
    "buffer": lambda m, x: (m.a(x).T * m.table).T,
    "context": lambda m, x: m.a(x) + x.T,
    "flat along": lambda m, x: (x.T.reshape(-1) * m.a(x).T.reshape(-1)).view(3, 3).T,
    "two views": lambda m, x: (m.a(x.repeat(2, 1)) * (2 * x).repeat(2, 1)).view(2, 3, 3).sum(0),
    "shared by all rows": lambda m, x: (x @ m.a(x).T).T,
}
# Data of other samples is the context of the rows that it is beside: row n is sample n's.
CONTEXT: dict[str, Program] = {
    "bilinear": lambda m, x: F.bilinear(m.a(x), x.flip(0), m.pairs),
    "einsum of three": lambda m, x: torch.einsum("bi,bj,ij->b", m.a(x), x.flip(0), m.w),
    "addmm": lambda m, x: torch.addmm(x.flip(0), m.a(x), m.w),
    "addcmul": lambda m, x: torch.addcmul(x.flip(0), m.a(x), m.s),
    "where": lambda m, x: torch.where(x.flip(0) > 0, m.a(x), m.s),
    "product": lambda m, x: m.a(x) * x.flip(0),
    "mixup": lambda m, x: m.a(0.3 * x + 0.7 * x.flip(0)),
    "mixup of tokens": lambda m, x: F.embedding((x + x.roll(1, 0) > 0).long(), m.w).sum(1),
    "cutmix": lambda m, x: m.a(with_columns_of(x, x.flip(0))),
    "partner in a row": lambda m, x: m.a(torch.stack([x, x.roll(1, 0)], 1)).sum(1),
}
# Rows that move with their data, or are picked by data, are still those of one sample each.
TOGETHER: dict[str, Program] = {
    "both moved": lambda m, x: m.b(x.flip(0) + m.a(x).flip(0)).flip(0),
    "loss of moved targets": lambda m, x: F.mse_loss(moved(m, x), x.flip(0), reduction="none").flip(
        0
    ),
    "joined in a row": lambda m, x: torch.cat([x, moved(m, x)]).view(2, -1, 3)[1].flip(0),
    "written into zeros": lambda m, x: (
        with_columns_of(
            with_columns_of(torch.zeros_like(x), moved(m, x)).flip(1), moved(m, x).flip(1)
        )
        .flip(1)
        .flip(0)
    ),
    "picked rows": lambda m, x: m.a(x)[x[:, 0].argsort()][x[:, 0].argsort().argsort()],
}


def batch(count: int) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("count", [4, 3])
@pytest.mark.parametrize("quantity", [pergrad.Grads, pergrad.Norms])
@pytest.mark.parametrize("name", [*MOVED, *WITH_WEIGHTS])
def test_rows_beside_data_of_other_samples_are_refused(
    name: str, quantity: Any, count: int
) -> None:
    for programs in (MOVED, WITH_WEIGHTS):
        if name in programs:
            own, x = model(programs[name]), batch(count)
            with (
                pytest.raises(pergrad.PergradError, match="samples"),
                pergrad.record(own, quantity()),
            ):
                own(x).square().sum().backward()
            with pytest.raises(pergrad.PergradError):
                pergrad.grads(own, losses, x)


def losses(own: nn.Module, x: Tensor) -> Tensor:
    return own(x).reshape(len(x), -1).square().sum(1)


# The graph decides, and a trace has no values to prove it with: such a step runs uncompiled, and says so.
@pytest.mark.filterwarnings("ignore:pergrad.compiled")
@pytest.mark.parametrize("count", [4, 3])
@pytest.mark.parametrize("name", CONTEXT)
def test_data_of_other_samples_is_the_context_of_rows_in_order(name: str, count: int) -> None:
    own, x = model(CONTEXT[name]), batch(count)
    _, expected = rows_of_losses(own, losses, x)
    found = [pergrad.grads(own, losses, x)]
    with pergrad.record(own, pergrad.Grads()) as block:
        own(x).square().sum().backward()
    found.append(block.result)
    compiled = pergrad.Grads()
    step = pergrad.compiled(own, losses, compiled, backend="eager")
    for _ in range(3):
        step(x)
        found.append(compiled.result)
    for rows in found:
        for name_of_weight, grad in expected.items():
            assert_near(rows[name_of_weight], grad, name_of_weight)


@pytest.mark.parametrize("quantity", [pergrad.Grads, pergrad.Norms])
@pytest.mark.parametrize("name", ACROSS)
def test_rows_across_data_of_all_samples_are_refused(name: str, quantity: Any) -> None:
    own, x = model(ACROSS[name]), batch(3)
    with pytest.raises(pergrad.PergradError, match="samples"), pergrad.record(own, quantity()):
        own(x).square().sum().backward()
    with pytest.raises(pergrad.PergradError):
        pergrad.grads(own, losses, x)


def test_losses_of_each_sample_tell_whose_rows_are_beside_data_in_another_dimension() -> None:
    """A mask that is given with positions first is read as (B, T) where there are as many of both."""
    own = model(lambda m, x, mask: (m.a(x).transpose(0, 1) * mask[:, :, None]).transpose(0, 1))
    x, mask = torch.stack([batch(3)] * 3, 1), (batch(3) > 0).double()
    _, expected = rows_of_losses(own, squares, x, mask)
    for _ in range(2):
        for name, rows in pergrad.grads(own, squares, x, mask).items():
            assert_near(rows, expected[name], name)
    for _ in range(2):
        with pytest.raises(pergrad.PergradError), pergrad.record(own, pergrad.Norms()):
            squares(own, x, mask).sum().backward()


@pytest.mark.parametrize("name", ALONG)
def test_data_that_goes_along_with_rows_in_another_dimension_is_exact(name: str) -> None:
    own, x = model(ALONG[name]), batch(3)
    own.register_buffer("table", torch.randn(3, 3, dtype=x.dtype))
    _, expected = rows_of_losses(own, losses, x)
    rows = pergrad.grads(own, losses, x)
    with pergrad.record(own, pergrad.Grads()) as block:
        own(x).square().sum().backward()
    for name_of_weight, grad in expected.items():
        assert_near(rows[name_of_weight], grad, name_of_weight)
        assert_near(block.result[name_of_weight], grad, name_of_weight)


@pytest.mark.parametrize("name", TOGETHER)
def test_rows_that_move_with_their_data_are_exact(name: str) -> None:
    own, x = model(TOGETHER[name]), batch(4)
    _, expected = rows_of_losses(own, squares, x)
    rows = pergrad.grads(own, squares, x)
    with pergrad.record(own, pergrad.Grads()) as block:
        own(x).square().sum().backward()
    for name_of_weight, grad in expected.items():
        assert_near(rows[name_of_weight], grad, name_of_weight)
        assert_near(block.result[name_of_weight], grad, name_of_weight)
