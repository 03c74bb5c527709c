"""Registers all rules when imported; each file holds one family of functions."""

from pergrad.rules import (
    activation,
    arithmetic,
    attention,
    contraction,
    convolution,
    embedding,
    experts,
    linear,
    normalization,
    recurrent,
)
from pergrad.rules.registry import (
    DECLARING,
    DECOMPOSITIONS,
    RULES,
    Rule,
    ShapeOnly,
    decomposes,
    implements_per_sample_grads,
)

__all__ = [
    "DECLARING",
    "DECOMPOSITIONS",
    "RULES",
    "Rule",
    "ShapeOnly",
    "activation",
    "arithmetic",
    "attention",
    "contraction",
    "convolution",
    "decomposes",
    "embedding",
    "experts",
    "implements_per_sample_grads",
    "linear",
    "normalization",
    "recurrent",
]
