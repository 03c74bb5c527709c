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
    "self_influence": "The squared length of the sample's gradient, relative to how much all samples pull in "
    "its direction: large for a sample that pulls alone.",
    "alignment": "The cosine with the mean gradient: a sample with a negative one pulls against the average.",
    "expected": "Labels with a doubt above 0.2; in brackets, with one above 0.4 and above 0: in nine of ten "
    "measured cases the true number lies between them.",
    "doubted": "Labels of this class that are expected to be wrong.",
    "share": "Doubted labels of this class, of all its samples.",
    "towards": "The classes that the other samples suggest for them, and for how many.",
    "groups": "Samples with nearly the same gradient, connected by pairs.",
    "outliers": "Inputs whose label-free gradients are far from all others.",
    "batch": "The gradient noise scale: larger batches save few steps.",
}
_COMMON = [("not finite", "not finite"), ("outlier", "outliers"), ("duplicate", "near-duplicates")]
KINDS = {
    True: [("label", "labels that look wrong"), *_COMMON],
    False: [("loss", "to look at first"), *_COMMON],
}
