"""Hashes numbers on their device: every bit and its place count."""

from __future__ import annotations

import torch
from torch import Tensor

from pergrad.runtime.caches import cached

__all__ = ["hashed"]

_CHUNK = 1 << 20
_WORDS = {4: torch.int32, 2: torch.int16}  # by the bytes of a number


def hashed(t: Tensor) -> Tensor:
    """Returns Σ_j a_j Σ_i b_i w_ij mod 2⁶⁴ of the words w_ij of a tensor, for fixed random a and b.

    `torch.hash_tensor` adds words by XOR: numbers that change places, or come twice, are lost in it.
    """
    if t.layout is torch.sparse_coo:
        t = t.coalesce().values()
    elif t.layout is not torch.strided:
        t = t.values()
    flat = t.detach().contiguous().view(-1)
    size = torch.view_as_real(flat).element_size() if t.is_complex() else flat.element_size()
    words = flat.view(_WORDS.get(min(size, 4), torch.uint8))
    within, between = _multipliers(t.device)
    chunks = [(chunk * within[: len(chunk)]).sum() for chunk in words.split(_CHUNK)]
    found = torch.stack(chunks) if chunks else torch.zeros(0, dtype=torch.int64, device=t.device)
    total: Tensor = (found * between[: len(found)]).sum()
    return total


@cached("random multipliers of hashes, by device", most=16)
def _multipliers(device: torch.device) -> Tensor:  # (2, _CHUNK)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(1 << 62), 1 << 62, (2, _CHUNK), generator=generator)
    return (2 * drawn + 1).to(device)  # odd: no word is lost by itself
