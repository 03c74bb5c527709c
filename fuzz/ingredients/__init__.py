"""Holds the ingredients of programs, one family in a file; importing this package fills the table."""

from fuzz.ingredients import (
    control,
    indexing,
    layers,
    mixing,
    opaque,
    parameters,
    products,
    shapes,
    views,
    weights,
)

__all__ = [
    "control",
    "indexing",
    "layers",
    "mixing",
    "opaque",
    "parameters",
    "products",
    "shapes",
    "views",
    "weights",
]
