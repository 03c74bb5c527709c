"""Calls of every function that has a rule; together they set every argument."""

from tests.rules.cases import (
    arithmetic,
    attention,
    contraction,
    convolution,
    embedding,
    linear,
    normalization,
    recurrent,
)
from tests.rules.cases.case import Case

__all__ = ["CASES", "Case", "recurrent"]

CASES: list[Case] = [
    *linear.CASES,
    *convolution.CASES,
    *normalization.CASES,
    *embedding.CASES,
    *recurrent.CASES,
    *arithmetic.CASES,
    *attention.CASES,
    *contraction.CASES,
]
