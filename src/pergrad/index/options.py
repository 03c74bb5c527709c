"""Defines and checks the options of an index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pergrad.audit.subject.dtypes import Dtype
from pergrad.errors import IndexingError
from pergrad.index.rows.projecting import Projection, default_dim
from pergrad.index.store.numbers import StoredDtype, checked_dtype

__all__ = ["IndexOptions", "Per"]

Per = Literal["sample", "token"]


@dataclass(frozen=True)
class IndexOptions:
    """Options of an index.

    Args:
        projection: "count" adds every entry of a gradient, with a random sign, to one of `dim` buckets;
            "rademacher" and "normal" multiply by a dense random matrix, which is exact in theory and slow for
            large models; "two_sided" multiplies each matrix from both sides, as LoGra does, to `dim`
            numbers of its own; "none" stores whole gradients, for small models.
        dim: the numbers of a row; of each parameter for "two_sided". By default 2048, and 256 for
            "two_sided".
        seed: random seed for the projection, the subset, and random draws of the model and the data set.
        dtype: the dtype that rows are stored in. Each row has a scale of its own: nothing overflows.
        per: "sample", or "token": a row for each token of a language model.
        subset: a number of samples, drawn at random by the seed, or a range such as "100:600".
        batch_size: samples per batch; by default chosen from the free memory. Halved when memory runs out.
        chunk: samples per file, which is all that a crash can lose; by default a 16th of the data, and at
            most 32 MB.
        compute_dtype: the dtype to compute in; by default the model's.
        device: such as "cpu" or "cuda:1"; by default a GPU if there is one.
        workers: processes that load the data; 0 loads in the main process.
        strict: stop at the first item that cannot be read; by default it is skipped, listed and counted.
        certify: prove the gradients of the first samples before the build begins, as `pergrad.certify` does.
        keep_states: save the state of the model and its checkpoints in the index, to query it later with
            nothing but the module.
    """

    projection: Projection = "count"
    dim: int | None = None
    seed: int = 0
    dtype: StoredDtype = "float16"
    per: Per = "sample"
    subset: str | int | None = None
    batch_size: int | None = None
    chunk: int | None = None
    compute_dtype: Dtype | None = None
    device: str | None = None
    workers: int = 0
    strict: bool = False
    certify: bool = True
    keep_states: bool = True

    def __post_init__(self) -> None:
        checked_dtype(self.dtype)
        if self.projection not in get_args(Projection):
            allowed = ", ".join(map(repr, get_args(Projection)))
            raise IndexingError(f"projection must be one of {allowed}, got {self.projection!r}")
        if self.per not in get_args(Per):
            raise IndexingError(f"per must be 'sample' or 'token', got {self.per!r}")
        if self.compute_dtype is not None and self.compute_dtype not in get_args(Dtype):
            allowed = ", ".join(get_args(Dtype))
            raise IndexingError(
                f"compute_dtype must be one of {allowed}, got {self.compute_dtype!r}"
            )
        for name in ("dim", "batch_size", "chunk"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise IndexingError(f"{name} must be a positive integer, got {value!r}")
        if not isinstance(self.workers, int) or self.workers < 0:
            raise IndexingError(f"workers must be 0 or more, got {self.workers!r}")

    @property
    def width(self) -> int:
        """Returns `dim`, or its default."""
        return self.dim if self.dim is not None else default_dim(self.projection)
