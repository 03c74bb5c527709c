"""Infers a spec from a model and a data set alone: loss, logits, labels; says what it has inferred."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, default_collate

from pergrad.audit.subject.iterables import listed
from pergrad.audit.subject.losses import LossOfLogits
from pergrad.audit.subject.places import told
from pergrad.audit.subject.spec import Spec
from pergrad.errors import AuditError

__all__ = ["inferred_spec"]

_PROBED = 8  # samples whose outputs and targets are looked at
_LABELS = ("labels", "label", "target", "targets", "y")
_IGNORED = -100  # the target of tokens and pixels that do not count
_NEXT = "pass loss=, called as loss(model, *batch), with one loss for each sample"

Batch = tuple[Any, ...]


@dataclass(frozen=True)
class _Probe:
    """The first samples as a batch, what the model returns for them, and their targets."""

    batch: Batch
    outputs: Tensor
    targets: Tensor | None
    inputs: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    target_of: Callable[..., Tensor] | None


def inferred_spec(
    model: nn.Module,
    dataset: Any,
    loss: Any = None,
    *,
    say: Callable[[str], None] = lambda _: None,
    **given: Any,
) -> Spec:
    """Returns a spec; tells `say` one line for each inference. What is given is not inferred.

    Args:
        model: the model to audit.
        dataset: a map-style or iterable data set, of (input, target), dicts, or inputs alone.
        loss: as that of a Spec, or a module of torch.nn such as CrossEntropyLoss, or None.
        say: receives what was inferred.
        given: other fields of the Spec.
    """
    if not isinstance(model, nn.Module):
        raise AuditError(f"the model must be an nn.Module, got {type(model).__name__}")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        dataset = listed(dataset, say)
    if len(dataset) == 0:
        raise AuditError("the data set is empty: there is nothing to audit")
    if loss is not None and not isinstance(loss, nn.Module):
        return Spec(model, dataset, loss, **given)
    probe = _probed(model, dataset, given.get("collate"), given.get("classes"))
    name, spec = _by_kind(model, dataset, probe, loss, given)
    say(f"loss: {name}")
    if spec.logits is not None and "logits" not in given:
        say(f"labels: {_label_words(probe, spec)}")
    return spec


def _by_kind(
    model: nn.Module, dataset: Any, probe: _Probe, loss: nn.Module | None, given: dict[str, Any]
) -> tuple[str, Spec]:
    outputs, targets = probe.outputs, probe.targets

    def output(model: nn.Module, *batch: Any) -> Tensor:
        arguments, keywords = probe.inputs(*batch)
        return _tensor_of(model(*arguments, **keywords))

    def spec(criterion: Callable[[Tensor, Tensor], Tensor], **more: Any) -> Spec:
        assert probe.target_of is not None
        target_of = probe.target_of
        made = LossOfLogits(output, lambda out, *batch: criterion(out, target_of(*batch)))
        return Spec(model, dataset, made, **{**more, **given})

    if targets is None:
        if outputs.dim() != 3:
            raise AuditError(
                f"the data set has no targets, and the model's outputs of shape {tuple(outputs.shape)} are "
                f"not logits of tokens: no loss can be inferred; {_NEXT}"
            )
        return "next token, mean over the tokens", Spec(
            model, dataset, lambda m, *batch: _next_token(output(m, *batch), batch), **given
        )
    is_whole = not targets.is_floating_point()
    if loss is not None:
        if not hasattr(loss, "reduction"):
            raise AuditError(f"loss={type(loss).__name__} has no reduction to switch off: {_NEXT}")
        by_sample = _each(loss)
        more = _classified(output, probe) if is_whole and outputs.dim() == 2 else {}
        return f"{type(loss).__name__}, one for each sample", spec(by_sample, **more)
    if is_whole and targets.dim() == 1 and outputs.dim() == 2 and outputs.shape[1] > 1:
        _refuse_classes(targets, outputs)
        more = _classified(output, probe)
        if _are_probabilities(outputs):
            return "negative log of the probabilities that the model returns", spec(
                lambda out, y: F.nll_loss(out.clamp(min=1e-12).log(), y, reduction="none"), **more
            )
        return "cross-entropy of the logits", spec(
            lambda out, y: F.cross_entropy(out, y, reduction="none"), **more
        )
    if is_whole and targets.dim() == 1 and outputs.numel() == len(targets):
        return "binary cross-entropy of one logit", spec(
            lambda out, y: F.binary_cross_entropy_with_logits(
                out.flatten(), y.to(out.dtype), reduction="none"
            ),
            **_classified(output, probe),
        )
    if is_whole and outputs.dim() == targets.dim() + 1:
        where = -1 if outputs.shape[:-1] == targets.shape else 1
        return "cross-entropy, mean over the positions", spec(
            lambda out, y: _mean_over_positions(out.movedim(where, 1), y)
        )
    if targets.shape == outputs.shape or targets.numel() == outputs.numel():
        is_binary = targets.dim() == 2 and bool(((targets == 0) | (targets == 1)).all())
        if is_binary and targets.shape[1] > 1:
            return "binary cross-entropy of each label, mean over the labels", spec(
                lambda out, y: F.binary_cross_entropy_with_logits(
                    out, y.to(out.dtype), reduction="none"
                ).mean(1)
            )
        return "squared error, mean over the outputs", spec(
            lambda out, y: (
                (out.flatten(1) - y.reshape(out.shape).to(out.dtype).flatten(1)).square().mean(1)
                if out.dim() > 1
                else (out - y.reshape(out.shape).to(out.dtype)).square()
            )
        )
    raise AuditError(
        f"no loss fits outputs of shape {tuple(outputs.shape)} and {targets.dtype} targets of shape "
        f"{tuple(targets.shape)}: {_NEXT}"
    )


def _classified(output: Callable[..., Tensor], probe: _Probe) -> dict[str, Any]:
    return {"logits": output, "target": probe.target_of}


def _label_words(probe: _Probe, spec: Spec) -> str:
    if spec.target is None:
        return "none"
    classes = max(2, probe.outputs.shape[1] if probe.outputs.dim() == 2 else 2)
    return f"the target, one of {classes} classes; ranked by label-free gradients"


def _refuse_classes(targets: Tensor, outputs: Tensor) -> None:
    if int(targets.max()) >= outputs.shape[1]:
        raise AuditError(
            f"a target is {int(targets.max())}, but the model has {outputs.shape[1]} outputs: classes must "
            f"lie from 0 to {outputs.shape[1] - 1}"
        )


def _are_probabilities(outputs: Tensor) -> bool:
    values = outputs.double()
    return bool((values >= 0).all() and ((values.sum(1) - 1).abs() < 1e-3).all())


def _each(loss: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the loss of each sample, by a copy of the module without its reduction."""
    apart = copy.copy(loss)
    apart.__dict__["reduction"] = "none"

    def by_sample(outputs: Tensor, targets: Tensor) -> Tensor:
        found = apart(outputs, targets)
        return found.flatten(1).mean(1) if found.dim() > 1 else found

    return by_sample


def _mean_over_positions(
    logits: Tensor, targets: Tensor
) -> Tensor:  # (n, c, ...), (n, ...) -> (n,)
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=_IGNORED).flatten(1)
    return losses.sum(1) / (targets != _IGNORED).flatten(1).sum(1).clamp(min=1)


def _next_token(logits: Tensor, batch: Batch) -> Tensor:
    (first, *_) = batch
    tokens = first["input_ids"] if isinstance(first, Mapping) else first
    targets = tokens[:, 1:]
    if isinstance(first, Mapping) and "attention_mask" in first:
        targets = targets.masked_fill(first["attention_mask"][:, 1:] == 0, _IGNORED)
    return _mean_over_positions(logits[:, :-1].mT, targets)


def _tensor_of(outputs: Any) -> Tensor:
    """Returns the logits of what a model returns: a tensor, or an object or dict with logits."""
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs.get("logits") if isinstance(outputs, Mapping) else None
    found = getattr(outputs, "logits", None) if found is None else found
    if found is None and isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    if not isinstance(found, Tensor):
        raise AuditError(
            f"the model returns {type(outputs).__name__}, which has no logits: {_NEXT}"
        )
    return found


def _probed(model: nn.Module, dataset: Any, collate: Any, classes: Sequence[str] | None) -> _Probe:
    items = []
    for index in range(min(len(dataset), 8 * _PROBED)):
        try:
            items.append(dataset[index])
        except Exception as error:
            if index == 8 * _PROBED - 1 and not items:
                raise AuditError(f"the first items cannot be read: {told(error)}") from error
        if len(items) == _PROBED:
            break
    if not items:
        raise AuditError("no item of the data set can be read")
    _refuse_texts(items[0], classes)
    try:
        batch = (collate or default_collate)(items)
    except Exception as error:
        raise AuditError(
            f"cannot collate the first items: {told(error)}; pass collate=, which makes a batch of items"
        ) from error
    whole = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
    inputs, target_of = _parts(model, whole)
    outputs = _outputs(model, inputs, whole)
    targets = None if target_of is None else target_of(*whole)
    if targets is not None and len(targets) != len(items):
        raise AuditError(f"{len(items)} items have {len(targets)} targets: {_NEXT}")
    return _Probe(whole, outputs, targets, inputs, target_of)


def _refuse_texts(item: Any, classes: Sequence[str] | None) -> None:
    """Refuses labels that are strings: the order of the model's outputs is not known."""
    last = item[-1] if isinstance(item, tuple | list) and len(item) > 1 else None
    if isinstance(item, Mapping):
        last = next((item[name] for name in _LABELS if name in item), None)
    if isinstance(last, str):
        raise AuditError(
            f"labels are strings (such as {last!r}), and the order of the model's outputs is not known: make "
            "them whole numbers, the positions among the outputs"
        )


def _parts(model: nn.Module, batch: Batch) -> tuple[Any, Callable[..., Tensor] | None]:
    """Splits a batch into the model's arguments and the targets."""
    if len(batch) == 1 and isinstance(batch[0], Mapping):
        key = next((name for name in _LABELS if name in batch[0]), None)
        accepted = set(inspect.signature(model.forward).parameters)

        def keywords(first: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            own = {name: part for name, part in first.items() if name != key}
            takes_all = any(
                p.kind is p.VAR_KEYWORD
                for p in inspect.signature(model.forward).parameters.values()
            )
            return (), own if takes_all else {n: p for n, p in own.items() if n in accepted}

        return keywords, None if key is None else (lambda first: first[key])
    if len(batch) == 1:
        return (lambda *parts: (parts, {})), None
    return (lambda *parts: (parts[:-1], {})), (lambda *parts: parts[-1])


def _outputs(model: nn.Module, inputs: Any, batch: Batch) -> Tensor:
    first = next(model.parameters(), None)
    device = torch.device("cpu") if first is None else first.device
    dtype = None if first is None or not first.is_floating_point() else first.dtype

    def there(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.to(device, dtype if part.is_floating_point() else None)
        if isinstance(part, Mapping):
            return {name: there(value) for name, value in part.items()}
        return part

    arguments, keywords = inputs(*map(there, batch))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            was = [module.training for module in model.modules()]
            model.eval()
            try:
                found = model(*arguments, **keywords)
            finally:
                for module, training in zip(model.modules(), was, strict=True):
                    module.training = training
    except Exception as error:
        raise AuditError(f"the model fails on the first items: {told(error)}; {_NEXT}") from error
    return _tensor_of(found)
