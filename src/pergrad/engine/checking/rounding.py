"""Measures how far rounding alone moves the ordinary gradient: by reruns that round otherwise.

Each rerun is plain autograd, so an error of the recorded gradients does not show in it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pergrad.engine.checking.attribution import Judge
from pergrad.engine.checking.replays import Replay

__all__ = ["noise_of_sums"]

# A single number, such as a learned scale in float32, often rounds alike in two computations.
_SPLITS = 8
_RERUNS = 3  # of the whole step, with other roundings; whether a ReLU is open may differ in each


def noise_of_sums(
    replay: Replay,
    weights: Tensor,  # (n,)
    parameters: Mapping[str, Tensor],
    judge: Judge,
    scales: Mapping[str, float],
    *,
    forwards: bool = False,
) -> dict[str, float]:
    """Returns the largest error of each parameter's ordinary sum, by computations that round otherwise.

    It is compared with sums of two parts, and with that of a backward pass whose saved tensors are off by
    their rounding: where terms cancel, as in a layer norm of equal numbers, the noise has the size of the
    terms. `forwards=True` also repeats the forward pass, with parameters and inputs off by their rounding.
    """
    found = [_jittered(replay, weights, parameters)]
    outputs = replay.outputs()
    whole = replay.ordinary(outputs, weights, parameters, retain_graph=True)
    for _ in range(1 if forwards else _SPLITS):
        part = weights * torch.rand_like(weights)
        one, other = (
            replay.ordinary(outputs, w, parameters, retain_graph=True)
            for w in (part, weights - part)
        )
        found.append({name: one[name] + other[name] for name in whole})
    del outputs
    for _ in range(_RERUNS if forwards else 0):
        with replay.jittered(_Jitter(torch.finfo(judge.dtype).eps)):
            found.append(replay.ordinary(replay.outputs(), weights, parameters))
    errors = [judge.errors(sums, whole, scales) for sums in found]
    return {name: max(of_each[name] for of_each in errors) for name in whole}


def _jittered(
    replay: Replay, weights: Tensor, parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Computes the ordinary sums from saved tensors that are off by their rounding.

    Transforms of torch.func refuse hooks of saved tensors: there parameters and inputs are off instead.
    """
    try:
        with torch.autograd.graph.saved_tensors_hooks(_kept, _Jitter()):
            outputs = replay.outputs()
    except RuntimeError as error:
        if _NO_HOOKS not in str(error):
            raise
    else:
        return replay.ordinary(outputs, weights, parameters)
    with replay.jittered(_Jitter()):
        return replay.ordinary(replay.outputs(), weights, parameters)


_NO_HOOKS = "saved tensor hooks"  # in the words of torch's error


class _Jitter:
    """Changes each number of a tensor by up to its rounding, at random."""

    def __init__(self, eps: float | None = None) -> None:
        self._eps = eps  # by default that of each tensor's dtype
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, t: Tensor) -> Tensor:
        if not t.is_floating_point() or t.layout != torch.strided:
            return t
        if t.device not in self._generators:  # the model draws from torch's own
            self._generators[t.device] = torch.Generator(t.device).manual_seed(0)
        eps = max(self._eps or 0.0, torch.finfo(t.dtype).eps)
        shift = torch.rand(
            t.shape, generator=self._generators[t.device], dtype=torch.float32, device=t.device
        )
        return (t.detach() * (1 + eps * (2 * shift - 1).double())).to(t.dtype)


def _kept(t: Tensor) -> Tensor:
    return t.detach()  # its node would keep itself alive
