"""Computes every quantity from the gradients of the loop over samples, by its definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import pergrad
from pergrad.factors import Dense
from pergrad.quantities import Quantity
from pergrad.reductions import CountSketch, SampleGradients, TwoSidedSketch
from pergrad.testing import assert_near, loop_grads

__all__ = [
    "BOUND",
    "LINEAR",
    "NAMES",
    "assert_is_quantity_of",
    "check_all",
    "direction_of",
    "flat",
    "losses",
    "quantity",
]

BOUND = 0.7
Gradients = Mapping[str, Tensor]  # (n, *shape) of each parameter


def losses(model: Callable[..., Any], *batch: Any) -> Tensor:
    """(B,): every entry of the output counts differently."""
    output = model(*batch)
    return ((output + 0.5) ** 3 / 3).flatten(1).sum(1)


def flat(grads: Gradients) -> Tensor:
    """(n, all entries)."""
    return torch.cat([g.reshape(len(g), -1) for g in grads.values()], 1)


def direction_of(shapes: Mapping[str, Tensor], count: int | None = None) -> dict[str, Tensor]:
    """A direction, or several, for parameters by name: fixed numbers."""
    random = torch.Generator().manual_seed(5)
    size = () if count is None else (count,)
    return {
        name: torch.randn((*size, *p.shape), generator=random, dtype=torch.float64)
        for name, p in shapes.items()
    }


_BUILDERS: dict[str, Callable[[Mapping[str, Tensor]], Quantity]] = {
    "grads": lambda _: pergrad.Grads(),
    "norms": lambda _: pergrad.Norms(),
    "clipped": lambda _: pergrad.ClippedSum(BOUND),
    "clipped, low memory": lambda _: pergrad.ClippedSum(BOUND, memory="low"),
    "normalized": lambda _: pergrad.ClippedSum(BOUND, weighting="normalize"),
    "sum": lambda _: pergrad.Sum(),
    "second moment": lambda _: pergrad.SecondMoment(),
    "variance": lambda _: pergrad.Variance(),
    "noise": lambda _: pergrad.NoiseScale(),
    "dots": lambda p: pergrad.Dots(direction_of(p)),
    "gram": lambda _: pergrad.Gram(),
    "gram against": lambda p: pergrad.Gram(against=direction_of(p, 2)),
    "count sketch": lambda _: pergrad.Projection(9, seed=2),
    "two-sided sketch": lambda _: pergrad.Projection(12, method="two_sided"),
}
NAMES = list(_BUILDERS)
LINEAR = ["grads", "sum", "dots", "gram against", "count sketch", "two-sided sketch"]


def quantity(name: str, parameters: Mapping[str, Tensor]) -> Quantity:
    """A fresh one, for parameters (or gradients of one sample) by name."""
    return _BUILDERS[name](parameters)


def assert_is_quantity_of(found: Any, grads: Gradients, what: str) -> None:
    """The result is what the gradients of the samples say, to 1e-9."""
    g = flat(grads)
    norms = g.norm(dim=1)
    if isinstance(found, pergrad.Grads):
        _assert_all_near(found.result, grads, what)
    elif isinstance(found, pergrad.Norms):
        assert_near(found.result, norms, what)
        each = {name: flat({name: rows}).norm(dim=1) for name, rows in grads.items()}
        _assert_all_near(found.per_param, each, what)
    elif isinstance(found, pergrad.ClippedSum):
        weights = (BOUND / norms).clamp(max=1)
        if found.settings[1] == "normalize":
            weights = BOUND / (norms + 0.01)
        sums = {name: torch.tensordot(weights, rows, 1) for name, rows in grads.items()}
        _assert_all_near(found.result, sums, what)
        assert_near(found.norms, norms, what)
    elif isinstance(found, pergrad.Sum):
        _assert_all_near(found.result, {name: rows.sum(0) for name, rows in grads.items()}, what)
    elif isinstance(found, pergrad.SecondMoment):
        squares = {name: rows.square().sum(0) for name, rows in grads.items()}
        _assert_all_near(found.result, squares, what)
    elif isinstance(found, pergrad.Variance):
        _assert_all_near(found.mean, {name: rows.mean(0) for name, rows in grads.items()}, what)
        if len(g) > 1:
            spread = {name: rows.var(0) for name, rows in grads.items()}
            _assert_all_near(found.result, spread, what)
    elif isinstance(found, pergrad.NoiseScale):
        if len(g) > 1:
            trace = g.var(0).sum()
            mean = g.mean(0).square().sum() - trace / len(g)
            _assert_floats_near([found.trace, found.squared_mean], [trace, mean], what)
            _assert_floats_near([found.result], [trace / mean], what)
    elif isinstance(found, pergrad.Dots):
        assert_near(found.result, g @ flat(_one(direction_of(_shapes(grads))))[0], what)
    elif isinstance(found, pergrad.Gram):
        others = flat(direction_of(_shapes(grads), 2)) if found.settings else g
        assert_near(found.result, g @ others.T, what)
    elif isinstance(found, pergrad.Projection):
        assert_near(found.result, _sketched(grads, *found.settings), what)
    else:
        raise AssertionError(f"no oracle for {type(found).__name__}")


def _shapes(grads: Gradients) -> dict[str, Tensor]:
    return {name: rows[0] for name, rows in grads.items()}


def _one(direction: Gradients) -> dict[str, Tensor]:
    return {name: t.unsqueeze(0) for name, t in direction.items()}


def _sketched(grads: Gradients, dim: int, seed: int, method: str) -> Tensor:
    """The map itself is tested with the reductions; here: which one, and that parameters add up."""
    total = torch.zeros(1, dtype=torch.float64)
    for name, rows in grads.items():
        kind = TwoSidedSketch if method == "two_sided" and rows.dim() > 2 else CountSketch
        sketch = kind.of(name, rows.shape[1:], dim, seed)
        total = total + SampleGradients([Dense(rows)], bound=2**20).sketch(sketch)
    return total


def _assert_all_near(found: Gradients, expected: Gradients, what: str) -> None:
    assert list(found) == list(expected)
    # Some gradients are zero but for rounding: that of a key's bias, which softmax does not see.
    floor = max(float(t.abs().max()) for t in expected.values()) * 1e-15
    for name, t in expected.items():
        rounding = found[name].abs().max() <= floor and t.abs().max() <= floor
        if not rounding or found[name].shape != t.shape:
            assert_near(found[name], t, f"{what}, {name}")


def _assert_floats_near(found: list[float], expected: list[Tensor], what: str) -> None:
    exact = torch.stack(expected)
    got = torch.tensor(found, dtype=torch.float64)
    torch.testing.assert_close(got, exact, rtol=1e-8, atol=1e-12, msg=lambda m: f"{what}: {m}")


def check_all(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    expected: Gradients | None = None,
    reduce: Callable[[Tensor], Tensor] = torch.sum,
    names: list[str] = NAMES,
    **options: Any,
) -> None:
    """All quantities in one block, from the factors; and again beside the gradients themselves."""
    grads = loop_grads(model, loss_fn, *batch) if expected is None else expected
    structured = [name for name in names if name != "grads"]
    for together in filter(None, (structured, ["grads", *structured])):
        asked = [quantity(name, _shapes(grads)) for name in together]
        with pergrad.record(model, *asked, **options):
            reduce(loss_fn(model, *batch)).backward()
        for name, found in zip(together, asked, strict=True):
            assert_is_quantity_of(found, grads, name)
    assert all(p.grad is None for p in model.parameters())
