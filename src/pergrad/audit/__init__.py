"""Audits a data set: computes every sample's gradient in one pass and reports what stands out."""

try:
    from pergrad.audit.run import run_audit
    from pergrad.audit.streaming.stream import Watch
    from pergrad.audit.subject.losses import LossOfLogits
    from pergrad.audit.subject.options import AuditOptions
    from pergrad.audit.subject.reference import load_spec
    from pergrad.audit.subject.spec import Spec
except ModuleNotFoundError as error:
    if error.name in ("numpy", "pyarrow", "PIL"):
        raise ModuleNotFoundError(
            f"pergrad.audit needs {error.name}: pip install 'pergrad[audit]'", name=error.name
        ) from error
    raise

__all__ = ["AuditOptions", "LossOfLogits", "Spec", "Watch", "load_spec", "run_audit"]
