"""Prepares an audit in each process, and identifies it so that it can resume."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from pergrad.audit.streaming.fingerprint import (
    checksum_of_model,
    fingerprint_of_data,
    fingerprint_of_function,
    fingerprint_of_model,
)
from pergrad.audit.streaming.loading import item_of
from pergrad.audit.streaming.ranks import Ranks
from pergrad.audit.streaming.sketching.norms_and_sketch import SKETCHES
from pergrad.audit.subject.checkpoints import loaded_checkpoints
from pergrad.audit.subject.dtypes import own_dtype
from pergrad.audit.subject.lengths import by_bucket, length_of
from pergrad.audit.subject.options import AuditOptions, chosen_device, chosen_indices
from pergrad.audit.subject.places import told
from pergrad.audit.subject.sharding import device_of, is_sharded_model
from pergrad.audit.subject.spec import Spec, grouped_parameters, size_of
from pergrad.distributed.sharding import reshard
from pergrad.errors import AuditError

__all__ = ["Task", "made_task", "refuse_different_ranks", "with_buckets", "with_one_hash"]


@dataclass(frozen=True)
class Task:
    """A spec and its options, with the device, indices, groups and fingerprints derived from them."""

    spec: Spec
    options: AuditOptions
    device: torch.device
    indices: np.ndarray
    groups: dict[str, list[str]]
    model_fingerprint: str
    data_fingerprint: str
    data_repeats: bool
    padded: np.ndarray | None = (
        None  # length of each sample's bucket, if batches have a token budget
    )

    @property
    def is_sharded(self) -> bool:
        """Whether all processes must run the model together."""
        return is_sharded_model(self.spec.model)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Returns everything that must be equal for an audit to resume; all processes compute it."""
        dtype = self.options.dtype or str(own_dtype(self.spec.model)).removeprefix("torch.")
        return {
            "model": self.model_fingerprint,
            "dataset": self.data_fingerprint,
            "loss": fingerprint_of_function(self.spec.loss),
            "groups": list(self.groups),
            "subset": self.options.subset,
            "seed": self.options.seed,
            "sketch_dim": self.options.sketch_dim,
            "version_of_sketches": SKETCHES,
            **self._of_classifier,
            "dtype": dtype,
            "device": self.device.type,
            "batch_size": self.options.batch_size,
            **self._of_lengths,
        }

    @property
    def _of_lengths(self) -> dict[str, Any]:
        if self.options.tokens is None:
            return {}
        length = self.spec.length
        own = None if length is None else fingerprint_of_function(length)
        return {"tokens": self.options.tokens, "length": own}

    @property
    def _of_classifier(self) -> dict[str, Any]:
        spec = self.spec
        if spec.logits is None:
            return {}
        return {
            "logits": fingerprint_of_function(spec.logits),
            "target": None if spec.target is None else fingerprint_of_function(spec.target),
            "free_dim": self.options.free_dim,
            "checkpoints": [fingerprint_of_model(model) for model in self.checkpoints],
        }

    @cached_property
    def checkpoints(self) -> list[nn.Module]:
        """Returns the earlier states of the model, as modules on the device of the audit."""
        return loaded_checkpoints(self.spec, self.device, self.options.dtype)

    @cached_property
    def presentation(self) -> dict[str, Any]:
        """Returns what may change without computing a gradient again."""
        spec, known = self.spec, self.spec.known_wrong
        return {
            "show": None if spec.show is None else fingerprint_of_function(spec.show),
            "label": None if spec.label is None else fingerprint_of_function(spec.label),
            "classes": None if spec.classes is None else [str(name) for name in spec.classes],
            "known_wrong": None if known is None else [int(index) for index in known],
            "shown": self.options.shown,
            "duplicates": self.options.duplicates,
            "name": spec.title,
        }


def made_task(spec: Spec, options: AuditOptions, ranks: Ranks) -> Task:
    if is_sharded_model(spec.model):
        reshard(spec.model)
        device = device_of(spec.model, options.device)
    else:
        device = chosen_device(options.device, ranks.local)
    groups = grouped_parameters(spec)
    indices = chosen_indices(options.subset, size_of(spec.dataset), options.seed)
    of_data, repeats = fingerprint_of_data(spec.dataset, options.seed)
    return Task(spec, options, device, indices, groups, "", of_data, repeats)


def with_one_hash(task: Task, ranks: Ranks) -> Task:
    """Returns the task with the fingerprint of its model, which the first process computes for all.

    That of a sharded model needs all processes.
    """
    if task.is_sharded:
        found = ranks.together(lambda: fingerprint_of_model(task.spec.model))
    else:
        found = ranks.first_decides(lambda: fingerprint_of_model(task.spec.model))
    return replace(task, model_fingerprint=found)


def with_buckets(task: Task, ranks: Ranks) -> Task:
    """Returns the task with its samples sorted by length, if batches have a token budget.

    The first process reads all items once, and tells the others their order.
    """
    if task.options.tokens is None:
        return task
    length, dataset = task.spec.length or length_of, task.spec.dataset

    def of(index: int) -> int:
        try:
            item = item_of(dataset, index)
        except AuditError:
            return 0  # skipped, or refused, when its batch is read
        try:
            return int(length(item))
        except AuditError:
            raise
        except Exception as error:
            raise AuditError(f"spec.length failed on item {index}: {told(error)}") from error

    indices, padded = ranks.first_decides(lambda: by_bucket(task.indices, of))
    return replace(task, indices=indices, padded=padded)


def refuse_different_ranks(task: Task, ranks: Ranks) -> None:
    """Raises an error if the processes have built different specs; models are compared by checksums."""
    identities = [task.identity]
    if ranks.count > 1:
        sums = {"model": checksum_of_model(task.spec.model)}
        own = {**task.identity, **sums}
        identities = ranks.all_agree(own)
    else:
        own = task.identity

    def compare() -> None:
        for number, identity in enumerate(identities):
            for key, value in identity.items():
                if value != own[key]:
                    raise AuditError(
                        f"processes {ranks.number} and {number} differ in {key}: seed all random draws in "
                        "the reference, so that every process builds the same spec"
                    )

    ranks.together(compare)
