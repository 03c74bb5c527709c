"""Derives findings about samples from their gradients: pure functions from arrays to arrays and text."""

from pergrad.attribution.alignment import alignment
from pergrad.attribution.buckets import Buckets, Recall
from pergrad.attribution.duplicates import Duplicates, near_duplicates
from pergrad.attribution.evidence import evidence
from pergrad.attribution.findings import Findings, analyse, quantiles
from pergrad.attribution.grading import Grade, average_precision, grade
from pergrad.attribution.groups import dominant_groups
from pergrad.attribution.influence import self_influence
from pergrad.attribution.labels import (
    LabelErrors,
    Memorised,
    label_errors,
    leave_one_out,
    memorised,
)
from pergrad.attribution.matrices import Matrix
from pergrad.attribution.noise import Noise, gradient_noise
from pergrad.attribution.pushes import Pushes, pushes
from pergrad.attribution.samples import Samples
from pergrad.attribution.suspicion import holding_half, ranks, suspicion

__all__ = [
    "Buckets",
    "Duplicates",
    "Findings",
    "Grade",
    "LabelErrors",
    "Matrix",
    "Memorised",
    "Noise",
    "Pushes",
    "Recall",
    "Samples",
    "alignment",
    "analyse",
    "average_precision",
    "dominant_groups",
    "evidence",
    "grade",
    "gradient_noise",
    "holding_half",
    "label_errors",
    "leave_one_out",
    "memorised",
    "near_duplicates",
    "pushes",
    "quantiles",
    "ranks",
    "self_influence",
    "suspicion",
]
