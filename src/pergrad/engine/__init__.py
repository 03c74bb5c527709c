"""The engine: sees every use of a parameter, follows the samples, and feeds the quantities."""

from pergrad.engine.compiled import CompiledStep, compiled
from pergrad.engine.contract import ExpandedWeight, call_for_per_sample_grads
from pergrad.engine.entry import grads, norms, record
from pergrad.engine.explanation import ExplainReport, explain
from pergrad.engine.verification import VerifyReport, verify

__all__ = [
    "CompiledStep",
    "ExpandedWeight",
    "ExplainReport",
    "VerifyReport",
    "call_for_per_sample_grads",
    "compiled",
    "explain",
    "grads",
    "norms",
    "record",
    "verify",
]
