"""The cases of an architecture, each compared with the loop over the samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

import pergrad
from pergrad.engine.composites import without_override_check
from pergrad.testing import loop_grads
from tests.zoo.architecture import Architecture
from tests.zoo.batches import HEADS, HIDDEN, LENGTH, Inputs
from tests.zoo.conditions import Condition, InapplicableError, checkpointing, under

__all__ = ["Case", "PlainModelError", "WrongGradientsError", "cases_of", "largest_error"]

# Under autocast the loop itself is off by up to 0.1, since its products are rounded to bfloat16. A sample
# taken for another one, or a factor of two, is off by one.
_AUTOCAST_TOLERANCE = 0.1
_MIX_UP = 2 * _AUTOCAST_TOLERANCE  # what another sample's gradients must be off by at least


class WrongGradientsError(AssertionError):
    """Further from the loop's than rounding goes."""


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
            return _AUTOCAST_TOLERANCE
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


class _InDouble(TorchFunctionMode):
    """Within: what the model's code casts to float32 is cast to float64.

    Rounding to float32 blows the last bit of a float64 up to 1e-7, in the loop as anywhere else.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def raised(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func in (
            Tensor.backward,
            torch.autograd.backward,
        ):  # in which a checkpoint runs its forward again
            with self:
                return without_override_check(func)(*args, **(kwargs or {}))
        if func is Tensor.float:
            func = Tensor.double
        given = {} if kwargs is None else kwargs
        return func(*map(raised, args), **{key: raised(value) for key, value in given.items()})


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def largest_error(architecture: Architecture, case: Case, device: str = "cpu") -> float:
    """Relative to the largest element of a parameter's gradient; raises where that is too large.

    Under autocast, the largest distance of a sample's gradient from the loop's, relative to the longest.
    """
    in_double = case.dtype == torch.float64 and not case.keeps_casts
    with _default_dtype(case.dtype), _InDouble() if in_double else nullcontext():
        try:
            model, loss_fn, batch = _prepared(architecture, case, device)
            expected = loop_grads(model, loss_fn, *batch, batch_size=case.batch)
        except Exception as error:
            raise PlainModelError(f"{type(error).__name__}: {error}") from error
        if case.condition in ("checkpoint", "reentrant"):
            _check_that_checkpoints_work(case, model, loss_fn, batch, expected)
        loss_reduction = "mean" if case.has_labels else "sum"
        with checkpointing(model, case.condition):
            found = pergrad.grads(model, loss_fn, *batch, loss_reduction=loss_reduction)
    if case.condition == "autocast":
        return _compare_rounded(found, expected)
    return _compare(found, expected, case.tolerance)


LossFn = Callable[[nn.Module, Inputs, list[Tensor]], Tensor]
Batch = tuple[Inputs, list[Tensor]]


def _prepared(
    architecture: Architecture, case: Case, device: str
) -> tuple[nn.Module, LossFn, Batch]:
    """The model, a loss of it, and what that takes."""
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
        cotangents = []
    else:
        cotangents = [torch.randn_like(output) for output in _outputs(architecture, plain)]

    def loss_fn(model: nn.Module, inputs: Inputs, cotangents: list[Tensor]) -> Tensor:
        with under(case.condition, device):
            found = model(**inputs, **architecture.options)
        if case.has_labels:
            return found["loss"]
        terms = zip(_outputs(architecture, found), cotangents, strict=True)
        return sum((output * c).flatten(1).sum(1) for output, c in terms)

    return model, loss_fn, (inputs, cotangents)


def _check_that_checkpoints_work(
    case: Case, model: nn.Module, loss_fn: LossFn, batch: Batch, expected: dict[str, Tensor]
) -> None:
    """That the ordinary gradient is still the sum over the samples when layers are checkpointed."""
    try:
        with checkpointing(model, case.condition):
            loss_fn(model, *batch).sum().backward()
    except (RuntimeError, ValueError, TypeError) as error:
        raise InapplicableError(f"{type(error).__name__}: {error}") from error
    parts = case.batch if case.has_labels else 1
    summed = {name: rows.sum(0, keepdim=True) / parts for name, rows in expected.items()}
    found = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).unsqueeze(0)
        for name, p in model.named_parameters()
        if name in expected
    }
    model.zero_grad()
    try:
        _compare(found, summed, case.tolerance)
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


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> float:
    if found.keys() != expected.keys():
        raise WrongGradientsError(f"of {sorted(found)} instead of {sorted(expected)}")
    largest = {name: g.abs().max().item() if g.numel() else 0.0 for name, g in expected.items()}
    # Some gradients are zero but for rounding: that of a key's bias, which softmax does not see.
    floor = 1e-6 * max(largest.values())
    assert floor > 0, "no parameter has a gradient"
    errors: dict[str, float] = {}
    for name, g in expected.items():
        if found[name].shape != g.shape:
            raise WrongGradientsError(f"{name}: {found[name].shape} instead of {g.shape}")
        if g.numel():
            errors[name] = (found[name] - g).abs().max().item() / max(largest[name], floor)
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    if wrong:
        raise WrongGradientsError(f"{len(wrong)} of {len(expected)} parameters: {wrong}")
    return max(errors.values())


def _compare_rounded(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest distance, relative to the longest gradient of a sample; raises if it, or a mix-up, is off.

    Gradients below a hundredth of the model's longest, as that of a key's bias, are noise to this.
    """

    def longest(rows: Tensor) -> float:
        return rows.reshape(len(rows), -1).norm(dim=1).max().item()

    lengths = {name: longest(g) for name, g in expected.items() if g.numel()}
    floor = 1e-2 * max(lengths.values())
    assert floor > 0, "no parameter has a gradient"

    def distance(name: str, rows: Tensor) -> float:
        return longest(rows - expected[name]) / max(lengths[name], floor)

    errors = {name: distance(name, found[name]) for name in lengths}
    wrong = {name: error for name, error in errors.items() if not error <= _AUTOCAST_TOLERANCE}
    if wrong:
        raise WrongGradientsError(f"{len(wrong)} of {len(expected)} parameters: {wrong}")
    blind = [
        name
        for name, length in lengths.items()
        if length > floor and distance(name, expected[name].roll(1, 0)) < _MIX_UP
    ]
    if blind:
        raise PlainModelError(f"a mix-up of samples would not be noticed in {blind}")
    return max(errors.values())
