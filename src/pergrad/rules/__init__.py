"""Registers all rules when imported; each file holds one family of functions."""

from pergrad.rules import (
    activation,
    arithmetic,
    attention,
    convolution,
    embedding,
    experts,
    linear,
    matmul,
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
    "convolution",
    "decomposes",
    "embedding",
    "experts",
    "implements_per_sample_grads",
    "linear",
    "matmul",
    "normalization",
    "recurrent",
]
