"""Finds out whether a model mixes samples: changes one, and looks at the gradients of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.engine.checking.comparison import reason_of
from pergrad.engine.checking.trial import Trial
from pergrad.engine.recording.arguments import leaves
from pergrad.errors import PergradError
from pergrad.runtime.tolerances import noise_floor, relative_error, tolerance_of_model

__all__ = ["mixing"]


def mixing(run: Trial, clean: Mapping[str, Tensor], size: int, notes: list[str]) -> list[str]:
    """Lists what is wrong when sample 0 is made NaN; `notes` gets the reason where that cannot be tried."""
    if size == 1:
        return []
    tokens = {
        t.data_ptr()
        for t in leaves(run.batch)
        if isinstance(t, Tensor) and t.dim() > run.dim and t.shape[run.dim] == size
    }
    with _poisoned_embeddings(run.model, size, run.dim, tokens) as hooked:
        spoilt = run.spoilt(0, size)
        if spoilt is None and not hooked.layers:
            return _changing(run, clean, size, notes)
        try:
            found = run.per_sample(run.batch if spoilt is None else spoilt).result
        except PergradError as error:
            return [f"with one sample NaN: {reason_of(error)}"]
        except (RuntimeError, ValueError):  # the model itself refuses NaN
            notes.append("whether samples mix was not tried: the model fails where one is NaN")
            return []
    if spoilt is None and not hooked.was_called:
        return _changing(run, clean, size, notes)
    reached = [
        n for n in range(1, size) if any(_is_spoilt(found[k][n], clean[k][n]) for k in clean)
    ]
    if not reached:
        return []
    return [
        f"the model mixes samples: making sample 0 NaN spoils the gradients of {reached[:8]}; look for "
        "normalisation, attention or sorting over the batch"
    ]


def _changing(run: Trial, clean: Mapping[str, Tensor], size: int, notes: list[str]) -> list[str]:
    """Lists what is wrong when sample 0 becomes a copy of another one: integers cannot be NaN."""
    changed = run.with_copy(0, size)
    if changed is None:
        notes.append("whether samples mix was not tried: the batch has none, or all are the same")
        return []
    found = run.per_sample(changed).result
    floor = noise_floor(clean)
    limit = {name: tolerance_of_model(rows.dtype) for name, rows in clean.items()}
    reached = [
        n
        for n in range(1, size)
        if any(relative_error(found[k][n], clean[k][n], floor) > limit[k] for k in clean)
    ]
    if not reached:
        return []
    return [
        f"the model mixes samples: another sample 0 changes the gradients of {reached[:8]}; look for "
        "normalisation, attention or sorting over the batch"
    ]


def _is_spoilt(grads: Tensor, clean: Tensor) -> bool:
    return bool((grads.isnan() & ~clean.isnan()).any())


@dataclass
class _Hooked:
    layers: int
    was_called: bool = False


@contextmanager
def _poisoned_embeddings(
    model: nn.Module, size: int, dim: int, tokens: set[int]
) -> Iterator[_Hooked]:
    """Within, embeddings look up NaN for sample 0: tokens themselves are integers."""

    def spoil(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        index = args[0] if args else None
        if not isinstance(index, Tensor) or index.data_ptr() not in tokens:
            return output
        if index.dim() <= dim or index.shape[dim] != size:
            return output
        hooked.was_called = True
        keep = torch.ones(size, dtype=output.dtype, device=output.device)
        keep[0] = torch.nan
        shape = [1] * output.dim()
        shape[dim] = size
        return output * keep.view(shape)

    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    hooks = [m.register_forward_hook(spoil) for m in embeddings]
    hooked = _Hooked(len(hooks))
    try:
        yield hooked
    finally:
        for hook in hooks:
            hook.remove()
