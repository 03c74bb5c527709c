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
from pergrad.testing import loop_grads
from tests.zoo.architecture import Architecture
from tests.zoo.batches import HEADS, HIDDEN, LENGTH, Inputs

__all__ = [
    "Case",
    "InDouble",
    "WrongGradientsError",
    "cases_of",
    "default_dtype",
    "largest_error",
]


class WrongGradientsError(AssertionError):
    """Further from the loop's than rounding goes."""


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

    @property
    def dtype(self) -> torch.dtype:
        """`grouped_mm` has no float64."""
        return torch.float32 if self.experts == "grouped_mm" else torch.float64

    @property
    def tolerance(self) -> float:
        """What the largest error may be, relative to the largest element of a parameter's gradient."""
        if self.dtype == torch.float32:
            return 1e-4
        return 1e-5 if self.keeps_casts else 1e-9

    def __str__(self) -> str:
        flags = {"padded": self.is_padded, "labels": self.has_labels, "casts": self.keeps_casts}
        words = [f"batch {self.batch}", self.attention]
        words += [self.experts] * (self.experts != "eager")
        return ", ".join(words + [word for word, is_set in flags.items() if is_set])


def cases_of(architecture: Architecture) -> Iterator[Case]:
    """A batch as large as the sequence is long, and others; each way of attention, experts, loss."""
    is_maskable = architecture.is_maskable
    attentions = architecture.attention()
    best = attentions[-1]
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
    takes_labels = "labels" in inspect.signature(architecture.model_class.forward).parameters
    if takes_labels and architecture.takes_labels:
        yield Case(LENGTH, best, has_labels=True)
        yield Case(3, best, has_labels=True)


class InDouble(TorchFunctionMode):
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

        if func is Tensor.float:
            func = Tensor.double
        given = {} if kwargs is None else kwargs
        return func(*map(raised, args), **{key: raised(value) for key, value in given.items()})


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def largest_error(architecture: Architecture, case: Case, device: str = "cpu") -> float:
    """Relative to the largest element of a parameter's gradient; raises where that is too large."""
    with default_dtype(case.dtype):
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
            in_double = case.dtype == torch.float64 and not case.keeps_casts
            with InDouble() if in_double else nullcontext():
                found = model(**inputs, **architecture.options)
            if case.has_labels:
                return found["loss"]
            terms = zip(_outputs(architecture, found), cotangents, strict=True)
            return sum((output * c).flatten(1).sum(1) for output, c in terms)

        batch = (inputs, cotangents)
        expected = loop_grads(model, loss_fn, *batch, batch_size=case.batch)
        loss_reduction = "mean" if case.has_labels else "sum"
        found = pergrad.grads(model, loss_fn, *batch, loss_reduction=loss_reduction)
    return _compare(found, expected, case.tolerance)


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
