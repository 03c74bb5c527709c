"""The judge of every layout: which samples each element of a result depends on, by plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.collecting.grad_samples import GradSampleSink
from pergrad.engine.collecting.ledger import UseCounter
from pergrad.engine.intercepting.recorder import Recorder
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.samples.layouts import Constant, Layout, Lost, Owners, Samples, Scope
from pergrad.engine.samples.propagation import tensors_in
from pergrad.engine.samples.proving import note
from pergrad.runtime import internals

__all__ = ["Batched", "assert_followed", "follow", "recording"]


@dataclass(frozen=True)
class Batched:
    """An input whose dimension `dim` belongs to the samples, by pre and post or by a list of owners."""

    shape: tuple[int, ...]
    dim: int = 0
    pre: int = 1
    post: int = 1
    owners: tuple[int, ...] | None = None

    def __str__(self) -> str:
        where = f"of {self.owners}" if self.owners else f"times ({self.pre}, {self.post})"
        return f"{self.shape} dim {self.dim} {where}"

    def layout(self, scope: Scope) -> Samples | Owners:
        if self.owners is not None:
            return Owners(scope, self.dim, torch.tensor(self.owners))
        return scope.samples(self.dim, self.pre, self.post)

    def owner_of_each(self, scope: Scope) -> Tensor:
        """The sample of each element."""
        owner = self.layout(scope).owner_of_each(torch.device("cpu"))
        return owner.view([-1 if d == self.dim else 1 for d in range(len(self.shape))]).expand(
            self.shape
        )


@dataclass(frozen=True)
class Followed:
    """A result, its layout, and the truth: (*shape, count), whether the element needs the sample."""

    value: Tensor
    layout: Layout
    needs: Tensor


def follow(
    count: int, function: Callable[..., Any], *inputs: Batched, constants: tuple[Tensor, ...] = ()
) -> list[Followed]:
    """Run function(*inputs, *constants) under a recorder of `count` samples; one entry an output.

    Outputs without gradients are left out: nothing tells what they depend on.
    """
    scope = Scope(count)
    random = torch.Generator().manual_seed(1)
    xs = [
        torch.randn(i.shape, generator=random, dtype=torch.float64).requires_grad_() for i in inputs
    ]
    outputs = _run(function, *xs, *constants)  # the recorder may refuse a backward: not this one
    with recording(scope) as tracker:
        uses = [_use(x, i.layout(scope), tracker) for x, i in zip(xs, inputs, strict=True)]
        recorded = _run(function, *uses, *constants)
        layouts = [tracker.layout(y) for y in recorded]
    owners = [i.owner_of_each(scope) for i in inputs]
    return [
        Followed(y, layout, _needs(y, xs, owners, count))
        for y, layout in zip(outputs, layouts, strict=True)
        if y.requires_grad
    ]


def _use(x: Tensor, layout: Samples | Owners, tracker: Tracker) -> Tensor:
    """x as a rule would give it: a result of a use of a weight, with a note in the graph."""
    with internals.DisableTorchFunction():
        use = x * 1
        note(use, layout)
    tracker.mark(use, layout)
    return use


@contextmanager
def recording(scope: Scope) -> Iterator[Tracker]:
    """Within, functions are followed as in a module's forward: what is not marked is constant."""
    tracker = Tracker(scope, 0)
    tracker.untagged_are_constant = True
    recorder = Recorder({})
    recorder.begin(tracker, UseCounter(), GradSampleSink({}, 1))
    with recorder:
        yield tracker


def _run(function: Callable[..., Any], *args: Tensor) -> list[Tensor]:
    torch.manual_seed(0)  # for those that draw
    return list(tensors_in(function(*args)))


def _needs(y: Tensor, xs: list[Tensor], owners: list[Tensor], count: int) -> Tensor:
    needs = torch.zeros(y.numel(), count, dtype=torch.bool)
    for k, element in enumerate(y.flatten()):
        gradients = torch.autograd.grad(element, xs, retain_graph=True, allow_unused=True)
        for gradient, owner in zip(gradients, owners, strict=True):
            if gradient is not None:
                needs[k, owner[gradient != 0]] = True
    return needs.view(*y.shape, count)


def has_place(needs: Tensor) -> bool:
    """Whether some dimension tells the samples apart: each of its indices needs one at most."""
    *shape, count = needs.shape
    if not needs.numel():
        return True
    return any(
        int(needs.movedim(d, 0).reshape(size, -1, count).any(1).sum(-1).max()) <= 1
        for d, size in enumerate(shape)
    )


def assert_true(followed: Followed) -> None:
    """The layout claims nothing false: whatever is not of its sample, or constant, does not depend."""
    y, layout, needs = followed.value, followed.layout, followed.needs
    if isinstance(layout, Lost):
        return
    if isinstance(layout, Constant):
        assert not needs.any(), f"constant, but depends on the samples {needs.nonzero().tolist()}"
        return
    size = y.shape[layout.dim] if y.dim() else 1  # a scalar may be of one sample
    assert size == layout.size, f"{layout} of a tensor {tuple(y.shape)}"
    owner = layout.owner_of_each(y.device)
    own = torch.nn.functional.one_hot(owner, needs.shape[-1]).bool()
    own = own.view([*(-1 if d == layout.dim else 1 for d in range(y.dim())), needs.shape[-1]])
    assert not (needs & ~own).any(), f"{layout} of a tensor {tuple(y.shape)}: not its samples"


def assert_followed(
    count: int,
    function: Callable[..., Any],
    *inputs: Batched,
    constants: tuple[Tensor, ...] = (),
    exact: bool = True,
) -> None:
    """No layout claims anything false, and, if `exact`, none is lost that a layout could describe."""
    results = follow(count, function, *inputs, constants=constants)
    assert results, "nothing to judge"
    for followed in results:
        assert_true(followed)
        if exact and isinstance(followed.layout, Lost):
            assert not has_place(followed.needs), f"lost: {followed.layout.reason}"
