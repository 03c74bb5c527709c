"""Runs a model on the first items: what goes in, what comes out, and what the targets are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from pergrad.audit.subject.files import FileData, counted
from pergrad.audit.subject.forms import kind_of, most_alike
from pergrad.audit.subject.inferring.collating import LABELS
from pergrad.audit.subject.places import told
from pergrad.errors import AuditError

__all__ = ["NEXT", "Batch", "Probe", "first_items", "indices_to_try", "logits_in", "probed"]

PROBED = 8  # samples whose outputs and targets are looked at
_TRIED = 64  # items that may be unreadable before the others are given up
_LOOKED_AT = 256  # targets that decide between two readings of them
NEXT = "pass loss=, called as loss(model, *batch), with one loss for each sample"

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class Probe:
    """The first samples as a batch, what the model returns for them, and their targets."""

    batch: Batch
    outputs: Tensor  # with its graph
    targets: Tensor | None
    inputs: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    target_of: Callable[..., Tensor] | None
    dataset: Any
    names: tuple[str, ...] = ()  # of the classes, if they are known

    def more_targets(self) -> Tensor:
        """Returns the targets of a TensorDataset, of others those of items from all over the data."""
        return self._more[1]

    def index_of(self, row: int) -> int:
        """Returns the index in the data set of a row of `more_targets`."""
        return self._more[0][row]

    @cached_property
    def _more(self) -> tuple[Sequence[int], Tensor]:
        assert self.targets is not None
        if type(self.dataset) is TensorDataset:
            return range(len(self.dataset)), self.dataset.tensors[-1]
        size = len(self.dataset)
        # Data is often sorted by its targets: the first ones would not do.
        spread = np.linspace(0, size - 1, min(size, _LOOKED_AT)).round().astype(int)
        indices, found = [], []
        for index, item in _readable(self.dataset, spread.tolist(), _LOOKED_AT):
            part = item[-1] if isinstance(item, tuple | list) else None
            if isinstance(item, Mapping):
                part = next((item[name] for name in LABELS if name in item), None)
            try:
                found.append(torch.as_tensor(part))
                torch.stack([found[0], found[-1]])
            except (TypeError, ValueError, RuntimeError):
                return range(len(self.targets)), self.targets
            indices.append(index)
        return indices, torch.stack(found)

    @property
    def last_function(self) -> str:
        """Returns the name of the function that made the outputs: "softmax", "sigmoid", or another one."""
        node = self.outputs.grad_fn
        while node is not None:
            name = type(node).__name__.removesuffix("Backward0").lower()
            if not name.startswith(_RESHAPING):
                return name
            node = next((n for n, _ in node.next_functions if n is not None), None)
        return ""


_RESHAPING = ("view", "squeeze", "unsqueeze", "reshape", "unsafeview", "alias", "select", "slice")


def probed(
    model: nn.Module, dataset: Any, collate: Any, classes: Sequence[str] | None, items: list[Any]
) -> Probe:
    """Runs the model on the first items; errors say what could not be inferred."""
    batch, items = _batch_of(items[:PROBED], collate or default_collate)
    whole = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
    inputs, raw = _parts(model, whole)
    target_of = None if raw is None else _as_tensor(raw, whole, classes)
    targets = None if target_of is None else target_of(*whole)
    outputs = _outputs(model, inputs, whole, _way_out(dataset))
    if targets is not None and len(targets) != len(items):
        raise AuditError(f"{len(items)} items have {len(targets)} targets: {NEXT}")
    return Probe(
        whole, outputs, targets, inputs, target_of, dataset, tuple(map(str, classes or ()))
    )


def _batch_of(items: list[Any], collate: Callable[[list[Any]], Any]) -> tuple[Any, list[Any]]:
    """Collates the items, or those alone that have the most common types and shapes; returns both."""
    try:
        return collate(items), items
    except Exception as error:
        alike = most_alike(items)
        if len(alike) < len(items):
            try:
                return collate(alike), alike
            except Exception:
                pass
        raise AuditError(
            f"cannot collate the first items: {told(error)}; pass collate=, which makes a batch of items"
        ) from error


def first_items(dataset: Any, count: int = PROBED) -> list[Any]:
    """Returns the first items that can be read, of those at the start, then of some from all over the data.

    Leaves out those of other types than most, such as None. Raises an error if there is none.
    """
    found = _readable(dataset, indices_to_try(len(dataset), count), count)
    return most_alike([item for _, item in found], kind_of)


def _readable(dataset: Any, indices: Sequence[int], count: int) -> list[tuple[int, Any]]:
    """Returns at most `count` of the items at these indices that can be read; raises an error if none can."""
    found: list[tuple[int, Any]] = []
    failed = None
    for index in indices:
        try:
            found.append((index, dataset[index]))
        except Exception as error:
            failed = failed or error
        if len(found) == count:
            break
    if not found:
        why = "" if failed is None else f": {told(failed)}"
        raise AuditError(
            f"the first items of the data set cannot be read, nor others from all over it{why}"
        )
    return found


def indices_to_try(size: int, count: int = 1) -> list[int]:
    """Returns the indices to look at for `count` items: the first ones, then as many as 64 spread evenly.

    >>> indices_to_try(3), len(indices_to_try(10_000, 8))
    ([0, 1, 2], 135)
    """
    first = min(size, count + _TRIED)
    spread = np.linspace(0, size - 1, _TRIED).round().astype(int).tolist() if size else []
    return [*range(first), *(index for index in spread if index >= first)]


def _as_tensor(
    raw: Callable[..., Any], batch: Batch, classes: Sequence[str] | None
) -> Callable[..., Tensor]:
    """Returns the targets as a tensor; those that are strings by their places among the classes."""
    if isinstance(raw(*batch), Tensor):  # then the classes are but names
        return raw
    place = {str(name): number for number, name in enumerate(classes or ())}

    def target_of(*batch: Any) -> Tensor:
        found = raw(*batch)
        if isinstance(found, Tensor):
            return found
        is_text = isinstance(found, list | tuple) and found and isinstance(found[0], str)
        if not is_text:
            raise AuditError(f"the targets are {type(found).__name__}, not a tensor: {NEXT}")
        if not place:
            raise AuditError(
                f"labels are strings (such as {found[0]!r}), and the order of the model's outputs is not "
                "known: pass classes=, their names in that order"
            )
        for name in found:
            if name not in place:
                raise AuditError(f"label {name!r} is none of the classes: {', '.join(place)}")
        return torch.tensor([place[name] for name in found])

    return target_of


def _parts(model: nn.Module, batch: Batch) -> tuple[Any, Callable[..., Any] | None]:
    """Splits a batch into the model's arguments and the targets."""
    if len(batch) == 1 and isinstance(batch[0], Mapping):
        key = next((name for name in LABELS if name in batch[0]), None)
        parameters = inspect.signature(model.forward).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

        def keywords(first: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            own = {name: part for name, part in first.items() if name != key}
            known = {name: part for name, part in own.items() if name in parameters}
            if known or not takes_all:
                return (), known
            return (), {name: part for name, part in own.items() if isinstance(part, Tensor)}

        return keywords, None if key is None else (lambda first: first[key])
    if len(batch) == 1:
        return (lambda *parts: (parts, {})), None
    return (lambda *parts: (parts[:-1], {})), (lambda *parts: parts[-1])


def _way_out(dataset: Any) -> str:
    """Says what to do if the model fails on the items."""
    if not isinstance(dataset, FileData) or dataset.text is not None:
        return NEXT
    return (
        f"its inputs are {counted(dataset.columns)}: to choose others, pass a data frame of these and the "
        "target instead of the file, or a reference to one, such as data.py:frame"
    )


def _outputs(model: nn.Module, inputs: Any, batch: Batch, way_out: str) -> Tensor:
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    dtype = None if first is None or not first.is_floating_point() else first.dtype
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise AuditError(f"parameter {name!r} is on the meta device: load the model's weights")

    arguments, keywords = inputs(*[_moved(part, device, dtype) for part in batch])
    was = [module.training for module in model.modules()]
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            model.eval()
            try:
                found = model(*arguments, **keywords)
            finally:
                for module, training in zip(model.modules(), was, strict=True):
                    module.training = training
    except Exception as error:
        raise AuditError(f"the model fails on the first items: {told(error)}; {way_out}") from error
    return logits_in(found)


def _moved(part: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(part, Tensor):
        return part.to(device, dtype if part.is_floating_point() else None)
    if isinstance(part, Mapping):
        return {name: _moved(value, device, dtype) for name, value in part.items()}
    return part


def logits_in(outputs: Any) -> Tensor:
    """Returns the logits of what a model returns: a tensor, or an object or dict with logits."""
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs.get("logits") if isinstance(outputs, Mapping) else None
    found = getattr(outputs, "logits", None) if found is None else found
    if found is None and isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    if not isinstance(found, Tensor):
        raise AuditError(f"the model returns {type(outputs).__name__}, which has no logits: {NEXT}")
    return found
