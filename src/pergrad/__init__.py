"""Computes per-sample gradients in PyTorch, and what can be derived from them without holding them."""

import importlib
from typing import Any

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
    Sum,
    Variance,
)
from pergrad.rules import implements_per_sample_grads

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "ClippedSum",
    "Dots",
    "ExpandedWeight",
    "Grads",
    "Gram",
    "Index",
    "NoiseScale",
    "Norms",
    "PergradError",
    "Projection",
    "Quantity",
    "SecondMoment",
    "Sum",
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

_LATE = {"evaluate", "private"}  # packages that are imported when they are first asked for
# Names that need an extra, imported likewise.
_LATE_NAMES = {"Audit": "pergrad.auditing", "Index": "pergrad.index"}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return importlib.import_module(f"pergrad.{name}")
    if name in _LATE_NAMES:
        return getattr(importlib.import_module(_LATE_NAMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Lists the public names alone, for completion."""
    return sorted({*__all__, *_LATE})
