"""Defines the input of every finding: loss, norms and sketch of each sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pergrad.attribution.matrices import Matrix, finite_rows
from pergrad.errors import PergradError

__all__ = ["Floats", "Integers", "Samples"]

Floats = NDArray[np.floating]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """Arrays with one row per sample, in order of `index`; checks that all have the same length.

    A sample whose loss or gradient is not finite is kept: it is a finding by itself. Comparisons between
    samples skip its sketch, see `usable`.

    >>> import numpy as np
    >>> ones = np.ones(2)
    >>> len(Samples(np.arange(2), ones, ones, {"head": ones}, np.eye(2)))
    2
    """

    index: Integers  # (n,) which sample of the data set
    loss: Floats  # (n,)
    norm: Floats  # (n,) of the gradient over all parameters
    group_norms: Mapping[str, Floats]  # group of parameters -> (n,)
    sketch: Matrix  # (n, k) with E <s_n, s_m> = <g_n, g_m>; in memory, or read from a file
    # Of classifiers: sketches of label-free gradients at each checkpoint, the label's class, the class that
    # the model predicts, and its probabilities of both.
    free: Matrix | None = None  # (n, checkpoints, k)
    target: Integers | None = None  # (n,), -1 if unknown
    predicted: Integers | None = None  # (n,)
    probability: Floats | None = None  # (n, 2) of the label and of the predicted class

    def __post_init__(self) -> None:
        if len(self.index) == 0:
            raise PergradError("no samples: findings need at least one")
        if len(self.sketch.shape) != 2:
            raise PergradError(f"sketch must be (n, k), got shape {self.sketch.shape}")
        if self.sketch.shape[1] == 0:
            raise PergradError("sketch must have at least one column, got none")
        if bool((np.diff(self.index) <= 0).any()):
            raise PergradError("index must increase from row to row: sort the samples by index")
        vectors = {"index": self.index, "loss": self.loss, "norm": self.norm}
        vectors |= {f"group_norms[{name!r}]": norms for name, norms in self.group_norms.items()}
        vectors |= {
            name: values
            for name, values in (("target", self.target), ("predicted", self.predicted))
            if values is not None
        }
        others = {"sketch": self.sketch, "free": self.free, "probability": self.probability}
        for name, values in vectors.items():
            if values.ndim != 1:
                raise PergradError(f"{name} must be (n,), got shape {values.shape}")
        for name, array in {**vectors, **others}.items():
            if array is not None and len(array) != len(self.index):
                raise PergradError(
                    f"{name} has {len(array)} rows, but index has {len(self.index)}: pass one row per sample"
                )

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def has_gradient(self) -> NDArray[np.bool_]:  # (n,)
        """Returns a mask of the samples whose norm and sketch are finite."""
        return np.isfinite(self.norm) & finite_rows(self.sketch)

    @cached_property
    def usable(self) -> NDArray[np.bool_]:  # (n,)
        """Returns a mask of the samples whose loss and gradient are finite."""
        return np.isfinite(self.loss) & self.has_gradient

    @cached_property
    def comparable(self) -> NDArray[np.bool_]:  # (n,)
        """Returns a mask of the samples whose label-free gradients are finite."""
        assert self.free is not None
        return finite_rows(self.free)
