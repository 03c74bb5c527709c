"""Defines what to audit: a model, a data set, the loss of each sample, and how to show a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from pergrad.audit.subject.places import told
from pergrad.audit.subject.texts import as_text
from pergrad.errors import AuditError

__all__ = [
    "FUNCTIONS",
    "Spec",
    "grouped_parameters",
    "groups_by_module",
    "refuse_other_names",
    "size_of",
]

FUNCTIONS = ("loss", "show", "label", "collate", "groups", "logits", "target", "length")  # fields
_MOST_GROUPS = 12  # more rows make the chart hard to read


@dataclass(frozen=True)
class Spec:
    """A model, a data set and a loss to audit.

    Args:
        model: any module, in the mode (train or eval) to audit it in. It is not changed.
        dataset: a map-style data set: has `len`, and items by index from 0.
        loss: called as loss(model, *batch); returns the (B,) losses of the samples. A batch that is not a
            tuple or a list, such as a dict, is passed as one argument.
        show: returns an item as a string, a PIL image, or an image as a tensor or array of shape (H, W),
            (C, H, W) or (H, W, 3).
        label: returns an item's label as a string.
        collate: makes a batch of a list of items; by default `torch.utils.data.default_collate`.
        groups: returns the name of a parameter's group, given the parameter's name; by default the modules
            near the top of the model, at most twelve.
        logits: called as logits(model, *batch); returns the (B, classes) logits of a classifier. With it the
            audit computes label-free gradients, which find wrong labels, outliers and duplicates better than
            the loss does.
        target: called as target(*batch); returns the (B,) classes of the labels, whole numbers from 0.
        checkpoints: earlier states of the model: state dicts, paths of files with one, or modules. Doubts
            about labels are averaged over them and the model; each costs about one more epoch.
        classes: names of the classes, in the order of the logits.
        length: returns an item's number of tokens, for batches of a token budget; by default that of its
            `input_ids`, or of the first dimension of its input.
        known_wrong: indices of samples known to be wrong; the audit grades its ranking by them.
        name: the name of the data set in the report.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from pergrad.audit import Spec
    >>> data = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    >>> spec = Spec(torch.nn.Linear(3, 1), data, lambda model, x, y: (model(x) - y).square().sum(1))
    """

    model: nn.Module
    dataset: Any
    loss: Callable[..., Tensor]
    show: Callable[[Any], Any] | None = None
    label: Callable[[Any], str] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    groups: Callable[[str], str] | None = None
    known_wrong: Sequence[int] | None = None
    name: str | None = None
    logits: Callable[..., Tensor] | None = None
    target: Callable[..., Tensor] | None = None
    checkpoints: Sequence[Any] = ()
    classes: Sequence[str] | None = None
    length: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise AuditError(f"spec.model must be an nn.Module, got {type(self.model).__name__}")
        for method in ("__len__", "__getitem__"):
            if not hasattr(self.dataset, method):
                raise AuditError(
                    f"spec.dataset must have a length and items by index; {type(self.dataset).__name__} "
                    f"has no {method}: wrap it in a torch.utils.data.Dataset, or put its items into a list"
                )
        if not callable(self.loss):
            raise AuditError(f"spec.loss must be callable, got {type(self.loss).__name__}")
        for option in FUNCTIONS:
            value = getattr(self, option)
            if value is not None and not callable(value):
                raise AuditError(
                    f"spec.{option} must be callable or None, got {type(value).__name__}"
                )

        if isinstance(self.checkpoints, str | Mapping | nn.Module) or not hasattr(
            self.checkpoints, "__len__"
        ):
            got = type(self.checkpoints).__name__
            raise AuditError(f"spec.checkpoints must be a list of checkpoints, got {got}")
        refuse_other_names(self.classes)
        if self.known_wrong is not None:
            _refuse_other_indices(self.known_wrong)
        if len(self.checkpoints) and self.logits is None:
            raise AuditError(
                "spec.checkpoints need spec.logits: they are compared by label-free gradients"
            )

    @property
    def title(self) -> str:
        """Returns the name of the data set, or else of its class."""
        return as_text(self.name or type(self.dataset).__name__)


def refuse_other_names(classes: Any) -> None:
    """Refuses names of classes that are no list, such as their number or a dict."""
    is_list = hasattr(classes, "__len__") and not isinstance(classes, str | Mapping)
    if classes is not None and not is_list:
        is_plain = isinstance(classes, str | int)
        what = repr(classes) if is_plain else f"a {type(classes).__name__}"
        raise AuditError(
            f"spec.classes must be a list of names, in the order of the logits, got {what}"
        )


def _refuse_other_indices(known: Any) -> None:
    """Refuses masks, whose entries would count as the indices 0 and 1, and what is no list of numbers."""
    values = np.asarray(known)
    if values.dtype == bool and values.size:
        raise AuditError(
            "spec.known_wrong must be a list of indices, got True and False: pass the places of True, as by "
            "np.flatnonzero"
        )
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iu"):
        raise AuditError(f"spec.known_wrong must be a list of indices, got {type(known).__name__}")


def size_of(dataset: Any) -> int:
    """Returns the number of items; an error of the data set's own says where."""
    try:
        return len(dataset)
    except Exception as error:
        raise AuditError(f"the length of the data set raised {told(error)}") from error


def grouped_parameters(spec: Spec) -> dict[str, list[str]]:
    """Returns the names of the trainable parameters by group, ordered by each group's first parameter."""
    trained = {name: p for name, p in spec.model.named_parameters() if p.requires_grad}
    for name, p in trained.items():
        if isinstance(p, UninitializedParameter) or p.is_meta:
            raise AuditError(
                f"parameter {name!r} has no values yet: call a lazy module once, or load the weights of a "
                "module on the meta device"
            )
    sizes = {name: p.numel() for name, p in trained.items()}
    if not sizes:
        raise AuditError(
            "no parameter of the model requires grad, so no sample has a gradient: call requires_grad_() on "
            "the parameters to audit"
        )
    if spec.groups is None:
        group_of = groups_by_module(sizes)
    else:
        try:
            group_of = {name: str(spec.groups(name)) for name in sizes}
        except Exception as error:
            raise AuditError(f"spec.groups raised {told(error)}") from error
    found: dict[str, list[str]] = {}
    for name in sizes:
        found.setdefault(group_of[name], []).append(name)
    return found


def groups_by_module(sizes: Mapping[str, int]) -> dict[str, str]:
    """Maps each parameter to a module near the top of the model that contains it; `sizes` are entry counts.

    Splits the largest group into its submodules, repeatedly, as long as there are at most twelve groups. A
    long list of numbered layers is split into as many ranges as there is room for.

    >>> groups_by_module({"body.0.weight": 4, "body.1.weight": 4, "head.weight": 2})
    {'body.0.weight': 'body.0', 'body.1.weight': 'body.1', 'head.weight': 'head'}
    """
    groups = _opened("", list(sizes), _MOST_GROUPS) or {name: [name] for name in sizes}
    closed: set[str] = set()
    while True:
        open_ones = [group for group in groups if group not in closed]
        if not open_ones:
            break
        largest = max(open_ones, key=lambda group: sum(sizes[name] for name in groups[group]))
        parts = _opened(largest, groups[largest], _MOST_GROUPS - len(groups) + 1)
        if parts is None:
            closed.add(largest)
            continue
        groups = {
            key: names
            for group, members in groups.items()
            for key, names in (parts if group == largest else {group: members}).items()
        }
    return {name: group for group, names in groups.items() for name in names}


def _opened(group: str, names: list[str], room: int) -> dict[str, list[str]] | None:
    """Splits a group into submodules with their parameters; None if it has none, or more than fit."""
    depth = group.count(".") + 1 if group else 0
    parts: dict[str, list[str]] = {}
    for name in names:
        path = name.split(".")
        is_inner = len(path) > depth + 1
        key = ".".join(path[: depth + 1]) if is_inner or not group else group
        parts.setdefault(key, []).append(name)
    if not parts.keys() - {group}:
        return None
    if len(parts) <= room:
        return parts
    are_numbered = all(key.rpartition(".")[2].isdecimal() for key in parts)
    return _in_ranges(parts, room) if not group or (room > 1 and are_numbered) else None


def _in_ranges(parts: Mapping[str, list[str]], room: int) -> dict[str, list[str]]:
    """Joins neighbours into `room` groups, each named after its first and last member."""
    keys = list(parts)
    found: dict[str, list[str]] = {}
    for number in range(room):
        some = keys[number * len(keys) // room : (number + 1) * len(keys) // room]
        title = some[0] if len(some) == 1 else f"{some[0]}-{some[-1].rpartition('.')[2]}"
        found[title] = [name for key in some for name in parts[key]]
    return found
