"""The inverse of a Cholesky factor, to the last digit the same on any number of threads."""

from __future__ import annotations

import numpy as np

from pergrad.attribution.samples import Floats

__all__ = ["whitening"]


def whitening(matrix: Floats) -> Floats:  # (k, k) -> (k, k)
    """The lower triangular W with W M W^T = I, for a symmetric, positive definite M.

    LAPACK splits its factorization by the number of threads, and so rounds in another order: an audit in
    two processes, which have one thread each, would differ from one that has two. Products of a matrix and a
    vector do not; a loop over them takes three milliseconds at k = 256.

    >>> import numpy as np
    >>> whitening(np.array([[4.0, 2.0], [2.0, 17.0]]))
    array([[ 0.5  ,  0.   ],
           [-0.125,  0.25 ]])
    """
    lower = np.zeros_like(matrix)
    inverse = np.zeros_like(matrix)
    for j in range(len(matrix)):
        column = matrix[j:, j] - lower[j:, :j] @ lower[j, :j]
        lower[j:, j] = column / np.sqrt(column[0])
        inverse[j, :j] = -(lower[j, :j] @ inverse[:j, :j])
        inverse[j, j] = 1.0
        inverse[j] /= lower[j, j]
    return inverse
