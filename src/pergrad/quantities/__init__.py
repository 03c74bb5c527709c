"""Defines the quantities that users record: norms, clipped sums, moments, dots, sketches and more."""

from pergrad.quantities.base import Batch, Quantity, Reduction, SampleReport
from pergrad.quantities.clipping import ClippedSum
from pergrad.quantities.dots import Dots, Gram
from pergrad.quantities.grads import Grads
from pergrad.quantities.moments import SecondMoment, Variance
from pergrad.quantities.noise import NoiseScale
from pergrad.quantities.norms import Norms
from pergrad.quantities.projection import Projection
from pergrad.quantities.sums import Sum

__all__ = [
    "Batch",
    "ClippedSum",
    "Dots",
    "Grads",
    "Gram",
    "NoiseScale",
    "Norms",
    "Projection",
    "Quantity",
    "Reduction",
    "SampleReport",
    "SecondMoment",
    "Sum",
    "Variance",
]
