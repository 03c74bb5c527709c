"""Holds what an index is made of: model, checkpoints, data and loss, checked against its fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.audit.streaming.fingerprint import fingerprint_of_function, fingerprint_of_model
from pergrad.audit.subject.checkpoints import checkpoint_modules
from pergrad.audit.subject.dtypes import own_dtype, placed
from pergrad.audit.subject.inferring import inferred_spec
from pergrad.audit.subject.options import chosen_device
from pergrad.audit.subject.sharding import refuse_index
from pergrad.audit.subject.spec import Spec, grouped_parameters
from pergrad.errors import IndexingError
from pergrad.index.options import IndexOptions

__all__ = ["Placed", "Subject", "identity_of", "in_eval_mode", "made_subject"]


@dataclass(frozen=True)
class Subject:
    """A spec, earlier states of its model, and how to find tokens and read texts."""

    spec: Spec
    checkpoints: tuple[Any, ...] = ()
    tokens: Callable[..., Tensor] | None = None  # called as tokens(*batch); returns a mask, (n, t)
    tokenizer: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        refuse_index(self.spec.model)

    def placed(self, options: IndexOptions, local_rank: int = 0) -> Placed:
        """Returns the models on the device and in the dtype to compute in; those that repeat count once."""
        device = chosen_device(options.device, local_rank)
        grouped_parameters(self.spec)  # raises if no parameter requires grad
        given = checkpoint_modules(self.spec.model, self.checkpoints, device, options.compute_dtype)
        model = placed(self.spec.model, device, options.compute_dtype)
        found: dict[str, nn.Module] = {}
        with in_eval_mode([*given, self.spec.model]):
            own = fingerprint_of_model(self.spec.model)
            for number, (checkpoint, source) in enumerate(
                zip(given, self.checkpoints, strict=True)
            ):
                _refuse_other_parameters(checkpoint, self.spec.model, number)
                is_module = isinstance(source, nn.Module)
                found.setdefault(
                    fingerprint_of_model(source if is_module else checkpoint), checkpoint
                )
        found.pop(own, None)
        found[own] = model
        return Placed(list(found.values()), list(found), device)


@dataclass(frozen=True)
class Placed:
    """The checkpoints of a model, the model itself last, with their fingerprints."""

    models: list[nn.Module]
    fingerprints: list[str]
    device: torch.device

    @cached_property
    def dtype(self) -> str:
        return str(own_dtype(self.models[-1])).removeprefix("torch.")


def _refuse_other_parameters(checkpoint: nn.Module, model: nn.Module, number: int) -> None:
    def shapes(of: nn.Module) -> dict[str, Any]:
        return {name: tuple(p.shape) for name, p in of.named_parameters() if p.requires_grad}

    if shapes(checkpoint) != shapes(model):
        raise IndexingError(
            f"checkpoint {number} has other trained parameters than the model: freeze the same ones in both"
        )


@contextmanager
def in_eval_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Puts the models into eval mode within the block: dropout would make every gradient random."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def made_subject(
    model: Spec | nn.Module,
    dataset: Any = None,
    loss: Any = None,
    *,
    checkpoints: Sequence[Any] = (),
    tokens: Callable[..., Tensor] | None = None,
    tokenizer: Callable[..., Any] | None = None,
    say: Callable[[str], None] = lambda _: None,
    **fields: Any,
) -> Subject:
    """Returns the subject of a spec, or of a model and a data set; infers the loss if none is given."""
    if isinstance(model, Spec):
        if dataset is not None or loss is not None:
            raise IndexingError("a spec has a data set and a loss already: pass the spec alone")
        spec = model
    else:
        if dataset is None:
            raise IndexingError("an index needs a data set: pass dataset=, or a pergrad.audit.Spec")
        spec = inferred_spec(model, dataset, loss, say=say, **fields)
    return Subject(spec, (*spec.checkpoints, *checkpoints), tokens or _attention_mask, tokenizer)


def _attention_mask(*batch: Any) -> Tensor:
    """Returns the attention mask of a batch of tokens; all tokens if it has none."""
    first = batch[0]
    if isinstance(first, Mapping):
        if "attention_mask" in first:
            return first["attention_mask"]
        first = first["input_ids"]
    if not isinstance(first, Tensor) or first.dim() != 2:
        raise IndexingError(
            "an index of tokens needs batches of tokens, (n, t): pass tokens=, called as tokens(*batch), "
            "which "
            "returns a mask of that shape"
        )
    return torch.ones_like(first, dtype=torch.bool)


def identity_of(subject: Subject, placed_: Placed, options: IndexOptions) -> dict[str, Any]:
    """Returns everything that must be equal for rows to belong to one index."""
    return {
        "models": placed_.fingerprints,
        "loss": fingerprint_of_function(subject.spec.loss),
        "projection": options.projection,
        "dim": None if options.projection == "none" else options.width,
        "seed": options.seed,
        "dtype": options.dtype,
        "per": options.per,
        "compute_dtype": options.compute_dtype or placed_.dtype,
        "device": placed_.device.type,
    }
