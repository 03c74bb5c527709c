"""Calls of torch's own database of operators, with samples in any dimension of any of their arguments."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pergrad.engine.samples.layouts import Constant, Lost, Owners, Samples, Scope
from pergrad.engine.samples.propagation import tensors_in
from pergrad.engine.samples.proving import is_total
from pergrad.errors import PergradError
from pergrad.runtime import internals
from tests.engine.samples.propagation.dependence import Followed, _needs, assert_true, recording

__all__ = ["Placing", "judged", "placings"]

Placing = dict[int, int]  # the dimension of the samples, by the position of the tensor


def placings(tensors: list[Tensor], most: int, seed: int = 0) -> Iterator[tuple[int, Placing]]:
    """Yields batch sizes and places for the samples in some of the tensors."""
    found: list[tuple[int, Placing]] = []
    for count in sorted({s for t in tensors for s in t.shape if 2 <= s <= 6}):
        choices = [[None, *(d for d, s in enumerate(t.shape) if s == count)] for t in tensors]
        for places in itertools.islice(itertools.product(*choices), 64):
            placing = {k: d for k, d in enumerate(places) if d is not None}
            if placing:
                found.append((count, placing))
    random.Random(seed).shuffle(found)
    yield from found[:most]


def judged(op: Any, sample: Any, count: int, placing: Placing) -> str:
    """Runs one call under a recorder and judges the layouts of its results; returns what happened.

    An AssertionError means that a layout claims something false.
    """
    leaves, spec = internals.pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [k for k, v in enumerate(leaves) if isinstance(v, Tensor) and v.is_floating_point()]
    xs = [leaves[k].detach().clone().requires_grad_() for k in places]
    for k, x in zip(places, xs, strict=True):
        leaves[k] = x

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        given, args, kwargs = internals.pytree.tree_unflatten(leaves, spec)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tensors_in(op.op(given, *args, **kwargs))

    try:
        plain = [y for y in run() if y.requires_grad]
    except Exception:
        return "not differentiable"
    if not plain or sum(y.numel() for y in plain) > 300:
        return "not judged"
    scope = Scope(count)
    with recording(scope) as tracker:
        for k, dim in placing.items():
            tracker.mark(xs[k], scope.samples(dim))
        try:
            layouts = [tracker.layout(y) for y in run() if y.requires_grad]
        except PergradError:
            return "refused"
    owners, marked = [], []
    for k, dim in placing.items():
        x, size = xs[k], [-1 if d == dim else 1 for d in range(xs[k].dim())]
        owners.append(torch.arange(count).view(size).expand(x.shape))
        marked.append(x)
    sources: Any = [(xs[k], scope.samples(dim)) for k, dim in placing.items()]
    for y, layout in zip(plain, layouts, strict=True):
        try:
            needs = _needs(y, marked, owners, count)
        except RuntimeError:
            return "no backward"
        if not _is_finite(y, marked):
            return "not finite"  # a NaN reaches all samples
        assert_true(Followed(y, layout, needs))
        if isinstance(layout, Lost) and layout.why == "cut":
            assert not (needs.sum(-1) > 1).any(), f"cut, but mixed: {layout.reason}"
        if isinstance(layout, Lost) and layout.why == "total" and y.is_floating_point():
            assert _is_sum(y, sources), f"no sum over the samples: {layout.reason}"
    kinds = {type(layout) for layout in layouts}
    return "followed" if kinds <= {Samples, Owners, Constant} else "lost"


def _is_finite(y: Tensor, xs: list[Tensor]) -> bool:
    found = torch.autograd.grad(y.sum(), xs, retain_graph=True, allow_unused=True)
    return all(g is None or bool(g.isfinite().all()) for g in found)


def _is_sum(y: Tensor, sources: Any) -> bool:
    """Whether y is a sum over the samples; one without a second derivative is believed."""
    try:
        gradients = torch.autograd.grad(
            y.sum(), [x for x, _ in sources], retain_graph=True, allow_unused=True
        )
        is_flat = all(g is None or float(g.abs().max()) < 1e-12 for g in gradients)
        return is_flat or is_total(y, sources)
    except RuntimeError as error:
        return "is not implemented" in str(error)
