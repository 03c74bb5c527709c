"""Compares the gradients of a model with those of the loop."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

__all__ = ["AUTOCAST_TOLERANCE", "Gradients", "WrongGradientsError", "compare", "compare_rounded"]

Gradients: TypeAlias = dict[str, Tensor]

# Under autocast products are rounded to bfloat16, those of a sample alone otherwise than those of a batch.
# The loop may be off by this much, or by twice what it is off from the loop in float32; the sum over the
# samples from the ordinary gradient by no more. A sample taken for another one, or a factor of two, is off
# by about one.
AUTOCAST_TOLERANCE = 0.1


class WrongGradientsError(AssertionError):
    """Further from the loop's than rounding goes."""


def compare(found: Gradients, expected: Gradients, tolerance: float, least: float = 1e-6) -> float:
    """The largest error, relative to the largest element of a parameter's gradient.

    A parameter's gradient counts as no smaller than `least` times the largest one of the model.
    """
    if found.keys() != expected.keys():
        raise WrongGradientsError(f"of {sorted(found)} instead of {sorted(expected)}")
    largest = {name: g.abs().max().item() if g.numel() else 0.0 for name, g in expected.items()}
    # Some gradients are zero but for rounding: that of a key's bias, which softmax does not see.
    floor = least * max(largest.values())
    assert floor > 0, "no parameter has a gradient"
    errors: dict[str, float] = {}
    for name, g in expected.items():
        if found[name].shape != g.shape:
            raise WrongGradientsError(f"{name}: {found[name].shape} instead of {g.shape}")
        if g.numel():
            errors[name] = (found[name] - g).abs().max().item() / max(largest[name], floor)
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if wrong:
        raise WrongGradientsError(f"{len(wrong)} of {len(expected)} parameters: {wrong}")
    return max(errors.values())


def compare_rounded(
    found: Gradients, expected: Gradients, exact: Gradients, ordinary: Gradients
) -> float:
    """The largest distance of a sample's gradient from the loop's, relative to the parameter's longest.

    Both are rounded; `exact` is the loop's unrounded, `ordinary` torch's own of the batch. Parameters whose
    gradients are shorter than a hundredth of the model's longest are noise to this, as a key's bias is.
    """
    lengths = {name: _longest(g) for name, g in expected.items() if g.numel()}
    floor = 1e-2 * max(lengths.values())
    assert floor > 0, "no parameter has a gradient"
    errors: dict[str, float] = {}
    wrong: dict[str, str] = {}
    undecided: list[str] = []  # a router's weight may be rounding and nothing else
    for name, length in lengths.items():
        scale, loop = max(length, floor), expected[name]
        errors[name] = _longest(found[name] - loop) / scale
        of_sum = _longest((found[name].sum(0) - ordinary[name]).unsqueeze(0)) / scale
        allowed = max(AUTOCAST_TOLERANCE, 2 * _longest(loop - exact[name]) / scale)
        mixed_up = _longest(loop - loop.roll(1, 0)) / scale
        if not errors[name] <= allowed or not of_sum <= allowed:
            wrong[name] = f"{errors[name]:.3f}, in sum {of_sum:.3f}"
        if length > floor and len(loop) > 1 and mixed_up <= allowed:
            undecided.append(name)
    if len(undecided) > max(1, len(lengths) // 10):
        wrong.update(dict.fromkeys(undecided, "rounding hides what a mix-up would do"))
    if wrong:
        raise WrongGradientsError(f"{len(wrong)} of {len(expected)} parameters: {wrong}")
    return max(errors.values())


def _longest(rows: Tensor) -> float:
    return rows.reshape(len(rows), -1).norm(dim=1).max().item()
