"""Compiled steps that move rows by value: the graph takes each sample to keep its own, and looks later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad
from pergrad.engine.compiling.step import CompiledStep
from pergrad.errors import ScopeError
from pergrad.testing import assert_near, loop_grads

IMAGE = 7  # the token that stands for a row of an image


class Pictures(nn.Module):
    """Puts projected rows of images where the tokens ask for them, as LLaVA does."""

    def __init__(self, *, joins: bool = False) -> None:
        super().__init__()
        self.embed, self.project = nn.Embedding(8, 4), nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)
        self.joins = joins

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        rows = self.project(images)
        if self.joins:
            rows = torch.cat(list(rows.unbind(0)), dim=0)
        h = self.embed(ids)
        h = h.masked_scatter((ids == IMAGE).unsqueeze(-1).expand_as(h), rows.to(h.dtype))
        return self.last(h.cumsum(1).tanh()).sum((1, 2))


def losses(model: nn.Module, *batch: Tensor) -> Tensor:
    found: Tensor = model(*batch)
    return found


def pictures(places: list[list[int]]) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 7, (len(places), 6))
    for sample, own in enumerate(places):
        ids[sample, own] = IMAGE
    return ids, torch.randn(len(places), 2, 3, dtype=torch.float64)


def compiled(model: nn.Module, loss: Callable[..., Tensor] = losses) -> tuple[Any, Any, Any]:
    grads, norms = pergrad.Grads(), pergrad.Norms()
    return pergrad.compiled(model, loss, grads, norms, backend="eager"), grads, norms


def check(step: Any, grads: Any, norms: Any, model: nn.Module, batch: Any) -> None:
    step(*batch)
    wanted = loop_grads(model, losses, *batch)
    for name, g in wanted.items():
        assert_near(grads.result[name], g)
    squares = [g.flatten(1).square().sum(1) for g in wanted.values()]
    assert_near(norms.result, torch.stack(squares).sum(0).sqrt())


@pytest.mark.parametrize("joins", [False, True])
def test_rows_of_images_go_to_the_samples_that_have_places_for_them(joins: bool) -> None:
    torch.manual_seed(0)
    model = Pictures(joins=joins).double()
    step, grads, norms = compiled(model)
    for places in ([[0, 1], [2, 3], [1, 5]], [[4, 5], [0, 2], [3, 4]], [[0, 5], [1, 2], [1, 3]]):
        check(step, grads, norms, model, pictures(places))
    assert step.graphs == 1


def test_a_batch_whose_samples_get_rows_of_others_is_not_computed_by_the_graph() -> None:
    torch.manual_seed(0)
    model = Pictures().double()
    step, grads, norms = compiled(model)
    for _ in range(2):
        check(step, grads, norms, model, pictures([[0, 1], [2, 3], [1, 5]]))
    assert step.graphs == 1
    with pytest.raises(pergrad.PergradError, match="masked_scatter"):
        step(*pictures([[0], [1, 2, 3], [1, 5]]))  # the second sample gets a row of the first
    with pytest.raises(ScopeError):
        norms.result  # noqa: B018
    check(step, grads, norms, model, pictures([[0, 3], [2, 3], [1, 5]]))
    assert step.graphs == 1


class TracedOtherwise(Pictures):
    """Computes something else when it is traced, as some models of libraries do."""

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        found = super().forward(ids, images)
        return found * 2 if type(ids) is not Tensor else found


def test_a_model_that_computes_something_else_when_traced_stays_uncompiled() -> None:
    torch.manual_seed(0)
    model = TracedOtherwise().double()
    step, grads, norms = compiled(model)
    check(step, grads, norms, model, pictures([[0, 1], [2, 3], [1, 5]]))
    with pytest.warns(UserWarning, match="gives other losses than an uncompiled run"):
        check(step, grads, norms, model, pictures([[0, 1], [2, 3], [1, 5]]))
    assert step.graphs == 0


class Adapters(nn.Module):
    """Sends each sample to the adapter of its language, which depends on no input, as X-MOD does."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        language = torch.cat([torch.zeros(1), torch.ones(len(x) - 1)])
        found = torch.zeros_like(x)
        for number, adapter in enumerate(self.adapters):
            mask = language == number
            found[mask] = adapter(x[mask])
        return found.tanh().sum((1, 2))


def test_masks_that_no_input_decides_select_rows() -> None:
    torch.manual_seed(0)
    model = Adapters().double()
    step, grads, _ = compiled(model)
    for _ in range(3):
        x = torch.randn(4, 2, 3, dtype=torch.float64)
        step(x)
        with pergrad.record(
            model, pergrad.Grads()
        ) as wanted:  # samples are told apart by their place
            model(x).sum().backward()
        for name, g in wanted.result.items():
            assert_near(grads.result[name], g)
            assert bool(g.any())
    assert step.graphs == 1


class Positions(nn.Module):
    """Makes a range between two positions in the dtype of the model, as Funnel does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(0, x.shape[1], dtype=torch.float64)
        last = places[-1] - places[0]
        index = torch.arange(last, -1, -1, dtype=torch.long)
        return (x * self.table(index)).sum((1, 2)).tanh()


def test_ranges_between_known_positions_have_a_size() -> None:
    torch.manual_seed(0)
    model = Positions().double()
    step, grads, norms = compiled(model)
    for _ in range(3):
        check(step, grads, norms, model, (torch.randn(4, 5, 3, dtype=torch.float64),))
    assert step.graphs == 1


class Masked(torch.autograd.Function):
    """A softmax over a mask of integers or bools, as SEW-D has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        out = F.softmax(x.masked_fill(~mask.bool(), -1e9), -1)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        g = gradients[0] * out
        return g - out * g.sum(-1, keepdim=True), None


class Attends(nn.Module):
    def __init__(self, *, by_input: bool) -> None:
        super().__init__()
        self.first, self.by_input = nn.Linear(3, 3), by_input

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        known = torch.ones(len(x), 3, dtype=torch.long)
        return (Masked.apply(h, x > 0 if self.by_input else known) * h).sum(1)


@pytest.mark.parametrize("by_input", [False, True])
def test_an_autograd_function_with_a_mask_is_probed_during_a_trace(by_input: bool) -> None:
    torch.manual_seed(0)
    model = Attends(by_input=by_input).double()
    step, grads, norms = compiled(model)
    for _ in range(3):
        check(step, grads, norms, model, (torch.randn(4, 3, dtype=torch.float64),))
    assert step.graphs == 1


class Sorted(nn.Module):
    """Sorts rows by value, changes them, and adds them up where they came from, as experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        order = rows[:, 0].argsort()
        changed = self.first(rows[order]).tanh()
        where = (order + shift[0]) % len(rows)
        found = torch.zeros_like(rows).index_add(0, where, changed)
        return self.last(found).unflatten(0, x.shape[:2]).square().sum((1, 2))


def test_rows_that_are_added_up_where_they_came_from_keep_their_samples() -> None:
    torch.manual_seed(0)
    model = Sorted().double()
    step, grads, norms = compiled(model)
    none = torch.zeros(4, dtype=torch.long)
    for _ in range(3):
        check(step, grads, norms, model, (torch.randn(4, 2, 3, dtype=torch.float64), none))
    assert step.graphs == 1
    with pytest.raises(pergrad.PergradError, match="row n of the losses"):
        step(torch.randn(4, 2, 3, dtype=torch.float64), none + 2)  # rows go to the next sample
    check(step, grads, norms, model, (torch.randn(4, 2, 3, dtype=torch.float64), none))


def test_a_graph_is_compared_with_an_uncompiled_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            runs.append(True)
            return method(*args)

        return run

    for name in ("_expected", "_repeats"):
        monkeypatch.setattr(CompiledStep, name, counted(getattr(CompiledStep, name)))
    model = Pictures().double()
    step, *_ = compiled(model)
    batch = pictures([[0, 2], [1, 5], [3, 4]])
    for _ in range(2):
        step(*batch)
    assert step.graphs == 1
    first = len(runs)
    assert first
    for _ in range(2):
        step(*batch)
    assert len(runs) == first
