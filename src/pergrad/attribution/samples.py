"""Defines the input of every finding: loss, norms and sketch of each sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    sketch: Floats  # (n, k) with E <s_n, s_m> = <g_n, g_m>
    # Of classifiers: sketches of label-free gradients at each checkpoint, the label's class, the class that
    # the model predicts, and its probabilities of both.
    free: Floats | None = None  # (n, checkpoints, k)
    target: Integers | None = None  # (n,), -1 if unknown
    predicted: Integers | None = None  # (n,)
    probability: Floats | None = None  # (n, 2) of the label and of the predicted class

    def __post_init__(self) -> None:
        if len(self.index) == 0:
            raise PergradError("no samples: findings need at least one")
        if self.sketch.ndim != 2:
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

    @property
    def usable(self) -> NDArray[np.bool_]:  # (n,)
        """Returns a mask of the samples whose loss and gradient are finite."""
        return (
            np.isfinite(self.loss) & np.isfinite(self.norm) & np.isfinite(self.sketch).all(axis=1)
        )

    @property
    def comparable(self) -> NDArray[np.bool_]:  # (n,)
        """Returns a mask of the samples whose label-free gradients are finite."""
        assert self.free is not None
        return np.asarray(np.isfinite(self.free).reshape(len(self), -1).all(axis=1))
