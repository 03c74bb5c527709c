"""Reduces factors (norms, sums, dots, moments, sketches) without holding the per-sample gradients."""

from pergrad.reductions.batched_launches import SquaredNorms, weighted_sums
from pergrad.reductions.complex_gradients import gradients_of
from pergrad.reductions.directions import Directions
from pergrad.reductions.gradients import SampleGradients
from pergrad.reductions.sketches import CountSketch, TwoSidedSketch
from pergrad.reductions.weights import SampleWeights

__all__ = [
    "CountSketch",
    "Directions",
    "SampleGradients",
    "SampleWeights",
    "SquaredNorms",
    "TwoSidedSketch",
    "gradients_of",
    "weighted_sums",
]
