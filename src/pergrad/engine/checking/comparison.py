"""Compares per-sample gradients with expected ones, and names the factor that explains a difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pergrad.engine.checking.reports import Verification, VerifyReport
from pergrad.engine.recording.options import LossReduction
from pergrad.quantities import Grads
from pergrad.runtime.tolerances import largest, noise_floor, relative_error, tolerance_of_model

__all__ = ["compare", "factor_off", "spread_out"]

_CLOSE = 1e-2


def compare(
    found: Grads,
    expected: Mapping[int, Mapping[str, Tensor | None]],
    *,
    ordinary: Mapping[str, Tensor] | None = None,
    loss_reduction: LossReduction = "sum",
    how: Callable[[str], str | None] = lambda name: None,
) -> VerifyReport:
    """Compares per-sample gradients with those of some samples alone, and their sum with the ordinary one.

    Args:
        found: the gradients of all samples.
        expected: the gradients of some samples, by their number; None stands for zeros.
        ordinary: the gradient of the whole batch's loss, if known.
        loss_reduction: whether that loss is the sum or the mean of the samples' losses.
        how: names the way in which a parameter's gradients were computed, for its row.
    """
    floor = noise_floor(found.result)
    rows = []
    for name, grads in found.result.items():
        pairs = [(grads[n], alone[name]) for n, alone in expected.items()]
        if ordinary is not None:
            divisor = len(grads) if loss_reduction == "mean" else 1
            pairs.append((grads.sum(0) / divisor, ordinary[name]))
        errors = [
            relative_error(g, torch.zeros_like(g) if wanted is None else wanted, floor)
            for g, wanted in pairs
        ]
        worst = max(errors) if all(e == e for e in errors) else float("nan")
        is_ok = worst <= tolerance_of_model(grads.dtype, found.precision.get(name, grads.dtype))
        verdict = "wrong" if not is_ok else "ok" if bool(grads.any()) else "untouched"
        rows.append(Verification(name, tuple(grads.shape[1:]), how(name) or "-", worst, verdict))
    return VerifyReport(tuple(rows), tuple(expected), (), ())


def spread_out(samples: int, size: int) -> tuple[int, ...]:
    """Chooses up to `samples` of `size` samples, evenly spaced from the first to the last.

    >>> spread_out(4, 10)
    (0, 3, 6, 9)
    """
    return tuple(sorted({round(k * (size - 1) / max(samples - 1, 1)) for k in range(samples)}))


def factor_off(found: Tensor, expected: Tensor, size: int) -> str:
    """Returns the factor that `found` is off by, in words; "" where no single factor explains it.

    >>> factor_off(torch.ones(3), 4 * torch.ones(3), size=4)
    '1/4, exactly one by the batch size: is the loss a mean? Pass loss_reduction="mean"'
    >>> factor_off(torch.ones(3), torch.tensor([1.0, 2.0, 3.0]), size=4)
    ''
    """
    if found.shape != expected.shape:
        return ""
    wide = torch.promote_types(torch.promote_types(found.dtype, expected.dtype), torch.float64)
    a, b = found.detach().to(wide).flatten(), expected.detach().to(found.device, wide).flatten()
    length = float((b.conj() * b).sum().real) if b.numel() else 0.0
    if not length:
        return ""
    factor = float((b.conj() * a).sum().real) / length
    is_explained = largest(a - factor * b) <= _CLOSE * abs(factor) * largest(b)
    if not is_explained or factor == 0 or abs(factor - 1) < _CLOSE:
        return ""
    if size > 1 and abs(factor * size - 1) < _CLOSE:
        return (
            f"1/{size}, exactly one by the batch size: is the loss a mean? "
            'Pass loss_reduction="mean"'
        )
    if size > 1 and abs(factor / size - 1) < _CLOSE:
        return f'{size}, exactly the batch size: is the loss a sum? Pass loss_reduction="sum"'
    return f"a factor of {factor:.4g}"
