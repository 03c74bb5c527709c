"""Loads a spec from its reference, or from references of a model and a data set."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from pergrad.audit.subject.files import FileData, is_file_of_rows
from pergrad.audit.subject.hugging_face import PREFIX, spec_of_names
from pergrad.audit.subject.inferring import inferred_spec
from pergrad.audit.subject.inferring.sources import names_in_config
from pergrad.audit.subject.places import told
from pergrad.audit.subject.spec import FUNCTIONS, Spec, refuse_other_names
from pergrad.audit.subject.tables import SUFFIXES, near_file
from pergrad.errors import AuditError

__all__ = ["load_object", "load_spec"]

_TYPO = 0.8  # least similarity of a name


def load_spec(
    reference: str,
    data: str | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
    download: bool = False,
) -> Spec:
    """Returns the spec that a reference names, or one of a model and a data set; infers what is missing.

    A reference is `package.module:attribute` or `file.py:attribute`; modules are looked up in the current
    directory first, and a function is called without arguments. `hf:MODEL,DATASET[,SPLIT]` takes the names or
    paths of a Hugging Face model and data set on this machine.

    Args:
        reference: a spec; or, with `data`, a model: `model.py` is the attribute `model` in that file. Other
            attributes of the file with the names of fields of a Spec are used too, and `tokenizer`.
        data: a CSV, JSON or Parquet file, or a reference to a data set.
        say: receives what is inferred.
        download: whether a reference to Hugging Face may use the network.
    """
    if reference.startswith(PREFIX):
        return spec_of_names(reference, download=download, say=say)
    if data is None:
        found, _ = _found(reference, "spec")
        return _spec_from(_called(found, reference), reference, say)
    found, module = _found(reference, "model")
    model = _called(found, reference)
    if not isinstance(model, nn.Module):
        raise AuditError(
            f"{reference!r} must be an nn.Module or a function without arguments that returns one, got "
            f"{type(model).__name__}"
        )
    names = {field.name for field in fields(Spec)} - {"model", "dataset"}
    given = {name: value for name, value in vars(module).items() if name in names}
    _refuse_other_values(given, reference)
    for hint in _hints_at_typos(module, names | {"tokenizer"}):
        say(f"{reference.partition(':')[0]}: {hint}")
    tokenizer = getattr(module, "tokenizer", None)
    if is_file_of_rows(data):
        has_tokenizer = tokenizer is not None
        known = given["classes"] if "classes" in given else names_in_config(model)
        dataset: Any = FileData(data, known, say, prefers_text=has_tokenizer)
        given.setdefault("name", Path(data).name)
        if dataset.text is not None and not has_tokenizer and "collate" not in given:
            raise AuditError(
                f"{dataset.path} has texts in column {dataset.text!r}: define `tokenizer`, called as "
                f"tokenizer(texts, ...), in {reference.partition(':')[0]}"
            )
    elif ":" not in data and not data.endswith(".py"):
        near = near_file(Path(data))
        raise AuditError(
            f"the data {data!r} is neither a file of rows ({', '.join(SUFFIXES)}) nor a reference such as "
            f"package.module:attribute or file.py:attribute{near and f': {near}'}"
        )
    else:
        dataset = _called(_found(data, "dataset")[0], data)
    loss = given.pop("loss", None)
    return inferred_spec(model, dataset, loss, tokenizer=tokenizer, say=say, **given)


def _refuse_other_values(given: dict[str, Any], reference: str) -> None:
    """Refuses variables of a module that have the name of a field of a Spec by chance, such as a tensor."""
    for name in FUNCTIONS:
        value = given.get(name)
        if value is not None and not callable(value):
            raise AuditError(
                f"{reference.partition(':')[0]} defines {name!r}, a {type(value).__name__}: by this name the "
                "audit takes a function, a field of pergrad.audit.Spec; give the variable another name"
            )
    refuse_other_names(given.get("classes"))


def _hints_at_typos(module: Any, names: set[str]) -> Iterator[str]:
    """Yields a line for each variable of a module that is nearly called as one that would be used."""
    for name, value in vars(module).items():
        near = difflib.get_close_matches(name, names, 1, _TYPO)
        if not near or name in names or name.startswith("_") or hasattr(module, near[0]):
            continue
        if callable(value) if near[0] in (*FUNCTIONS, "tokenizer") else isinstance(value, list):
            yield f"{name!r} is not used: did you mean {near[0]!r}?"


def load_object(reference: str, default: str) -> Any:
    """Returns what `package.module:attribute` names, or what it returns if it is a function.

    Args:
        reference: as that of `load_spec`.
        default: the attribute, if the reference names a module alone.
    """
    return _called(_found(reference, default)[0], reference)


def _found(reference: str, default: str) -> tuple[Any, Any]:
    """Returns the object that a reference names, and its module."""
    module_name, colon, attribute = reference.partition(":")
    is_file = module_name.endswith(".py")
    if not module_name or (not is_file and not (colon and attribute)):
        raise AuditError(
            f"the reference {reference!r} does not have the form package.module:attribute or "
            f"file.py:attribute (or {PREFIX}MODEL,DATASET)"
        )
    attribute = attribute or default
    module = _file(module_name) if is_file else _module(module_name, reference)
    found: Any = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise AuditError(
                f"{module_name!r} has no attribute {attribute!r} ({_offers(module, attribute)})"
            )
        found = getattr(found, name)
    return found, module


def _file(name: str) -> Any:
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, _files_in(path.parent), 1)
        hint = f": did you mean {path.parent / near[0]}?" if near else ""
        raise AuditError(f"no file {name}{hint}")
    made = importlib.util.spec_from_file_location(path.stem, path)
    assert made is not None
    assert made.loader is not None
    module = importlib.util.module_from_spec(made)
    sys.modules.setdefault(path.stem, module)
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        made.loader.exec_module(module)
    except AuditError:
        raise
    except Exception as error:
        raise AuditError(f"running {name} raised {told(error)}") from error
    return module


def _files_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.py")] if folder.is_dir() else []


def _module(module_name: str, reference: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise AuditError(
                f"cannot import {module_name!r}: it needs {error.name!r}, which is not installed"
            ) from error
        files = _files_in(Path(here))
        near = difflib.get_close_matches(f"{module_name}.py", files, 1)
        hint = f": did you mean {near[0].removesuffix('.py')!r}?" if near else ""
        raise AuditError(
            f"no module {error.name!r} in {here} or among the installed packages (reference "
            f"{reference!r}){hint}"
        ) from error
    except Exception as error:
        raise AuditError(f"importing {module_name!r} raised {told(error)}") from error


def _offers(module: object, wanted: str) -> str:
    names = [name for name in vars(module) if not name.startswith("_")]
    if wanted == "spec" and isinstance(getattr(module, "model", None), nn.Module):
        return "it has a model: name its data too, such as data.csv"
    near = difflib.get_close_matches(wanted, names, 1)
    if near:
        return f"did you mean {near[0]!r}?"
    specs = [name for name, value in vars(module).items() if isinstance(value, Spec)]
    return f"it has the specs {', '.join(specs)}" if specs else "it has no spec under any name"


def _called(found: Any, reference: str) -> Any:
    """Returns the object, or what it returns if it is a function; modules and data sets are not called."""
    is_function = callable(found) and not isinstance(found, Spec | nn.Module)
    if not is_function or hasattr(found, "__getitem__"):
        return found
    try:
        return found()
    except AuditError:
        raise
    except Exception as error:
        raise AuditError(f"calling {reference!r} raised {told(error)}") from error


def _spec_from(found: object, reference: str, say: Callable[[str], None]) -> Spec:
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module):
        return inferred_spec(found[0], found[1], say=say)
    if not isinstance(found, Spec):
        raise AuditError(
            f"{reference!r} must be a pergrad.audit.Spec, a function without arguments that returns one, or "
            f"(model, data set), got {type(found).__name__}"
        )
    return found
