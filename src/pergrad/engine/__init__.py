"""Runs recordings: intercepts every use of a parameter, tracks the samples and feeds the quantities."""

from pergrad.engine.checking.certification import certify
from pergrad.engine.checking.explanation import ExplainReport, explain
from pergrad.engine.checking.reports import CertifyReport, VerifyReport
from pergrad.engine.checking.verification import verify
from pergrad.engine.compiling.step import CompiledStep, compiled
from pergrad.engine.contract import ExpandedWeight, call_for_per_sample_grads
from pergrad.engine.entry import grads, norms, record

__all__ = [
    "CertifyReport",
    "CompiledStep",
    "ExpandedWeight",
    "ExplainReport",
    "VerifyReport",
    "call_for_per_sample_grads",
    "certify",
    "compiled",
    "explain",
    "grads",
    "norms",
    "record",
    "verify",
]
