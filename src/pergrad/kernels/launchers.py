"""Imports all launchers; needs Triton."""

from __future__ import annotations

from pergrad.kernels.columns import column_squared_norms, column_sums
from pergrad.kernels.convolution import (
    convolution_by_gram,
    convolution_by_tiles,
    convolution_gram_is_cheaper,
    convolution_gram_microseconds,
    convolution_tile_microseconds,
    one_tap_microseconds,
)
from pergrad.kernels.depthwise import depthwise_gradients
from pergrad.kernels.gram import (
    gram_microseconds,
    gram_squared_norms,
    mended_squared_norms,
)
from pergrad.kernels.launching import float32_precision
from pergrad.kernels.rank_one import rank_one_squared_norms
from pergrad.kernels.scaled import scaled_samples
from pergrad.kernels.table import table_squared_norms
from pergrad.kernels.tile import tile_microseconds, tile_squared_norms
from pergrad.kernels.weighted_rows import weighted_rows
from pergrad.kernels.weighted_sum import mend_weighted_outer_products, weighted_outer_products

__all__ = [
    "column_squared_norms",
    "column_sums",
    "convolution_by_gram",
    "convolution_by_tiles",
    "convolution_gram_is_cheaper",
    "convolution_gram_microseconds",
    "convolution_tile_microseconds",
    "depthwise_gradients",
    "float32_precision",
    "gram_microseconds",
    "gram_squared_norms",
    "mend_weighted_outer_products",
    "mended_squared_norms",
    "one_tap_microseconds",
    "rank_one_squared_norms",
    "scaled_samples",
    "table_squared_norms",
    "tile_microseconds",
    "tile_squared_norms",
    "weighted_outer_products",
    "weighted_rows",
]
