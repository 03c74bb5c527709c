"""Lazy per-sample gradients."""

from pergrad.factors.convolution import Convolution
from pergrad.factors.core import (
    ByOwner,
    Dense,
    ElementProduct,
    Factor,
    OuterProduct,
    PositionSum,
    RowSum,
    add_up,
)

__all__ = [
    "ByOwner",
    "Convolution",
    "Dense",
    "ElementProduct",
    "Factor",
    "OuterProduct",
    "PositionSum",
    "RowSum",
    "add_up",
]
