"""Lazy per-sample gradients."""

from pergrad.factors.allocation import empty, is_large
from pergrad.factors.base import ALL, Dense, Factor
from pergrad.factors.convolution import Convolution
from pergrad.factors.joining import add_up, joined
from pergrad.factors.precision import (
    aligned,
    bmm,
    least_trusted,
    mm,
    promoted,
    wide,
    without_autocast,
)
from pergrad.factors.products import (
    ElementProduct,
    NormalizedProduct,
    OuterProduct,
    PositionSum,
    sums_by_groups,
)
from pergrad.factors.rows import ByOwner, RowSum, Stacked, owned
from pergrad.factors.tracing import (
    computed_once,
    is_for_compiler,
    is_traced,
    operation,
    without_compiler,
)

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
    "RowSum",
    "Stacked",
    "add_up",
    "aligned",
    "bmm",
    "computed_once",
    "empty",
    "is_for_compiler",
    "is_large",
    "is_traced",
    "joined",
    "least_trusted",
    "mm",
    "operation",
    "owned",
    "promoted",
    "sums_by_groups",
    "wide",
    "without_autocast",
    "without_compiler",
]
