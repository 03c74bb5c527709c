"""Defines and checks the options of an audit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np
import torch

from pergrad.audit.subject.dtypes import Dtype
from pergrad.errors import AuditError

__all__ = ["AuditOptions", "chosen_device", "chosen_indices"]


_WHOLE_NUMBERS = {
    **{"batch_size": 1, "tokens": 1, "sketch_dim": 1, "free_dim": 1},
    **{"workers": 0, "shown": 0, "seed": 0},
}  # and their least values
_OPTIONAL = ("batch_size", "tokens")
_MOST_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options of an audit.

    Args:
        device: such as "cpu" or "cuda:1"; by default a GPU if there is one.
        batch_size: samples per batch; by default chosen from the free memory. Halved when memory runs out.
        tokens: most tokens per batch, with padding, instead of a batch size: samples are sorted into buckets
            by length, so that batches of short samples have more of them. Halved when memory runs out.
        dtype: the dtype to compute in; by default the model's.
        subset: a number of samples, drawn at random by the seed, or a range such as "100:600".
        seed: random seed for the subset, the sketches, and random draws of the model and the data set.
        sketch_dim: the length of the sketch of each gradient. Longer is more accurate and slower.
        free_dim: the length of the sketch of each label-free gradient, which a classifier's audit compares.
        workers: processes that load the data; 0 loads in the main process.
        save_every: seconds of work that a crash may lose, rounded up to one batch.
        shown: number of suspicious samples for which the report shows a preview and the samples that push
            them.
        duplicates: smallest cosine of near-identical gradients; by default 0.96 of label-free gradients that
            are also much closer than others are, and 0.99 of gradients of the loss. May change without
            computing again.
        strict: stop at the first item that cannot be read; by default it is skipped, listed and counted.
        certify: prove the gradients of the first samples before the audit begins, as `pergrad.certify` does.
    """

    device: str | None = None
    batch_size: int | None = None
    dtype: Dtype | None = None
    subset: str | int | None = None
    seed: int = 0
    sketch_dim: int = 256
    workers: int = 0
    save_every: float = 10.0
    shown: int = 50
    certify: bool = True
    free_dim: int = 512
    strict: bool = False
    duplicates: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, least in _WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            _refuse_other_than(Integral, name, value, "a whole number")
            if value < least:
                raise AuditError(f"{name} must be at least {least}, got {value}")
            object.__setattr__(self, name, int(value))  # also a number of NumPy
        if self.seed > _MOST_SEED:
            raise AuditError(f"seed must be at most {_MOST_SEED}, got {self.seed}")
        for name in ("strict", "certify"):
            if not isinstance(value := getattr(self, name), bool):
                raise AuditError(f"{name} must be True or False, got {value!r}")
        for name in ("save_every", "duplicates"):
            if (value := getattr(self, name)) is not None:
                _refuse_other_than(Real, name, value, "a number")
        if self.device is not None:
            object.__setattr__(self, "device", str(self.device))  # also a torch.device
        if self.batch_size is not None and self.tokens is not None:
            raise AuditError("pass batch_size or tokens, not both: each sets the size of a batch")
        if self.dtype is not None and self.dtype not in get_args(Dtype):
            raise AuditError(f"dtype must be one of {get_args(Dtype)}, got {self.dtype!r}")
        if self.duplicates is not None and not 0 < self.duplicates <= 1:
            raise AuditError(
                f"duplicates must be a cosine above 0 and at most 1, got {self.duplicates}"
            )
        if self.save_every < 0:
            raise AuditError(f"save_every must not be negative, got {self.save_every}")


def _refuse_other_than(kind: Any, name: str, value: Any, words: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise AuditError(f"{name} must be {words}, got {value!r}")


def chosen_indices(subset: str | int | None, size: int, seed: int) -> np.ndarray:  # (n,) int64
    """Returns the indices of the samples to audit, in increasing order.

    >>> chosen_indices("2:5", 10, seed=0)
    array([2, 3, 4])
    """
    if size < 1:
        raise AuditError("the data set is empty: there is nothing to audit")
    if subset is None:
        return np.arange(size, dtype=np.int64)
    text = str(subset).strip()
    if re.fullmatch(r"\d+", text):
        count = int(text)
        if not 1 <= count <= size:
            raise AuditError(
                f"subset: expected 1 to {size} samples, the size of the data set, got {count}"
            )
        drawn = np.random.default_rng(seed).choice(size, count, replace=False)
        return np.sort(drawn).astype(np.int64)
    parts = re.fullmatch(r"(\d*):(\d*)", text)
    if parts is None:
        raise AuditError(
            f"subset: expected a number such as 500 or a range such as 0:500, got {text!r}"
        )
    first = int(parts[1] or 0)
    last = int(parts[2] or size)
    if not 0 <= first < last <= size:
        raise AuditError(f"subset: the range {text} is empty or outside of the {size} samples")
    return np.arange(first, last, dtype=np.int64)


def chosen_device(device: str | None, local_rank: int = 0) -> torch.device:
    """Returns the requested device, or a GPU if there is one, else the CPU; refuses a missing device."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        return torch.device("cuda", local_rank % count) if count else torch.device("cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise AuditError(
            f"torch does not know device {device!r}: try cpu, cuda or cuda:0"
        ) from error
    if found.type == "cuda":
        if not count:
            raise AuditError(
                f"device {device!r}: torch {torch.version.__version__} sees no CUDA GPU on this machine; "
                "leave --device out to run on the CPU"
            )
        if ":" not in device:
            return torch.device("cuda", local_rank % count)
        if found.index >= count:
            raise AuditError(
                f"device {device!r}: there are {count} GPUs, cuda:0 to cuda:{count - 1}"
            )
    elif found.type != "cpu":
        raise AuditError(f"device {device!r}: an audit runs on cpu or cuda")
    return found
