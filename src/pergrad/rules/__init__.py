"""The rules, one family a file; importing this package registers them all."""

from pergrad.rules import (
    activation,
    convolution,
    embedding,
    linear,
    matmul,
    normalization,
    recurrent,
)
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
    "activation",
    "convolution",
    "decomposes",
    "embedding",
    "implements_per_sample_grads",
    "linear",
    "matmul",
    "normalization",
    "recurrent",
]
