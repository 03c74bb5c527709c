"""Which layers the gradients lie in."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pergrad.attribution.samples import Floats

__all__ = ["dominant_groups"]


def dominant_groups(group_norms: Mapping[str, Floats]) -> dict[str, float]:
    """Σ_n |g_n, group|² / Σ_n |g_n|², the largest first; samples that are not finite are left out.

    >>> import numpy as np
    >>> dominant_groups({"body": np.array([3.0, 0.0]), "head": np.array([4.0, 0.0])})
    {'head': 0.64, 'body': 0.36}
    """
    if not group_norms:
        return {}
    norms = np.stack([np.asarray(values, dtype=np.float64) for values in group_norms.values()])
    norms = norms[:, np.isfinite(norms).all(axis=0)]
    # Scaled by the largest, so that squares do not overflow.
    largest = float(norms.max(initial=0.0)) or 1.0
    squares = np.square(norms / largest).sum(axis=1)
    shares = squares / (float(squares.sum()) or 1.0)
    pairs = zip(group_norms, shares.tolist(), strict=True)
    return dict(sorted(pairs, key=lambda pair: -pair[1]))
