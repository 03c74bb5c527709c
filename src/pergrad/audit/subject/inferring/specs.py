"""Infers a spec from a model and a data set alone; says what it has inferred."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.utils.data import default_collate

from pergrad.audit.subject.files import FileData
from pergrad.audit.subject.inferring.collating import inferred_collate
from pergrad.audit.subject.inferring.kinds import (
    Kind,
    as_they_are,
    inferred_kind,
    kind_of_loss,
    takes_outputs,
)
from pergrad.audit.subject.inferring.probing import Probe, first_items, logits_in, probed
from pergrad.audit.subject.inferring.showing import inferred_show, words_of_show
from pergrad.audit.subject.inferring.sources import (
    as_dataset,
    name_of_data,
    names_in_config,
    names_of_classes,
)
from pergrad.audit.subject.losses import LossOfLogits
from pergrad.audit.subject.spec import Spec, refuse_other_names, size_of
from pergrad.errors import AuditError

__all__ = ["inferred_spec"]


def inferred_spec(
    model: nn.Module,
    dataset: Any,
    loss: Any = None,
    *,
    tokenizer: Any = None,
    say: Callable[[str], None] = lambda _: None,
    **given: Any,
) -> Spec:
    """Returns a spec; tells `say` one line for each inference. What is given is not inferred.

    Args:
        model: the model to audit.
        dataset: a map-style or iterable data set of (input, target), dicts, texts, or inputs alone; a
            DataLoader, a tuple of tensors or arrays, or a data frame.
        loss: as that of a Spec; or a loss of outputs and targets, such as CrossEntropyLoss() or
            F.cross_entropy; or None.
        tokenizer: makes inputs of texts; called as tokenizer(texts, padding=True, truncation=True,
            return_tensors="pt").
        say: receives what was inferred.
        given: other fields of the Spec.
    """
    _refuse_other_models(model)
    has_tokenizer = tokenizer is not None
    known = given.get("classes")
    refuse_other_names(known)
    if known is None:  # the order of names in a file may be another one
        known = names_in_config(model)
    dataset, own_collate = as_dataset(dataset, say, known, prefers_text=has_tokenizer)
    if size_of(dataset) == 0:
        raise AuditError("the data set is empty: there is nothing to audit")
    if own_collate is not None:
        given.setdefault("collate", own_collate)
    if given.get("name") is None and (name := name_of_data(dataset)) is not None:
        given["name"] = name
    if given.get("classes") is None:
        names = names_of_classes(dataset) or known
        if names is not None:
            given["classes"] = names
            if known is not None or not isinstance(dataset, FileData):  # else it has said so itself
                say(f"classes: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}")
    items = first_items(dataset)
    if given.get("collate") is None:
        given["collate"] = inferred_collate(items[0], tokenizer, say)
    if isinstance(loss, type):
        name = loss.__name__
        raise AuditError(f"loss={name} is a class: pass an object of it, {name}()")
    if loss is not None and not takes_outputs(loss):
        if not callable(loss):
            raise AuditError(
                f"loss={loss!r} must be a function or a module of torch.nn, got {type(loss).__name__}"
            )
        _refuse_other_signature(loss, given["collate"], items)
        spec = _with_own_loss(model, dataset, loss, items, say, given)
    else:
        spec = _by_kind(model, dataset, loss, items, say, given)
    return _with_show(spec, items[0], tokenizer, say)


def _refuse_other_models(model: Any) -> None:
    if isinstance(model, type) and issubclass(model, nn.Module):
        name = model.__name__
        raise AuditError(f"the model is the class {name}: pass an object of it, {name}(...)")
    if not isinstance(model, nn.Module):
        raise AuditError(f"the model must be an nn.Module, got {type(model).__name__}")


def _refuse_other_signature(loss: Any, collate: Any, items: list[Any]) -> None:
    """Refuses a loss that cannot be called as loss(model, *batch), such as one of outputs and targets."""
    try:
        signature = inspect.signature(loss)
        batch = (collate or default_collate)(items)
    except Exception:  # no signature, or no batch, which is an error of its own
        return
    parts = list(batch) if isinstance(batch, list | tuple) else [batch]
    try:
        signature.bind(None, *parts)
    except TypeError as error:
        raise AuditError(
            f"loss= is called as loss(model, *batch), here with {1 + len(parts)} arguments, but takes "
            f"{signature}: for a loss of outputs and targets, write lambda model, x, y: ..."
        ) from error


def _by_kind(
    model: nn.Module,
    dataset: Any,
    loss: Any,
    items: list[Any],
    say: Callable[[str], None],
    given: dict[str, Any],
) -> Spec:
    probe = probed(model, dataset, given.get("collate"), given.get("classes"), items)
    kind = inferred_kind(probe) if loss is None else kind_of_loss(loss, probe)
    say(f"loss: {kind.title}")
    fields = _fields(probe, kind)
    spec = Spec(model, dataset, **{**fields, **given})
    _warn_of_names(spec, kind, say)
    if "logits" not in given and "target" not in given:
        say(_words_of_labels(kind))
    return spec


def _with_own_loss(
    model: nn.Module,
    dataset: Any,
    loss: Any,
    items: list[Any],
    say: Callable[[str], None],
    given: dict[str, Any],
) -> Spec:
    """Keeps the loss, and infers the logits and targets of a classifier, by which labels are judged."""
    if "logits" in given or "target" in given:
        return Spec(model, dataset, loss, **given)
    try:
        probe = probed(model, dataset, given.get("collate"), given.get("classes"), items)
        kind = inferred_kind(probe)
    except AuditError:  # only the loss knows how to call this model
        kind = None
    if kind is None or kind.classes is None:
        say("ranking: by loss and gradient; pass logits= and target= to judge labels")
        return Spec(model, dataset, loss, **given)
    say(_words_of_labels(kind))
    spec = Spec(model, dataset, **{**_fields(probe, kind), "loss": loss, **given})
    _warn_of_names(spec, kind, say)
    return spec


def _fields(probe: Probe, kind: Kind) -> dict[str, Any]:
    # The functions close over what decides their results: by that an audit knows them again.
    inputs, target_of, of_outputs, of_logits = (
        probe.inputs,
        probe.target_of,
        kind.logits,
        kind.criterion,
    )

    def outputs(model: nn.Module, *batch: Any) -> Tensor:
        arguments, keywords = inputs(*batch)
        return logits_in(model(*arguments, **keywords))

    def logits(model: nn.Module, *batch: Any) -> Tensor:
        return of_outputs(outputs(model, *batch))

    def criterion(out: Tensor, *batch: Any) -> Tensor:
        targets = None if target_of is None else target_of(*batch).to(out.device)
        return of_logits(out, targets, batch)

    if of_outputs is as_they_are:
        logits = outputs  # one function: both gradients from one forward pass
    fields: dict[str, Any] = {
        "loss": LossOfLogits(outputs if kind.is_of_outputs else logits, criterion)
    }
    if (classes := kind.classes) is not None and target_of is not None:
        fields |= {"logits": logits, "target": lambda *batch: classes(target_of(*batch))}
    return fields


def _warn_of_names(spec: Spec, kind: Kind, say: Callable[[str], None]) -> None:
    count = len(spec.classes or ())
    if kind.classes is not None and 0 < count < kind.outputs:
        say(f"classes: {count} names for {kind.outputs} outputs: the others are called by numbers")


def _words_of_labels(kind: Kind) -> str:
    if kind.classes is None:
        return "ranking: by loss and gradient; labels are not judged, since there are no classes"
    return f"labels: the target, one of {kind.outputs} classes; ranked by label-free gradients"


def _with_show(spec: Spec, item: Any, tokenizer: Any, say: Callable[[str], None]) -> Spec:
    if spec.show is not None:
        return spec
    show = inferred_show(spec.dataset, tokenizer=tokenizer, with_target=spec.target is None)
    say(f"show: {words_of_show(show, item)}")
    return replace(spec, show=show)
