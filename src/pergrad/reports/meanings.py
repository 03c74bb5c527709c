"""Says in one sentence each what the numbers of a report mean, for whoever points at them."""

from __future__ import annotations

__all__ = ["KINDS", "MEANINGS"]

MEANINGS = {
    "first": "Labels expected to be wrong, or else samples that hold half of all suspicion, and samples "
    "whose loss or gradient is not finite.",
    "suggested": "The label that all other samples suggest, by leave-one-out prediction from label-free "
    "gradients, and its probability.",
    "predicted": "The label that the model itself predicts, and its probability. A model that has learnt a "
    "wrong label by heart predicts it.",
    "doubt": "Prediction of the other samples for the best other class minus that for the label given: above "
    "0.2 a label counts as wrong.",
    "loss": "The loss of the model on this sample.",
    "norm": "The length of the sample's gradient over all parameters.",
    "groups": "Samples with nearly the same gradient, connected by pairs.",
    "outliers": "Inputs whose label-free gradients are far from all others.",
    "batch": "The gradient noise scale: larger batches save few steps.",
}
_COMMON = [("not finite", "not finite"), ("outlier", "outliers"), ("duplicate", "near-duplicates")]
KINDS = {
    True: [("label", "labels that look wrong"), *_COMMON],
    False: [("loss", "to look at first"), *_COMMON],
}
