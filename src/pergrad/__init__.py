"""Per-sample gradients in PyTorch."""

from pergrad.engine import (
    ExpandedWeight,
    call_for_per_sample_grads,
    explain,
    grads,
    record,
    verify,
)
from pergrad.errors import PergradError
from pergrad.quantities import Grads
from pergrad.rules import implements_per_sample_grads

__version__ = "0.1.0"

__all__ = [
    "ExpandedWeight",
    "Grads",
    "PergradError",
    "__version__",
    "call_for_per_sample_grads",
    "explain",
    "grads",
    "implements_per_sample_grads",
    "record",
    "verify",
]
