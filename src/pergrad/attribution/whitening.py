"""Inverts a Cholesky factor, bit for bit the same on any number of threads."""

from __future__ import annotations

import numpy as np

from pergrad.attribution.samples import Floats

__all__ = ["whitening"]

_BLOCK = 32


def whitening(matrix: Floats) -> Floats:  # (k, k) -> (k, k)
    """W lower triangular with W M W^T = I, for a symmetric, positive definite M.

    LAPACK splits the factorization of a large matrix by the number of threads, which changes the rounding: an
    audit in two processes with one thread each would differ from an audit in one process with two. Matrix
    products and factorizations of small blocks do not have this problem, so this uses only those.

    >>> import numpy as np
    >>> whitening(np.array([[4.0, 2.0], [2.0, 17.0]]))
    array([[ 0.5  ,  0.   ],
           [-0.125,  0.25 ]])
    """
    left = matrix.copy()  # the Schur complement of the finished blocks
    lower = np.zeros_like(matrix)
    inverse = np.zeros_like(matrix)
    for start in range(0, len(matrix), _BLOCK):
        before, here = slice(0, start), slice(start, start + _BLOCK)
        after = slice(start + _BLOCK, None)
        block = np.tril(np.linalg.inv(np.linalg.cholesky(left[here, here])))
        lower[after, here] = left[after, here] @ block.T
        left[after, after] -= lower[after, here] @ lower[after, here].T
        inverse[here, before] = -block @ (lower[here, before] @ inverse[before, before])
        inverse[here, here] = block
    return inverse
