"""Judges labels by what all other samples would have called a sample."""

from pergrad.attribution.labels.errors import LabelErrors, label_errors
from pergrad.attribution.labels.leave_one_out import leave_one_out
from pergrad.attribution.labels.memorised import Memorised, memorised

__all__ = ["LabelErrors", "Memorised", "label_errors", "leave_one_out", "memorised"]
