"""Defines and checks the options of an index, and how it tells what it does."""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from pergrad.audit.subject.dtypes import Dtype
from pergrad.audit.subject.spec import Spec
from pergrad.errors import IndexingError
from pergrad.index.rows.projecting import Projection, default_dim
from pergrad.index.store.numbers import StoredDtype, checked_dtype

__all__ = ["IndexOptions", "NormsKind", "Per", "Printing", "split_options"]

Per = Literal["sample", "token"]
NormsKind = Literal["exact", "estimated"]


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
        norms: "exact" stores the norm of each whole gradient beside its row; "estimated" the length of the
            row, which is off by about 1 / √(2 k) for a count sketch of k numbers. Scores do not depend on it.
            By default exact on a CPU, where it costs little, and estimated on a GPU, where exact norms take
            as long as the weight gradients of training.
        per: "sample", or "token": a row for each token of a language model.
        subset: a number of samples, drawn at random by the seed, or a range such as "100:600".
        batch_size: samples per batch; by default chosen from the free memory. Halved when memory runs out.
        chunk: samples per file, which is all that a crash can lose; by default a 16th of the data, and at
            most 32 MB.
        compute_dtype: the dtype to compute in; by default the model's.
        device: such as "cpu" or "cuda:1"; by default a GPU if there is one.
        workers: processes that load the data; 0 loads in the main process.
        compile: trace and compile the step, as `pergrad.compiled` does, for rows of samples; by default on a
            GPU, if there are at least 100 batches. A model that cannot be traced runs uncompiled.
        strict: stop at the first item that cannot be read; by default it is skipped, listed and counted.
        certify: prove the gradients of the first samples before the build begins, as `pergrad.certify` does.
        keep_states: save the state of the model and its checkpoints in the index, to query it later with
            nothing but the module.
    """

    projection: Projection = "count"
    dim: int | None = None
    seed: int = 0
    dtype: StoredDtype = "float16"
    norms: NormsKind | None = None
    per: Per = "sample"
    subset: str | int | None = None
    batch_size: int | None = None
    chunk: int | None = None
    compute_dtype: Dtype | None = None
    device: str | None = None
    workers: int = 0
    compile: bool | None = None
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
        if self.norms is not None and self.norms not in get_args(NormsKind):
            raise IndexingError(f"norms must be 'exact' or 'estimated', got {self.norms!r}")
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


class Printing:
    """Prints inferences and messages on stderr; shows no bar."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet

    def begin(self, samples: int, done: int) -> None: ...
    def advance(self, samples: int) -> None: ...
    def say(self, message: str) -> None:
        if not self._quiet:
            print(f"pergrad: {message}", file=sys.stderr)


def split_options(
    options: IndexOptions | None, given: dict[str, Any]
) -> tuple[IndexOptions, dict[str, Any]]:
    """Splits keywords into options of the index and fields of the spec; suggests a name for a typo."""
    of_options = {field.name for field in fields(IndexOptions)}
    of_spec = {field.name for field in fields(Spec)} - {"model", "dataset", "loss", "checkpoints"}
    for name in given:
        if name not in of_options | of_spec:
            near = difflib.get_close_matches(name, [*of_options, *of_spec], 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise IndexingError(f"an index has no option {name!r}{hint}")
    chosen = {name: value for name, value in given.items() if name in of_options}
    made = replace(options or IndexOptions(), **chosen)
    return made, {name: value for name, value in given.items() if name in of_spec}
