"""The cases of an architecture, each compared with the loop over the samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import pergrad
from pergrad.testing import loop_grads
from tests.zoo.architecture import Architecture
from tests.zoo.batches import HEADS, HIDDEN, LENGTH, Inputs
from tests.zoo.comparing import (
    AUTOCAST_TOLERANCE,
    Gradients,
    WrongGradientsError,
    compare,
    compare_rounded,
)
from tests.zoo.conditions import Condition, InapplicableError, checkpointing, under
from tests.zoo.precision import InDouble, default_dtype

__all__ = [
    "Case",
    "PlainModelError",
    "cases_of",
    "largest_error",
    "loss_fn_of",
    "prepared",
]


class PlainModelError(Exception):
    """The model fails by itself, in the loop over the samples: there is nothing to compare."""


@dataclass(frozen=True)
class Case:
    """One call of a model, and how its loss is made."""

    batch: int = LENGTH
    attention: str = "eager"
    experts: str = "eager"
    is_padded: bool = False
    has_labels: bool = False  # the model's own loss, a mean; otherwise one outside, by sample
    keeps_casts: bool = (
        False  # to float32 inside of the model; otherwise it runs in float64 throughout
    )
    condition: Condition = "plain"

    @property
    def dtype(self) -> torch.dtype:
        """`grouped_mm` has no float64, and autocast leaves it alone."""
        is_single = self.experts == "grouped_mm" or self.condition == "autocast"
        return torch.float32 if is_single else torch.float64

    @property
    def tolerance(self) -> float:
        """What the largest error may be, relative to the largest element of a parameter's gradient."""
        if self.condition == "autocast":
            return AUTOCAST_TOLERANCE
        if self.dtype == torch.float32:
            return 1e-4
        return 1e-5 if self.keeps_casts else 1e-9

    def __str__(self) -> str:
        flags = {"padded": self.is_padded, "labels": self.has_labels, "casts": self.keeps_casts}
        words = [f"batch {self.batch}", self.attention]
        words += [self.experts] * (self.experts != "eager")
        words += [self.condition] * (self.condition != "plain")
        return ", ".join(words + [word for word, is_set in flags.items() if is_set])


def cases_of(architecture: Architecture, condition: Condition = "plain") -> Iterator[Case]:
    """A batch as large as the sequence is long, and others; each way of attention, experts, loss.

    Under other conditions than the plain one, two batches, and the model's own loss.
    """
    is_maskable = architecture.is_maskable
    attentions = architecture.attention()
    best = attentions[-1]
    if condition != "plain":
        yield Case(LENGTH, best, condition=condition)
        yield Case(3, attentions[0], is_padded=is_maskable, condition=condition)
        if _takes_labels(architecture):
            yield Case(LENGTH, best, has_labels=True, condition=condition)
        return
    for attention in attentions:
        for batch in (LENGTH, 3):
            for is_padded in (False, True) if is_maskable else (False,):
                yield Case(batch, attention, is_padded=is_padded)
    for batch in (1, HEADS, HIDDEN):
        yield Case(batch, best, is_padded=is_maskable)
    for experts in architecture.experts()[1:]:
        for batch in (LENGTH, 3):
            yield Case(batch, best, experts)
    if not architecture.overflows_in_float32:
        yield Case(LENGTH, best, keeps_casts=True)
    if _takes_labels(architecture):
        yield Case(LENGTH, best, has_labels=True)
        yield Case(3, best, has_labels=True)


def _takes_labels(architecture: Architecture) -> bool:
    takes_labels = "labels" in inspect.signature(architecture.model_class.forward).parameters
    return takes_labels and architecture.takes_labels


def largest_error(
    architecture: Architecture,
    case: Case,
    device: str = "cpu",
    grads: Callable[..., dict[str, Tensor]] = pergrad.grads,
    tolerance: float | None = None,
) -> float:
    """Relative to the largest element of a parameter's gradient; raises where that is too large.

    Under autocast, the largest distance of a sample's gradient from the loop's, relative to the longest.
    """
    if case.condition == "reentrant" and architecture.reentrant == "endless":
        raise InapplicableError("torch itself calls its checkpoints for ever")
    in_double = case.dtype == torch.float64 and not case.keeps_casts
    with default_dtype(case.dtype), InDouble() if in_double else nullcontext():
        try:
            model, batch = prepared(architecture, case, device)
            loss_fn = loss_fn_of(architecture, case, under(case.condition, device))
            expected = loop_grads(model, loss_fn, *batch, batch_size=case.batch)
            if case.condition == "autocast":
                unrounded = loss_fn_of(architecture, case, nullcontext())
                exact = loop_grads(model, unrounded, *batch, batch_size=case.batch)
            if case.condition != "plain":
                with checkpointing(model, case.condition):
                    ordinary = _ordinary(case, model, loss_fn, batch)
        except InapplicableError:
            raise
        except Exception as error:
            if case.condition != "plain":
                raise InapplicableError(f"{type(error).__name__}: {error}") from error
            raise PlainModelError(f"{type(error).__name__}: {error}") from error
        if case.condition in ("checkpoint", "reentrant"):
            _check_that_checkpoints_work(ordinary, expected, case.tolerance)
        loss_reduction = "mean" if case.has_labels else "sum"
        with checkpointing(model, case.condition):
            found = grads(model, loss_fn, *batch, loss_reduction=loss_reduction)
    if case.condition == "autocast":
        return compare_rounded(found, expected, exact, ordinary)
    return compare(found, expected, tolerance or case.tolerance)


LossFn = Callable[[nn.Module, Inputs, list[Tensor]], Tensor]
Batch = tuple[Inputs, list[Tensor]]


def prepared(architecture: Architecture, case: Case, device: str) -> tuple[nn.Module, Batch]:
    """The model, and what its loss takes."""
    model = architecture.build(case.attention, case.experts, case.dtype).to(device)
    torch.manual_seed(1)
    inputs = architecture.inputs(case.batch)
    if case.is_padded:
        inputs["attention_mask"] = _padding(case.batch, inputs["input_ids"].shape[1])
    inputs = tree_map_only(Tensor, lambda t: t.to(device), inputs)
    with torch.no_grad():
        plain = model(**inputs, **architecture.options)
    if case.has_labels:
        inputs["labels"] = _labels(plain["logits"])
        return model, (inputs, [])
    return model, (inputs, [torch.randn_like(output) for output in _outputs(architecture, plain)])


def loss_fn_of(
    architecture: Architecture, case: Case, condition: AbstractContextManager[Any]
) -> LossFn:
    def loss_fn(model: nn.Module, inputs: Inputs, cotangents: list[Tensor]) -> Tensor:
        with condition:
            found = model(**inputs, **architecture.options)
        if case.has_labels:
            return found["loss"]
        terms = zip(_outputs(architecture, found), cotangents, strict=True)
        return sum((output * c).flatten(1).sum(1) for output, c in terms)

    return loss_fn


def _ordinary(case: Case, model: nn.Module, loss_fn: LossFn, batch: Batch) -> Gradients:
    """The gradient of the sum of the samples' losses, by torch itself."""
    loss_fn(model, *batch).sum().backward()  # reentrant checkpoints know no other way
    parts = case.batch if case.has_labels else 1
    found = {
        name: torch.zeros_like(p) if p.grad is None else parts * p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    model.zero_grad()
    return found


def _check_that_checkpoints_work(
    ordinary: Gradients, expected: Gradients, tolerance: float
) -> None:
    """That with layers checkpointed torch's own gradient is still the sum over the samples."""
    try:
        compare(
            {name: g.unsqueeze(0) for name, g in ordinary.items()},
            {name: g.sum(0, keepdim=True) for name, g in expected.items()},
            tolerance,
        )
    except WrongGradientsError as error:
        raise InapplicableError(f"torch's own gradients differ: {error}") from error


def _outputs(architecture: Architecture, found: Any) -> list[Tensor]:
    return [found[key] for key in architecture.outputs or (0,)]


def _padding(batch: int, length: int) -> Tensor:
    """Samples of three lengths, all padded: the library leaves out the mask of one that is not.

    Some models then compute something else, so that such a sample alone is not what it is in a batch.
    """
    lengths = length - 1 - torch.arange(batch) % 3
    return (torch.arange(length) < lengths[:, None]).long()


def _labels(logits: Tensor) -> Tensor:
    *shape, classes = logits.shape
    return torch.randint(3 if classes > 3 else 0, classes, shape).to(logits.device)
