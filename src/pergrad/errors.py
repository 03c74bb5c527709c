"""The exception tree: everything pergrad raises on purpose is a `PergradError`, itself a RuntimeError."""

__all__ = [
    "AuditError",
    "BatchSizeError",
    "InterruptedAuditError",
    "MixedSamplesError",
    "PergradError",
    "ScopeError",
    "ToldElsewhereError",
    "UnseenUseError",
    "UnsupportedFunctionError",
]


class PergradError(RuntimeError):
    """The root of all errors that pergrad raises."""


class BatchSizeError(PergradError):
    """The batch size is missing, contradictory, or not what a tensor shows."""


class ScopeError(PergradError):
    """Recording was used out of order: nested, without a backward, or after its scope had closed."""


class UnsupportedFunctionError(PergradError):
    """A function uses a recorded parameter in a way that no rule covers."""


class MixedSamplesError(PergradError):
    """A function mixes the samples of a batch, so that per-sample gradients do not exist."""


class UnseenUseError(PergradError):
    """An ordinary, summed gradient reached a recorded parameter: some use of it was not seen."""


class AuditError(PergradError):
    """An audit cannot begin or go on: its reference, data, options or results folder are not right."""


class InterruptedAuditError(AuditError):
    """An audit had to stop for want of space or memory; what it has written stays, and it can resume."""


class ToldElsewhereError(AuditError):
    """An audit in several processes has failed in another one, which says why."""
