"""Defines the exceptions: every error that pergrad raises on purpose is a `PergradError`, a RuntimeError."""

__all__ = [
    "AuditError",
    "BatchSizeError",
    "EvaluationError",
    "FallbackWarning",
    "IndexingError",
    "InterruptedAuditError",
    "MixedSamplesError",
    "PergradError",
    "PrivacyError",
    "ScopeError",
    "ToldElsewhereError",
    "UnseenUseError",
    "UnsupportedFunctionError",
    "UntoldLossError",
]


class PergradError(RuntimeError):
    """Base class of all errors that pergrad raises."""


class BatchSizeError(PergradError):
    """Raised when the batch size is missing, ambiguous, or does not match a tensor's shape."""


class ScopeError(PergradError):
    """Raised when a recording is nested, has no backward, or is used after its scope has closed."""


class UnsupportedFunctionError(PergradError):
    """Raised when a function uses a recorded parameter in a way that no rule covers."""


class MixedSamplesError(PergradError):
    """Raised when a function mixes the samples of a batch, so that per-sample gradients do not exist."""


class UnseenUseError(PergradError):
    """Raised when an ordinary, summed gradient reaches a recorded parameter: a use of it was not seen."""


class UntoldLossError(PergradError):
    """Raised when a scalar loss is not clearly a sum or a mean over the samples, or has a factor."""


class AuditError(PergradError):
    """Raised when an audit cannot start or continue: bad reference, data, options or results folder."""


class InterruptedAuditError(AuditError):
    """Raised when an audit runs out of disk space or memory; its rows are kept, and it can resume."""


class ToldElsewhereError(AuditError):
    """Raised when an audit has failed in another process, which reports the reason."""


class IndexingError(AuditError):
    """Raised when an index cannot be built, opened or queried: bad model, data, options, query or folder."""


class PrivacyError(PergradError):
    """Raised when private training cannot start or continue: bad plan, loader, model or state."""


class EvaluationError(PergradError):
    """Raised when an evaluation cannot start or continue: bad task, scores, training or options."""


class FallbackWarning(UserWarning):
    """Warns that a batch was computed sample by sample, since `fallback="loop"` was asked for."""
