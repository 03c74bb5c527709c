"""Audit a data set: what each sample's gradient says about it."""

try:
    from pergrad.audit.options import AuditOptions
    from pergrad.audit.reference import load_spec
    from pergrad.audit.run import run_audit
    from pergrad.audit.spec import Spec
    from pergrad.audit.stream import Watch
except ModuleNotFoundError as error:
    if error.name in ("numpy", "pyarrow", "PIL"):
        raise ModuleNotFoundError(
            f"pergrad.audit needs {error.name}: pip install 'pergrad[audit]'", name=error.name
        ) from error
    raise

__all__ = ["AuditOptions", "Spec", "Watch", "load_spec", "run_audit"]
