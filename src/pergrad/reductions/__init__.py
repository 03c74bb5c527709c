"""What can be made of per-sample gradients without holding them, as functions of their factors."""

from pergrad.reductions.batched_launches import SquaredNorms, weighted_sums
from pergrad.reductions.gradients import SampleGradients
from pergrad.reductions.sketches import CountSketch, TwoSidedSketch

__all__ = [
    "CountSketch",
    "SampleGradients",
    "SquaredNorms",
    "TwoSidedSketch",
    "weighted_sums",
]
