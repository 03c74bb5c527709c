"""The inverse of a Cholesky factor, to the last digit the same on any number of threads."""

from __future__ import annotations

import numpy as np

from pergrad.attribution.samples import Floats

__all__ = ["whitening"]

_BLOCK = 32


def whitening(matrix: Floats) -> Floats:  # (k, k) -> (k, k)
    """The lower triangular W with W M W^T = I, for a symmetric, positive definite M.

    LAPACK splits the factorization of a large matrix by the number of threads, and rounds in another order:
    an audit in two processes, which have one thread each, would differ from one that has two. Products of
    matrices do not, nor do factorizations of matrices too small to be split: this is made of those.

    >>> import numpy as np
    >>> whitening(np.array([[4.0, 2.0], [2.0, 17.0]]))
    array([[ 0.5  ,  0.   ],
           [-0.125,  0.25 ]])
    """
    left = matrix.copy()  # below and right of what is done, minus what that explains
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
