"""Compares per-sample gradients with expected ones, and names the factor that explains a difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pergrad.engine.checking.reports import Verification, VerifyReport
from pergrad.engine.recording.options import LossReduction
from pergrad.errors import PergradError
from pergrad.quantities import Grads
from pergrad.runtime.tolerances import largest, noise_floor, relative_error, tolerance_of_model

__all__ = ["compare", "factor_off", "reason_of", "spread_out"]

_CLOSE = 1e-2


def compare(
    found: Grads,
    expected: Mapping[int, Mapping[str, Tensor | None]],
    *,
    ordinary: Mapping[str, Tensor] | None = None,
    loss_reduction: LossReduction = "sum",
    how: Callable[[str], str | None] = lambda name: None,
    rounding: Mapping[str, float] | None = None,
    instead: Callable[[int], Mapping[str, Tensor | None]] | None = None,
) -> VerifyReport:
    """Compares per-sample gradients with those of some samples alone, and their sum with the ordinary one.

    Args:
        found: the gradients of all samples.
        expected: the gradients of some samples, by their number; None stands for zeros.
        ordinary: the gradient of the whole batch's loss, if known.
        loss_reduction: whether that loss is the sum or the mean of the samples' losses.
        how: names the way in which a parameter's gradients were computed, for its row.
        rounding: the size of each parameter's gradient below which it is rounding alone.
        instead: computes a sample's expected gradients in another way, for a second opinion.
    """
    others: dict[int, Mapping[str, Tensor | None]] = {}
    floor = noise_floor(found.result)
    rows = []
    factors: dict[str, list[str]] = {}  # in words -> parameters
    for name, grads in found.result.items():
        limit = tolerance_of_model(grads.dtype, found.precision.get(name, grads.dtype))
        least = max(floor, (rounding or {}).get(name, 0.0) / limit)
        worst, reason = 0.0, ""

        def compared(
            g: Tensor, wanted: Tensor | None, least: float = least, count: int = len(grads)
        ) -> tuple[float, str]:
            wanted = torch.zeros_like(g) if wanted is None else wanted
            return relative_error(g, wanted, least), factor_off(g, wanted, count)

        for n in expected:
            error, why = compared(grads[n], expected[n][name])
            if not error <= limit and instead is not None:
                if n not in others:
                    others[n] = instead(n)
                second = compared(grads[n], others[n][name])
                error, why = second if second[0] <= limit else (error, why)
            if worst == worst and not error <= worst:  # NaN is the worst
                worst, reason = error, why
        if ordinary is not None:
            divisor = len(grads) if loss_reduction == "mean" else 1
            error, why = compared(grads.sum(0) / divisor, ordinary[name])
            if worst == worst and not error <= worst:
                worst, reason = error, reason or why
        is_ok = worst <= limit
        if not is_ok and reason:
            factors.setdefault(reason, []).append(name)
        verdict = "wrong" if not is_ok else "ok" if bool(grads.any()) else "untouched"
        rows.append(Verification(name, tuple(grads.shape[1:]), how(name) or "-", worst, verdict))
    problems = [f"{_some(names)}: off by {reason}" for reason, names in factors.items()]
    return VerifyReport(tuple(rows), tuple(expected), tuple(problems), ())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} others" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def spread_out(samples: int, size: int) -> tuple[int, ...]:
    """Chooses up to `samples` of `size` samples, evenly spaced from the first to the last.

    >>> spread_out(4, 10)
    (0, 3, 6, 9)
    """
    return tuple(sorted({round(k * (size - 1) / max(samples - 1, 1)) for k in range(samples)}))


def reason_of(error: Exception) -> str:
    """Returns the message of an error, with its type unless it is our own; never an empty one.

    >>> reason_of(AssertionError())
    'AssertionError, without a message'
    """
    message, kind = str(error).strip(), type(error).__name__
    if not message:
        return f"{kind}, without a message"
    return message if isinstance(error, PergradError) else f"{kind}: {message}"


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
