"""Compares an answer with the truth, and the state of a model with what plain autograd leaves."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = [
    "BOUND",
    "FAILURES",
    "FoundError",
    "Outcome",
    "Truth",
    "compare",
    "compare_after_refusal",
    "compare_all",
    "compare_grads",
    "compare_state",
    "copied_state",
]

FAILURES = ("wrong", "crash", "state", "poisoned", "certified", "alarm")
BOUND = 0.5  # of clipped sums
_TOLERANCE = 1e-7  # float64; of the largest entry


@dataclass(frozen=True)
class Outcome:
    """What became of a program: "exact", "refused", "invalid", or one of `FAILURES`; and why."""

    kind: str
    why: str = ""
    certificate: str = ""  # "passed", "refused" or empty

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES


class FoundError(Exception):
    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.outcome = Outcome(kind, why)


@dataclass
class Truth:
    losses: Tensor  # (B,)
    grads: dict[str, Tensor]  # (B, *shape)

    def by_sample(self, sample: Tensor) -> Truth:
        """Returns the truth with a row for each sample, where loss m depends on sample[m] alone."""

        def added(rows: Tensor) -> Tensor:
            return torch.zeros_like(rows).index_add(0, sample, rows)

        return Truth(added(self.losses), {name: added(g) for name, g in self.grads.items()})

    @property
    def finite(self) -> Tensor:
        """Which samples have a gradient that is finite, (B,)."""
        return torch.stack([g.isfinite().flatten(1).all(1) for g in self.grads.values()]).all(0)

    @property
    def norms(self) -> Tensor:
        squares = [g.abs().square().flatten(1).sum(1) for g in self.grads.values()]
        return torch.stack(squares).sum(0).sqrt()


def compare_all(
    grads: dict[str, Tensor] | None,
    norms: Tensor | None,
    sums: dict[str, Tensor] | None,
    truth: Truth,
) -> None:
    finite = truth.finite
    if grads is not None:
        compare_grads(grads, truth, finite)
    if norms is not None:
        compare("norms", norms, truth.norms, finite)
    if sums is not None and finite.all():
        weights = (BOUND / truth.norms.clamp_min(1e-300)).clamp_max(1)
        for name, g in truth.grads.items():
            if name not in sums:
                raise FoundError("wrong", f"no clipped sum of {name}")
            want = torch.einsum("n,n...->...", weights.to(g.dtype), g)
            scale = float((weights * g.abs().flatten(1).amax(1)).sum())
            compare(f"clipped sum of {name}", sums[name], want, scale=scale)


def compare_grads(found: dict[str, Tensor], truth: Truth, rows: Tensor | None = None) -> None:
    if set(found) != set(truth.grads):
        raise FoundError("wrong", f"gradients of {sorted(set(found) ^ set(truth.grads))} only once")
    for name, want in truth.grads.items():
        compare(f"gradients of {name}", found[name], want, rows)


def compare(
    what: str, found: Tensor, want: Tensor, rows: Tensor | None = None, scale: float | None = None
) -> None:
    if found.shape != want.shape:
        raise FoundError("wrong", f"{what}: shape {tuple(found.shape)}, not {tuple(want.shape)}")
    if not want.numel():
        return
    if rows is not None:
        found, want = found[rows], want[rows]
        if not want.numel():
            return
    scale = max(float(want.abs().max()) if scale is None else scale, 1e-3)
    error = float((found.detach() - want).abs().max()) / scale
    if not error <= (_TOLERANCE if want.dtype is not torch.float32 else 1e-4):
        raise FoundError("wrong", f"{what}: off by {error:.1e} of the largest entry")


def _state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Lists tensors and numbers that a model holds: parameters, buffers, gradients, attributes."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                for key, tensor in value.items():
                    yield f"{path}.{key}", tensor
                    yield f"{path}.{key}.grad", None if tensor is None else tensor.grad
            elif not name.startswith("_") and isinstance(value, int | float | Tensor | list):
                yield f"{path}.{name}", value


def copied_state(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Returns what a model holds, and copies of it."""
    return {
        name: (value, value.detach().clone() if isinstance(value, Tensor) else copy.copy(value))
        for name, value in _state(model)
        if not is_lazy(value)
    }


def compare_state(plain: nn.Module, model: nn.Module) -> None:
    want, found = dict(_state(plain)), dict(_state(model))
    if want.keys() != found.keys():
        raise FoundError("state", f"attributes {sorted(want.keys() ^ found.keys())}")
    for name, value in want.items():
        if not _is_same(value, found[name]):
            raise FoundError("state", f"{name} is not as plain autograd leaves it")


def compare_after_refusal(before: dict[str, tuple[Any, Any]], model: nn.Module) -> None:
    """Parameters and the statistics of batch norms are as before, if the call was refused."""
    after = dict(_state(model))
    for name, (_, value) in before.items():
        owner = name.removesuffix(".grad")
        kept = (
            owner in before
            and isinstance(after.get(owner), nn.Parameter)
            and after[owner] is before[owner][0]
        )
        kept = kept or name.endswith("num_batches_tracked")
        if kept and not _is_same(value, after.get(name)):
            raise FoundError("state", f"{name} has changed although the call was refused")


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if type(a) is not type(b) and not isinstance(b, nn.Parameter) and type(b) is not Tensor:
            return False
        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and bool(torch.allclose(a.detach(), b.detach(), rtol=1e-9, atol=1e-12, equal_nan=True))
        )
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return type(a) is type(b) and bool(a == b)
