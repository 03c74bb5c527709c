"""Computes the exact Gauss-Newton matrix of a small model: the reference for all other preconditioners."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from pergrad.errors import IndexingError
from pergrad.index.preconditioning.base import Damping, OnGradients, factorized, refuse_unfinite
from pergrad.index.preconditioning.fitting import FitData, Loss, output_of
from pergrad.index.rows.computing import RowMaker
from pergrad.quantities import Grads

__all__ = ["GaussNewton", "fit_gauss_newton"]

_MOST = 10_000  # parameters; the matrix of more takes over 800 MB
_MOST_OUTPUTS = 1_000
_BYTES = 2**28  # of derivatives of all outputs that are held at once


def fit_gauss_newton(data: FitData, number: int) -> Tensor:
    """Σ_n J_nᵀ H_n J_n / N, (p, p): J_n the derivatives of the model's outputs, H_n the Hessian of the loss
    in them.

    For a linear model it is the Hessian.
    """
    size = sum(prod(shape) for shape in data.maker.shapes.values())
    refuse_large(size)
    device = data.maker.device
    total, samples = torch.zeros(size, size, dtype=torch.float64, device=device), 0
    for _, arguments, count in data.batches():
        total += _of_batch(data.maker, number, arguments, count, size)
        samples += count
    refuse_unfinite(total, "gauss_newton")
    return (total / max(1, samples)).cpu()


def refuse_large(size: int) -> None:
    """Refuses a model of so many parameters that the matrix does not fit."""
    if size > _MOST:
        raise IndexingError(
            f"the Gauss-Newton matrix of {size:,} parameters does not fit: it is for at most {_MOST:,}; take "
            "preconditioner='ekfac'"
        )


def _of_batch(
    maker: RowMaker, number: int, arguments: tuple[Any, ...], count: int, size: int
) -> Tensor:
    model = maker.models[number]
    hessian = output_hessian(model, maker.loss, arguments).double()  # (n, o, o)
    outputs = hessian.shape[1]
    if outputs > _MOST_OUTPUTS:
        raise IndexingError(
            f"the model has {outputs:,} outputs for each sample, and its Gauss-Newton matrix at most "
            f"{_MOST_OUTPUTS:,}: take preconditioner='ekfac'"
        )
    if count > 1 and 8 * count * outputs * size > _BYTES:
        # No half of a batch can be taken in general: its parts may be of any kind.
        raise IndexingError(
            f"derivatives of {outputs} outputs do not fit for a batch of {count}: pass a smaller batch_size"
        )
    jacobian = []
    for output in range(outputs):
        grads = Grads()

        def one(model: nn.Module, *batch: Any, output: int = output) -> Tensor:
            return output_of(model, maker.loss, batch).flatten(1)[:, output]

        maker.run(model, arguments, [grads], count, one)
        jacobian.append(torch.cat([g.flatten(1) for g in grads.result.values()], 1).double())
    derivatives = torch.stack(jacobian, 1)  # (n, o, p)
    return torch.einsum("nap,nab,nbq->pq", derivatives, hessian, derivatives)


def output_hessian(model: nn.Module, loss: Loss, batch: tuple[Any, ...]) -> Tensor:
    """Returns the Hessian of each sample's loss in the model's outputs, (n, o, o)."""
    with torch.no_grad():
        output = output_of(model, loss, batch)
    leaf = output.detach().double().requires_grad_()
    handle = model.register_forward_hook(lambda _, __, own: _replaced(own, leaf))
    try:
        with torch.enable_grad():
            losses = loss(model, *batch)
            (first,) = torch.autograd.grad(losses.sum(), leaf, create_graph=True)
    finally:
        handle.remove()
    flat = first.flatten(1) if first.dim() > 1 else first[:, None]
    rows = []
    for column in range(flat.shape[1]):
        if not flat.requires_grad:
            rows.append(torch.zeros_like(flat))
            continue
        (second,) = torch.autograd.grad(
            flat[:, column].sum(), leaf, retain_graph=True, allow_unused=True
        )
        second = torch.zeros_like(leaf) if second is None else second
        rows.append(second.reshape(flat.shape))
    return torch.stack(rows, 1).detach()


def _replaced(own: Any, leaf: Tensor) -> Any:
    if isinstance(own, Tensor):
        return leaf
    own.logits = leaf
    return own


class GaussNewton(OnGradients):
    """(H + λ I)^-1 with λ = damping · tr(H) / p, on gradients of all parameters as one vector."""

    def __init__(self, matrix: Tensor, damping: Damping) -> None:
        self.damping = damping.of(float(matrix.trace()) / max(1, len(matrix)))
        self._factor = factorized(matrix, self.damping, "the Gauss-Newton matrix")

    def applied(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = torch.cat([g.flatten(1) for g in gradients.values()], 1)
        solved = torch.cholesky_solve(flat.double().cpu().T, self._factor).T.to(flat)
        parts = solved.split([prod(g.shape[1:]) for g in gradients.values()], 1)
        return {n: p.reshape(g.shape) for (n, g), p in zip(gradients.items(), parts, strict=True)}
