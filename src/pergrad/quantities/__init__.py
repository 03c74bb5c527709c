"""Reductions of per-sample gradients, one a file."""

from pergrad.quantities.base import Batch, Quantity
from pergrad.quantities.grads import Grads

__all__ = ["Batch", "Grads", "Quantity"]
