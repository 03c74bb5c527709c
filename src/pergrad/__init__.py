"""Computes per-sample gradients in PyTorch, and what can be derived from them without holding them."""

from pergrad.engine import (
    ExpandedWeight,
    call_for_per_sample_grads,
    certify,
    compiled,
    explain,
    grads,
    norms,
    record,
    verify,
)
from pergrad.errors import PergradError
from pergrad.quantities import (
    ClippedSum,
    Dots,
    Grads,
    Gram,
    NoiseScale,
    Norms,
    Projection,
    Quantity,
    SecondMoment,
    Variance,
)
from pergrad.rules import implements_per_sample_grads

__version__ = "0.1.0"

__all__ = [
    "ClippedSum",
    "Dots",
    "ExpandedWeight",
    "Grads",
    "Gram",
    "NoiseScale",
    "Norms",
    "PergradError",
    "Projection",
    "Quantity",
    "SecondMoment",
    "Variance",
    "__version__",
    "call_for_per_sample_grads",
    "certify",
    "compiled",
    "explain",
    "grads",
    "implements_per_sample_grads",
    "norms",
    "record",
    "verify",
]
