"""Finds the groups of layers that hold most of the gradient."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pergrad.attribution.samples import Floats

__all__ = ["dominant_groups", "layer_named", "unusual_group"]


def dominant_groups(group_norms: Mapping[str, Floats]) -> dict[str, float]:
    """Σ_n |g_n, group|² / Σ_n |g_n|², the largest first, over the samples with finite norms.

    >>> import numpy as np
    >>> dominant_groups({"body": np.array([3.0, 0.0]), "head": np.array([4.0, 0.0])})
    {'head': 0.64, 'body': 0.36}
    """
    if not group_norms:
        return {}
    norms = np.stack([np.asarray(values, dtype=np.float64) for values in group_norms.values()])
    norms = norms[:, np.isfinite(norms).all(axis=0)]
    # Scaling by the largest keeps the squares from overflowing.
    largest = float(norms.max(initial=0.0)) or 1.0
    squares = np.square(norms / largest).sum(axis=1)
    shares = squares / (float(squares.sum()) or 1.0)
    pairs = zip(group_norms, shares.tolist(), strict=True)
    return dict(sorted(pairs, key=lambda pair: -pair[1]))


def layer_named(name: str) -> str:
    """Returns the name of a group within a sentence; numbers, as in `nn.Sequential`, need a word.

    >>> layer_named("head"), layer_named("3"), layer_named("0.2")
    ('head', 'layer 3', 'layer 0.2')
    """
    return f"layer {name}" if name.replace(".", "").isdecimal() else name


def unusual_group(group_norms: Mapping[str, Floats], samples: int) -> list[str | None]:
    """Returns, for each sample, a group with at least half of its squared norm but a median share below 1/4.

    The median is over the samples. The result is None for most samples, and for samples that are not finite.

    >>> import numpy as np
    >>> unusual_group({"body": np.array([1.0, 1, 9]), "head": np.array([4.0, 4, 4])}, 3)
    [None, None, 'body']
    """
    if not group_norms:
        return [None] * samples
    names = list(group_norms)
    norms = np.stack([np.asarray(values, dtype=np.float64) for values in group_norms.values()])
    usable = np.isfinite(norms).all(axis=0) & (norms > 0).any(axis=0)
    if not usable.any():
        return [None] * samples
    shares = np.square(norms[:, usable] / norms[:, usable].max(axis=0))
    shares /= shares.sum(axis=0)
    unusual = (shares >= 0.5) & (np.median(shares, axis=1, keepdims=True) < 0.25)
    found: list[str | None] = [None] * samples
    rows, largest = np.flatnonzero(usable), np.where(unusual, shares, -1.0).argmax(axis=0)
    for column in np.flatnonzero(unusual.any(axis=0)):
        found[rows[column]] = names[largest[column]]
    return found
