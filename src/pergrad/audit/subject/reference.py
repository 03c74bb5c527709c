"""Loads a spec from its reference: `package.module:attribute`, or `hf:MODEL,DATASET[,SPLIT]`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from pergrad.audit.subject.hugging_face import PREFIX, spec_of_names
from pergrad.audit.subject.spec import Spec
from pergrad.errors import AuditError

__all__ = ["load_spec"]


def load_spec(reference: str) -> Spec:
    """Returns the spec that a reference names; a function is called without arguments.

    Modules are looked up in the current directory first. `hf:MODEL,DATASET[,SPLIT]` takes the names or paths
    of a Hugging Face model and data set on this machine.
    """
    if reference.startswith(PREFIX):
        return spec_of_names(reference)
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise AuditError(
            f"the reference {reference!r} does not have the form package.module:attribute "
            f"(or {PREFIX}MODEL,DATASET)"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise AuditError(
                f"cannot import {module_name!r}: it needs {error.name!r}, which is not installed"
            ) from error
        raise AuditError(
            f"no module {error.name!r} in {here} or among the installed packages (reference {reference!r})"
        ) from error
    except Exception as error:
        raise AuditError(
            f"importing {module_name!r} raised {type(error).__name__}: {error}"
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise AuditError(f"{module_name!r} has no attribute {attribute!r} ({_offers(found)})")
        found = getattr(found, name)
    return _spec_from(found, reference)


def _offers(module: object) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, Spec)]
    return f"it has the specs {', '.join(names)}" if names else "it has no spec under any name"


def _spec_from(found: object, reference: str) -> Spec:
    if not isinstance(found, Spec) and callable(found):
        try:
            found = found()
        except AuditError:
            raise
        except Exception as error:
            raise AuditError(
                f"calling {reference!r} raised {type(error).__name__}: {error}"
            ) from error
    if not isinstance(found, Spec):
        raise AuditError(
            f"{reference!r} must be a pergrad.audit.Spec or a function without arguments that returns "
            f"one, got {type(found).__name__}"
        )
    return found
