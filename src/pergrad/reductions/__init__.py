"""What can be made of per-sample gradients without holding them, as functions of their factors."""

from pergrad.reductions.batched_launches import SquaredNorms, weighted_sums
from pergrad.reductions.gradients import SampleGradients
from pergrad.reductions.sketches import CountSketch, TwoSidedSketch
from pergrad.reductions.tiles import default_bound

__all__ = [
    "CountSketch",
    "SampleGradients",
    "SquaredNorms",
    "TwoSidedSketch",
    "default_bound",
    "weighted_sums",
]
