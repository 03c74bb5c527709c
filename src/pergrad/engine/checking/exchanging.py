"""Finds samples that meet in the forward pass: exchanges some, and looks at the outputs of the others.

Sample n has a code, the n-th of the ⌊k/2⌋-subsets of k rounds, and is exchanged in these rounds. No code
contains another one, so each ordered pair (m, n) has a round that exchanges m and keeps n. The fewest rounds
for B samples are the least k with C(k, ⌊k/2⌋) ≥ B (Sperner): 8 for 64 samples, 11 for 256.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from pergrad.engine.checking.replays import Output, Replay
from pergrad.engine.checking.snapshots import random_state
from pergrad.engine.recording.arguments import map_leaves
from pergrad.engine.samples.proving import subsets
from pergrad.errors import PergradError
from pergrad.runtime.tolerances import tolerance_of_rule

__all__ = ["meeting"]

_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
# Their mode decides whether they mix samples, so it is never changed.
_NORMALISATIONS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def meeting(replay: Replay, notes: list[str]) -> list[str]:
    """Lists the samples whose outputs change when others are exchanged; `notes` gets what was not tried."""
    if replay.size == 1:
        return []
    batch = _Batch(replay)
    if not batch.carries_samples:
        raise PergradError(
            f"no tensor among the arguments has {replay.size} samples, so none can be exchanged to see "
            "whether they mix: pass them as tensors (B, ...), or set batch_size and batch_first"
        )
    sources = batch.sources()
    if sources is None:
        notes.append("all samples of the batch are the same: whether they mix was not tried")
        return []
    with _modes_kept(replay.module):
        for m in replay.module.modules():
            if isinstance(m, _DROPOUTS):
                m.training = False
        moved, draws_as_before = _moved(replay, batch, sources)
        if moved and not draws_as_before:
            # With other samples the model draws other random numbers, so nothing can be compared.
            for m in replay.module.modules():
                if not isinstance(m, _NORMALISATIONS):
                    m.training = False
            notes.append(
                "what the model draws depends on its samples: mixing was tried in eval mode"
            )
            moved, draws_as_before = _moved(replay, batch, sources)
            if moved and not draws_as_before:
                raise PergradError(
                    "whether samples mix cannot be tried: even in eval mode, the random numbers that the "
                    "model draws depend on the samples"
                )
    if not moved:
        return []
    return [
        f"the model mixes samples: exchanging others changes the outputs of {moved[:8]}; look for "
        "normalisation, attention, sorting or indices over the batch"
    ]


def _moved(replay: Replay, batch: _Batch, sources: Tensor) -> tuple[list[int], bool]:
    """Lists the samples whose outputs move; and whether all runs draw equally many random numbers."""
    before = [_detached(o) for o in replay.outputs()]
    end = random_state()
    moved: set[int] = set()
    draws_as_before = True
    for exchanged in subsets(replay.size):
        origin = torch.arange(replay.size).where(~exchanged, sources)
        after = [_detached(o) for o in replay.outputs(batch.taken_from(origin))]
        pairs = zip(end, random_state(), strict=True)
        draws_as_before &= all(torch.equal(a, b) for a, b in pairs)
        for a, b in zip(before, after, strict=True):
            moved |= set((_differs(a, b) & ~exchanged).nonzero().flatten().tolist())
    return sorted(moved), draws_as_before


def _detached(output: Output) -> Tensor:  # (n, d)
    by_sample = output.tensor.detach().movedim(output.dim, 0)
    return by_sample.reshape(len(by_sample), -1)


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Tells which samples of two outputs, (n, d), differ by more than rounding; NaN equals NaN."""
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a).flatten(1), torch.view_as_real(b).flatten(1)
    if not a.is_floating_point():
        return (a != b).any(1).cpu()
    finite = torch.where(a.isfinite(), a, 0).abs().double()
    # Relative to the sample's own output, or to a typical one where that is smaller.
    scale = torch.maximum(finite.amax(1), finite.amax(1).median()) if a.shape[1] else finite.sum(1)
    limit = (tolerance_of_rule(a.dtype) * scale)[:, None]
    is_same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs().double() <= limit)
    return (~is_same).any(1).cpu()


class _Batch:
    """Takes samples of a batch in any order, whatever holds them."""

    def __init__(self, replay: Replay) -> None:
        self._arguments = replay.arguments
        self._dims = replay.sample_dims()
        self._size = replay.size
        self.carries_samples = bool(self._dims)

    def taken_from(self, origin: Tensor) -> Any:
        """Replaces each sample n by a copy of sample origin[n]."""
        return map_leaves(
            lambda t: _taken(t, self._dims[id(t)], origin) if id(t) in self._dims else t,
            self._arguments,
        )

    def sources(self) -> Tensor | None:
        """Finds for each sample the next one that differs from it; None where all are the same."""
        found = torch.full((self._size,), -1)
        numbers = torch.arange(self._size)
        for shift in range(1, self._size):
            origin = (numbers + shift) % self._size
            differs = self._differs(origin) & (found < 0)
            found = origin.where(differs, found)
            if bool((found >= 0).all()):
                return found
        return None

    def _differs(self, origin: Tensor) -> Tensor:
        differs = torch.zeros(self._size, dtype=torch.bool)

        def compare(t: Any) -> Any:
            nonlocal differs
            if id(t) in self._dims:
                dim = self._dims[id(t)]
                other = _taken(t, dim, origin)
                if isinstance(t, PackedSequence):
                    t, other, dim = _padded(t), _padded(other), 0
                rows = (t != other).movedim(dim, 0).reshape(self._size, -1)
                differs = differs | rows.any(1).cpu()
            return t

        map_leaves(compare, self._arguments)
        return differs


def _taken(t: Any, dim: int, origin: Tensor) -> Any:
    if isinstance(t, PackedSequence):
        return _taken_from_packed(t, origin)
    found = t.detach().index_select(dim, origin.to(t.device))
    return found.requires_grad_(t.requires_grad)


def _taken_from_packed(packed: PackedSequence, origin: Tensor) -> PackedSequence:
    """Replaces the steps of each sequence by those of another one, as far as both are long enough."""
    sizes = packed.batch_sizes.tolist()
    order = packed.sorted_indices
    ranks = torch.arange(sizes[0])
    sorted_to_sample = ranks if order is None else order.cpu()
    rank_of = torch.empty_like(ranks)
    rank_of[sorted_to_sample] = ranks
    other = rank_of[origin[sorted_to_sample]]  # by rank
    index, start = [], 0
    for size in sizes:
        own = ranks[:size]
        index.append(start + torch.where(other[:size] < size, other[:size], own))
        start += size
    return packed._replace(data=packed.data[torch.cat(index).to(packed.data.device)])


def _padded(packed: PackedSequence) -> Tensor:
    return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]


@contextmanager
def _modes_kept(module: nn.Module) -> Iterator[None]:
    modes: Sequence[tuple[nn.Module, bool]] = [(m, m.training) for m in module.modules()]
    try:
        yield
    finally:
        for m, was_training in modes:
            m.training = was_training
