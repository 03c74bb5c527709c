"""The rules, one family a file; importing this package registers them all."""

from pergrad.rules import convolution, embedding, linear, normalization, recurrent
from pergrad.rules.registry import (
    DECOMPOSITIONS,
    RULES,
    Rule,
    decomposes,
    implements_per_sample_grads,
)

__all__ = [
    "DECOMPOSITIONS",
    "RULES",
    "Rule",
    "convolution",
    "decomposes",
    "embedding",
    "implements_per_sample_grads",
    "linear",
    "normalization",
    "recurrent",
]
