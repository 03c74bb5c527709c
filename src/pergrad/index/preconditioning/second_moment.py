"""Preconditions rows by the inverse of their own second moment, with damping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pergrad.index.preconditioning.base import Damping, OnGradients, OnRows, factorized
from pergrad.index.store.numbers import unscaled
from pergrad.index.store.store import Store

__all__ = ["SecondMoment", "lengths_of", "moments_of"]

_REFERENCE = 512  # the sketch whose mean eigenvalue is the unit of the damping
_MOST_ROWS = 2**16  # that a moment is estimated from


class SecondMoment(OnRows):
    """(M + λ I)^-1 with M = Σ_n s_n s_nᵀ / N over the rows and λ = damping · tr(M) / 512.

    tr(M) is the mean squared norm of the gradients, whatever the length of the rows: the damping does not
    depend on it. A damping of 1 is the mean eigenvalue of a sketch of 512 numbers.

    >>> precondition = SecondMoment(torch.tensor([[3.0, 0.0], [0.0, 1.0]]), Damping(0.0, ridge=1.0))
    >>> precondition.applied(torch.tensor([[4.0, 4.0]]))
    tensor([[1., 2.]])
    """

    def __init__(self, moment: Tensor, damping: Damping) -> None:
        moment = moment.double()
        self.damping = damping.of(float(moment.trace()) / _REFERENCE)
        self._factor = factorized(moment, self.damping, "the second moment of the rows")

    def applied(self, rows: Tensor) -> Tensor:
        found = torch.cholesky_solve(rows.double().cpu().T, self._factor).T
        return found.to(rows)

    def lengths(self, rows: Tensor) -> Tensor:
        """√(sᵀ (M + λ I)^-1 s), (n,)."""
        factor = self._factor.to(rows.dtype)
        return torch.linalg.solve_triangular(factor, rows.T, upper=False).norm(dim=0)


def lengths_of(store: Store, preconditioners: Sequence[OnRows | OnGradients] | None) -> Tensor:
    """Returns the length of each row at each checkpoint, (n, c): by the preconditioner, or plain."""
    found = []
    for block in store.blocks():
        kept = slice(None) if block.kept is None else block.kept
        rows = unscaled(block.rows[kept], block.facts.scale[kept], store.dtype)
        found.append(
            torch.stack([_lengths(rows[:, c], preconditioners, c) for c in range(rows.shape[1])], 1)
        )
    return torch.cat(found) if found else torch.zeros(0, store.manifest.checkpoints)


def _lengths(
    rows: Tensor, preconditioners: Sequence[OnRows | OnGradients] | None, number: int
) -> Tensor:
    if preconditioners is None:
        return rows.norm(dim=1)
    own = preconditioners[number]
    assert isinstance(own, SecondMoment), "unit_norm is refused for others"
    return own.lengths(rows)


def moments_of(store: Store) -> list[Tensor]:
    """Returns the second moment of the rows at each checkpoint, (k, k), from at most 65,536 rows.

    Rows that are not finite do not count.
    """
    checkpoints, width = store.manifest.checkpoints, store.manifest.width
    total = torch.zeros(checkpoints, width, width, dtype=torch.float64)
    count = 0
    for block in store.blocks(every=max(1, len(store) // _MOST_ROWS)):
        kept = slice(None) if block.kept is None else block.kept
        rows = unscaled(block.rows[kept], block.facts.scale[kept], store.dtype)
        rows = rows[torch.isfinite(rows).flatten(1).all(1)]
        count += len(rows)
        for number in range(checkpoints):
            some = rows[:, number]
            total[number] += (some.T @ some).double()
    return list(total / max(count, 1))
