"""Fingerprints what an audit is made of, to check that it resumes with the same: model, data, functions."""

from pergrad.audit.streaming.fingerprint.content import (
    checksum_of_model,
    fingerprint_of_data,
    fingerprint_of_model,
)
from pergrad.audit.streaming.fingerprint.functions import fingerprint_of_function

__all__ = [
    "checksum_of_model",
    "fingerprint_of_data",
    "fingerprint_of_function",
    "fingerprint_of_model",
]
