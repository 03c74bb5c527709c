"""Defines lazy per-sample gradients, one class for each structure."""

from pergrad.factors.base import ALL, Dense, Factor
from pergrad.factors.convolution import Convolution
from pergrad.factors.joining import add_up, joined
from pergrad.factors.products import (
    ElementProduct,
    NormalizedProduct,
    OuterProduct,
    PositionSum,
    sums_by_groups,
)
from pergrad.factors.rearranging import Rearranged, in_any_order
from pergrad.factors.routed import Routed
from pergrad.factors.rows import ByOwner, RowSum, Stacked, owned
from pergrad.factors.scaling import Scaled
from pergrad.factors.tables import sums_by_row

__all__ = [
    "ALL",
    "ByOwner",
    "Convolution",
    "Dense",
    "ElementProduct",
    "Factor",
    "NormalizedProduct",
    "OuterProduct",
    "PositionSum",
    "Rearranged",
    "Routed",
    "RowSum",
    "Scaled",
    "Stacked",
    "add_up",
    "in_any_order",
    "joined",
    "owned",
    "sums_by_groups",
    "sums_by_row",
]
