"""Finds samples that meet in the forward pass: exchanges some, and looks at the outputs of the others.

Sample n has a code, the n-th of the ⌊k/2⌋-subsets of k rounds, and is exchanged in these rounds. No code
contains another one, so each ordered pair (m, n) has a round that exchanges m and keeps n. The fewest rounds
for B samples are the least k with C(k, ⌊k/2⌋) ≥ B (Sperner): 8 for 64 samples, 11 for 256.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pergrad.engine.checking.replays import Output, Replay
from pergrad.engine.looping.slices import AnySlices, exchanging
from pergrad.engine.looping.snapshots import random_state
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
    batch = replay.slices()
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
                    "cannot test whether samples mix: even in eval mode, the random numbers that the model "
                    "draws depend on the samples, so such a model cannot be certified"
                )
    if not moved:
        return []
    return [
        f"the model mixes samples: exchanging others changes the outputs of {moved[:8]}; look for "
        "normalisation, attention, sorting or indices over the batch"
    ]


def _moved(replay: Replay, batch: AnySlices, sources: Tensor) -> tuple[list[int], bool]:
    """Lists the samples whose outputs move; and whether all runs draw equally many random numbers."""
    outputs = replay.outputs()
    before = [_detached(o) for o in outputs]
    end = random_state()
    moved: set[int] = set()
    draws_as_before = True
    for exchanged in subsets(replay.size):
        taken = batch.taken_from(exchanging(batch, exchanged, sources))
        after = [_detached(o) for o in replay.outputs(taken)]
        pairs = zip(end, random_state(), strict=True)
        draws_as_before &= all(torch.equal(a, b) for a, b in pairs)
        for output, a, b in zip(outputs, before, after, strict=True):
            rows = _differs(a, b)
            samples = torch.arange(len(rows)) if output.owner is None else output.owner.cpu()
            moved |= {n for n in samples[rows].tolist() if not exchanged[n]}
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


@contextmanager
def _modes_kept(module: nn.Module) -> Iterator[None]:
    modes: Sequence[tuple[nn.Module, bool]] = [(m, m.training) for m in module.modules()]
    try:
        yield
    finally:
        for m, was_training in modes:
            m.training = was_training
