"""Loads one batch of a spec, for `pergrad verify` and `pergrad explain`."""

from __future__ import annotations

from typing import Any

from torch import nn

from pergrad.audit.streaming.loading import Loader, drawing_from
from pergrad.audit.streaming.losses import loss_of_samples
from pergrad.audit.subject.dtypes import moved, own_dtype, placed
from pergrad.audit.subject.options import AuditOptions, chosen_device, chosen_indices
from pergrad.audit.subject.spec import Spec, grouped_parameters

__all__ = ["first_batch"]


def first_batch(spec: Spec, options: AuditOptions) -> tuple[nn.Module, tuple[Any, ...]]:
    """Returns the model and its first batch on the device and in the dtype asked for; checks the loss."""
    device = chosen_device(options.device)
    grouped_parameters(spec)  # raises if no parameter requires grad
    indices = chosen_indices(options.subset, len(spec.dataset), options.seed)
    count = min(options.batch_size or 8, len(indices))
    model = placed(spec.model, device, options.dtype)
    with drawing_from(options.seed, 0):
        loaded = Loader(spec, indices, options.seed).load(0, count)
        dtype = own_dtype(model)
        arguments = tuple(moved(part, device, dtype) for part in loaded.arguments)
        loss_of_samples(spec.loss, model, arguments, count)
    return model, arguments
