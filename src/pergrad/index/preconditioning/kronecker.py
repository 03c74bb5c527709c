"""EK-FAC: the curvature of each layer in the basis of a Kronecker product, from the engine's own factors.

The gradient of a linear layer is Σ_t g ⊗ x. With the eigenvectors U of E[g gᵀ] and V of E[x xᵀ], the second
moment of Uᵀ G V is nearly diagonal; its diagonal Λ is measured. A convolution is a linear layer of its
windows, an embedding one of unit vectors, where V is the identity. Other parameters have a diagonal of
their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from pergrad.errors import IndexingError
from pergrad.factors import Convolution, Factor, OuterProduct, RowSum
from pergrad.index.preconditioning.base import Damping, OnGradients, refuse_unfinite
from pergrad.index.preconditioning.fitting import FitData, Labels, sampled
from pergrad.quantities import Batch, Quantity
from pergrad.reductions import SampleGradients
from pergrad.reductions.tiles import at_once

__all__ = ["Kronecker", "fit_kronecker"]

State = dict[str, dict[str, Tensor]]
_LEAST = 2.0**-52  # of an eigenvalue, as a share of the largest one and for each of them
_BIASED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def biases_of(model: nn.Module) -> dict[str, str]:
    """Maps weights of linear and convolution layers to their biases, which are one more input of value 1."""
    found = {}
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        bias = getattr(module, "bias", None)
        is_biased = isinstance(module, _BIASED) and bias is not None and bias.requires_grad
        if is_biased and module.weight.requires_grad:
            found[f"{start}weight"] = f"{start}bias"
    names = {name for name, _ in model.named_parameters()}
    return {weight: bias for weight, bias in found.items() if {weight, bias} <= names}


@dataclass
class _Sides:
    left: Tensor  # Σ g gᵀ, (o, o)
    right: Tensor | None  # Σ x xᵀ, (i, i); None: a table, whose inputs are unit vectors


class _Covariances(Quantity):
    """Sums g gᵀ and x xᵀ over samples and positions, for each parameter that has both sides."""

    accumulate = True

    def __init__(self, biases: Mapping[str, str]) -> None:
        self._biases = biases
        self.sides: dict[str, _Sides] = {}

    def begin(self, batch: Batch) -> None: ...
    def end(self) -> None: ...
    def prepend(self, earlier: object) -> None: ...

    def consume(self, name: str, gradients: SampleGradients) -> None:
        factor = sides_of(gradients)
        if factor is None:
            self.sides.pop(name, None)
            return
        g = factor.grad_output.flatten(0, -2).double()
        right = None
        if isinstance(factor, OuterProduct):
            x = _with_ones(factor.input.flatten(0, 1).double(), name in self._biases)
            right = x.T @ x
        own = self.sides.get(name)
        if own is None:
            self.sides[name] = _Sides(g.T @ g, right)
        else:
            own.left += g.T @ g
            if own.right is not None and right is not None:
                own.right += right


def _with_ones(x: Tensor, is_biased: bool) -> Tensor:
    return torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1) if is_biased else x


def sides_of(gradients: SampleGradients) -> OuterProduct | RowSum | None:
    """Returns the gradients as one outer product or table look-up; None if they are neither."""
    factors: list[Factor] = gradients.factors
    if len(factors) != 1:
        return None
    (factor,) = factors
    if isinstance(factor, Convolution) and factor.groups == 1:
        return factor.as_outer_product()
    return factor if isinstance(factor, OuterProduct | RowSum) else None


class _Diagonals(Quantity):
    """Sums (Uᵀ G_n V)² over samples; without a basis, G_n²."""

    def __init__(self, state: State, biases: Mapping[str, str]) -> None:
        self._state = state
        self._biases = biases
        self._joined = {bias for weight, bias in biases.items() if weight in state}
        self.sums: dict[str, Tensor] = {}

    def begin(self, batch: Batch) -> None: ...
    def end(self) -> None: ...

    def consume(self, name: str, gradients: SampleGradients) -> None:
        if name in self._joined:
            return
        if name not in self._state:
            self._add(name, gradients.sum_of_squares().double())
            return
        left, right = self._state[name]["left"], self._state[name].get("right")
        factor = sides_of(gradients)
        assert factor is not None
        g = factor.grad_output.double() @ left
        if right is None:
            assert isinstance(factor, RowSum)
            rotated = SampleGradients([RowSum(factor.index, g, factor.rows)], bound=gradients.bound)
            self._add(name, rotated.sum_of_squares())
            return
        assert isinstance(factor, OuterProduct)
        x = _with_ones(factor.input.double(), name in self._biases) @ right
        step = at_once(8 * g.shape[2] * x.shape[2], gradients.bound)
        for start in range(0, len(g), step):
            some = slice(start, start + step)
            self._add(name, (g[some].mT @ x[some]).square().sum(0))

    def _add(self, name: str, squares: Tensor) -> None:
        self.sums[name] = self.sums[name] + squares if name in self.sums else squares


def fit_kronecker(data: FitData, number: int, labels: Labels) -> State:
    """Returns the bases and diagonals of a checkpoint, by two passes over the data."""
    model = data.maker.models[number]
    loss = sampled(data.maker.loss) if labels == "sampled" else None
    biases = biases_of(model)
    covariances = _Covariances(biases)
    data.run(number, covariances, loss)
    state: State = {}
    for name, sides in covariances.sides.items():
        state[name] = {"left": _basis(sides.left)}
        if sides.right is not None:
            state[name]["right"] = _basis(sides.right)
    diagonals = _Diagonals(state, biases)
    total = data.run(number, diagonals, loss)
    for name, sums in diagonals.sums.items():
        state.setdefault(name, {})["diagonal"] = sums / total
    return {name: {key: t.cpu() for key, t in held.items()} for name, held in state.items()}


def _basis(matrix: Tensor) -> Tensor:
    refuse_unfinite(matrix, "ekfac")
    return torch.linalg.eigh(matrix / matrix.trace().clamp(min=1e-300)).eigenvectors


class Kronecker(OnGradients):
    """U ((Uᵀ G V) / (Λ + λ)) Vᵀ for each parameter, with λ = damping · mean(Λ) of that parameter."""

    def __init__(self, state: State, biases: Mapping[str, str], damping: Damping) -> None:
        self._state = state
        self._biases = {w: b for w, b in biases.items() if "left" in state.get(w, {})}
        self._damping = damping

    def applied(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        joined = set(self._biases.values())
        for name, g in gradients.items():
            if name in joined:
                continue
            held = self._state.get(name)
            if held is None or "diagonal" not in held:  # a parameter that the loss does not reach
                found[name] = g
                continue
            found.update(self._of(name, g, gradients, held))
        return {name: found[name] for name in gradients}

    def _of(
        self, name: str, g: Tensor, gradients: Mapping[str, Tensor], held: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        held = {key: t.to(g.device) for key, t in held.items()}
        diagonal = held["diagonal"]
        largest, damping = float(diagonal.max()), self._damping.of(float(diagonal.mean()))
        if (
            largest == damping == 0
        ):  # no sample of the data moves this parameter: it adds nothing to a score
            bias = self._biases.get(name)
            return {part: torch.zeros_like(gradients[part]) for part in (name, bias) if part}
        if float(diagonal.min()) + damping <= _LEAST * diagonal.numel() * largest:
            raise IndexingError(
                f"the Kronecker product of parameter {name!r} is singular with a damping of {damping:.3g}: "
                "pass a larger damping, such as damping=0.1"
            )
        divisor = diagonal + damping
        if "left" not in held:
            return {name: (g.double() / divisor).to(g)}
        left, right = held["left"], held.get("right")
        if right is None:  # a table: (rows, i), with the basis on its columns
            return {name: ((g.double() @ left / divisor) @ left.T).to(g)}
        bias = self._biases.get(name)
        whole = g.double().reshape(len(g), g.shape[1], prod(g.shape[2:]))
        if bias is not None:
            whole = torch.cat([whole, gradients[bias].double()[:, :, None]], 2)
        solved = left @ ((left.T @ whole @ right) / divisor) @ right.T
        if bias is None:
            return {name: solved.reshape(g.shape).to(g)}
        return {name: solved[:, :, :-1].reshape(g.shape).to(g), bias: solved[:, :, -1].to(g)}
