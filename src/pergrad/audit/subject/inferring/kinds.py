"""Chooses the loss of each sample by the shapes and values of outputs and targets."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pergrad.audit.subject.inferring.collating import IGNORED, LABELS
from pergrad.audit.subject.inferring.probing import NEXT, Batch, Probe
from pergrad.errors import AuditError

__all__ = ["Kind", "as_they_are", "inferred_kind", "kind_of_loss", "takes_outputs"]

_OF_REGRESSION = (
    *("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "GaussianNLLLoss", "PoissonNLLLoss"),
    *(
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "gaussian_nll_loss",
        "poisson_nll_loss",
    ),
)
_SMALLEST = 1e-12  # probability whose logarithm is taken


def as_they_are(outputs: Tensor) -> Tensor:
    """Returns outputs that are logits."""
    return outputs


@dataclass(frozen=True)
class Kind:
    """The loss of each sample; of classifiers also how outputs become logits and targets classes."""

    title: str
    criterion: Callable[..., Tensor]  # criterion(logits or outputs, targets or None, batch) -> (n,)
    logits: Callable[[Tensor], Tensor] = as_they_are
    classes: Callable[[Tensor], Tensor] | None = None  # targets -> (n,) int64; None: no classes
    outputs: int = 0  # number of classes
    is_of_outputs: bool = (
        False  # whether the criterion takes the outputs as they are, not the logits
    )


def takes_outputs(loss: Any) -> bool:
    """Whether a loss is called as loss(outputs, targets): a module, or a function of torch.nn.functional."""
    if isinstance(loss, nn.Module):
        return True
    try:
        names = list(inspect.signature(loss).parameters)
    except (TypeError, ValueError):
        return False
    return names[:2] == ["input", "target"] and "reduction" in names


def kind_of_loss(loss: Any, probe: Probe) -> Kind:
    """Returns the kind of a given loss of outputs and targets, one number for each sample."""
    name = getattr(loss, "__name__", type(loss).__name__)
    if probe.targets is None:
        raise AuditError(
            f"loss={name} compares outputs with targets, but the items have no targets"
        )
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction"):
            raise AuditError(f"loss={name} has no reduction to switch off: {NEXT}")
        apart = copy.deepcopy(loss)
        apart.__dict__["reduction"] = "none"
        each: Callable[..., Tensor] = functools.partial(_beside, apart)
    else:
        each = functools.partial(loss, reduction="none")

    def criterion(out: Tensor, y: Tensor, batch: Batch) -> Tensor:
        found = each(out, y)
        return found.flatten(1).mean(1) if found.dim() > 1 else found

    title = f"{name}, one for each sample"
    is_whole = not probe.targets.is_floating_point()
    if is_whole and probe.outputs.dim() == 2 and probe.targets.dim() == 1:
        classes = max(2, probe.outputs.shape[1])
        return Kind(title, criterion, classes=_whole, outputs=classes)
    if name not in _OF_REGRESSION:
        try:
            found = inferred_kind(probe)
            return replace(found, title=title, criterion=criterion, is_of_outputs=True)
        except AuditError:  # only the loss knows what the targets are
            pass
    return Kind(title, criterion)


def _beside(loss: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    """Calls a loss whose own tensors, such as weights of classes, may lie elsewhere than the outputs."""
    own = [*loss.parameters(), *loss.buffers()]
    if any(t.device != out.device or (t.is_floating_point() and t.dtype != out.dtype) for t in own):
        loss = copy.deepcopy(loss).to(out.device, out.dtype)
    found: Tensor = loss(out, y)
    return found


def inferred_kind(probe: Probe) -> Kind:
    """Returns the kind that fits the outputs and targets; an error if none does."""
    outputs, targets = probe.outputs, probe.targets
    if targets is None:
        if outputs.dim() != 3:
            raise AuditError(
                f"the data set has no targets{_keys(probe)}, and the model's outputs of shape "
                f"{tuple(outputs.shape)} are not logits of tokens: no loss can be inferred; {NEXT}"
            )
        return Kind("next token, mean over the tokens", _next_token)
    is_whole = not targets.is_floating_point()
    is_flat = targets.dim() == 1 or (targets.dim() == 2 and targets.shape[1] == 1)
    if is_flat and outputs.dim() == 2 and outputs.shape[1] > 1 and _are_whole(probe.more_targets()):
        return _of_classes(probe)
    if is_flat and outputs.numel() == len(targets) and _are_binary(probe.more_targets()):
        return _of_one_logit(probe)
    if is_whole and outputs.dim() == targets.dim() + 1 and outputs.numel() > len(targets):
        if _repeats_inputs(probe):
            return Kind("next token, mean over the tokens with a label", _next_label)
        where = -1 if outputs.shape[:-1] == targets.shape else 1
        return Kind(
            "cross-entropy, mean over the positions",
            lambda out, y, batch: _mean_over_positions(out.movedim(where, 1), y),
        )
    if targets.shape == outputs.shape and targets.dim() == 2 and targets.shape[1] > 1:
        more = probe.more_targets()
        if _are_shares(more) and probe.last_function != "sigmoid":
            return _of_shares(probe)
        if _are_binary(more):
            return Kind(
                "binary cross-entropy of each label, mean over the labels",
                lambda out, y, batch: F.binary_cross_entropy_with_logits(
                    out, y.to(out.dtype), reduction="none"
                ).mean(1),
                logits=_odds if probe.last_function == "sigmoid" else as_they_are,
            )
    if is_whole and is_flat and len(probe.names) > 2:
        raise AuditError(
            f"the labels are names of {len(probe.names)} classes, but the model has one output for a sample: "
            f"{NEXT}"
        )
    if targets.numel() == outputs.numel():
        return Kind("squared error, mean over the outputs", _squared)
    raise AuditError(
        f"no loss fits outputs of shape {tuple(outputs.shape)} and {targets.dtype} targets of shape "
        f"{tuple(targets.shape)}: {NEXT}"
    )


def _keys(probe: Probe) -> str:
    """Names the keys of a batch that is a dict, and those under which targets are found."""
    first = probe.batch[0]
    if not isinstance(first, Mapping):
        return ""
    return f" (its keys are {', '.join(map(str, first))}; targets are called {', '.join(LABELS)})"


def _of_classes(probe: Probe) -> Kind:
    count = probe.outputs.shape[1]
    _refuse_classes(_whole(probe.more_targets()), count, probe.index_of, probe.names)

    def criterion(out: Tensor, y: Tensor, batch: Batch) -> Tensor:
        if not _are_whole(y):
            raise AuditError(
                f"targets of classes must be whole numbers, got {_odd_one(y):g}; {NEXT}"
            )
        _refuse_classes(_whole(y), count)
        return F.cross_entropy(out, _whole(y), reduction="none")

    title, logits = _title_and_logits(probe, "cross-entropy of the logits")
    return Kind(title, criterion, logits, _whole, count)


def _of_shares(probe: Probe) -> Kind:
    """Targets are probabilities of classes, such as one-hot vectors."""
    title, logits = _title_and_logits(probe, "cross-entropy of the logits with one-hot targets")
    return Kind(
        title,
        lambda out, y, batch: F.cross_entropy(out, y.to(out.dtype), reduction="none"),
        logits,
        lambda y: y.argmax(1),
        probe.outputs.shape[1],
    )


def _title_and_logits(probe: Probe, title: str) -> tuple[str, Callable[[Tensor], Tensor]]:
    values = probe.outputs.detach().double()
    are_shares = bool((values >= 0).all() and ((values.sum(1) - 1).abs() < 1e-3).all())
    if probe.last_function == "softmax" or are_shares:
        return "negative log of the probabilities that the model returns", (
            lambda out: out.clamp(min=_SMALLEST).log()
        )
    return title, as_they_are


def _of_one_logit(probe: Probe) -> Kind:
    is_share = probe.last_function == "sigmoid"
    what = "the probability that the model returns" if is_share else "one logit"

    def criterion(out: Tensor, y: Tensor, batch: Batch) -> Tensor:
        if not _are_binary(y):
            raise AuditError(
                f"a target is {y.max().item():g}: targets of one logit must be 0 or 1; {NEXT}"
            )
        return F.binary_cross_entropy_with_logits(
            out.flatten(), y.flatten().to(out.dtype), reduction="none"
        )

    logits = _odds if is_share else as_they_are
    return Kind(f"binary cross-entropy of {what}", criterion, logits, _whole, 2)


def _odds(shares: Tensor) -> Tensor:
    return torch.logit(shares, eps=1e-6)


def _whole(targets: Tensor) -> Tensor:  # (n,) or (n, 1) -> (n,) int64
    return targets.flatten().long()


def _refuse_classes(
    targets: Tensor,
    count: int,
    index_of: Callable[[int], int] | None = None,
    names: Sequence[str] = (),
) -> None:
    wrong = (targets >= count) | ((targets < 0) & (targets != IGNORED))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        where = f" of sample {index_of(row)}" if index_of is not None else ""
        number = int(targets[row])
        named = f" ({names[number]!r} of {', '.join(names)})" if 0 <= number < len(names) else ""
        raise AuditError(
            f"a target{where} is {number}{named}, but the model has {count} outputs: classes must lie "
            f"from 0 to {count - 1} ({IGNORED} for unknown ones)"
        )


def _are_whole(targets: Tensor) -> bool:
    """Whether these are whole numbers, also as floats, which files with empty cells have."""
    return not targets.is_floating_point() or bool((targets == targets.round()).all())


def _odd_one(targets: Tensor) -> float:
    return float(targets[targets != targets.round()][0])


def _are_binary(targets: Tensor) -> bool:
    return bool(((targets == 0) | (targets == 1)).all())


def _are_shares(targets: Tensor) -> bool:
    return bool((targets >= 0).all() and ((targets.double().sum(1) - 1).abs() < 1e-5).all())


def _squared(out: Tensor, y: Tensor, batch: Batch) -> Tensor:
    difference = out - y.reshape(out.shape).to(out.dtype)
    return difference.square().flatten(1).mean(1) if out.dim() > 1 else difference.square()


def _mean_over_positions(
    logits: Tensor, targets: Tensor
) -> Tensor:  # (n, c, ...), (n, ...) -> (n,)
    _refuse_classes(_whole(targets), logits.shape[1])
    losses = F.cross_entropy(logits, targets.long(), reduction="none", ignore_index=IGNORED)
    return losses.flatten(1).sum(1) / (targets != IGNORED).flatten(1).sum(1).clamp(min=1)


def _next_token(logits: Tensor, y: Tensor | None, batch: Batch) -> Tensor:
    first = batch[0]
    tokens = first["input_ids"] if isinstance(first, Mapping) else first
    targets = tokens[:, 1:]
    if isinstance(first, Mapping) and "attention_mask" in first:
        targets = targets.masked_fill(first["attention_mask"][:, 1:] == 0, IGNORED)
    return _mean_over_positions(logits[:, :-1].mT, targets)


def _next_label(logits: Tensor, y: Tensor, batch: Batch) -> Tensor:
    return _mean_over_positions(logits[:, :-1].mT, y[:, 1:])


def _repeats_inputs(probe: Probe) -> bool:
    """Whether labels are the input tokens themselves, as Hugging Face's language models take them."""
    first, targets = probe.batch[0], probe.targets
    if not isinstance(first, Mapping) or targets is None:
        return False
    tokens = first.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.shape != targets.shape:
        return False
    counted = targets != IGNORED
    return bool(counted.any() and (targets == tokens)[counted].all())
