"""Defines the cells of recurrent networks: one step and its derivative, each in few operations.

A cell gets its input already projected, x = W_i x_t + b_i. Small operations, step by step, read from
the cache; over all steps at once they took longer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.factors.choosing import chooser_of
from pergrad.runtime import internals, operation

__all__ = ["GRU", "LSTM", "RELU", "TANH", "Cell", "Kept", "State"]

State: TypeAlias = tuple[Tensor, ...]  # (h,) or (h, c), each (rows, features)
Kept: TypeAlias = tuple[Tensor, ...]

_through_sigmoid = torch.ops.aten.sigmoid_backward.default  # (g, s) -> g s (1 - s)
_through_tanh = torch.ops.aten.tanh_backward.default  # (g, s) -> g (1 - s^2)


def _through_relu(g: Tensor, s: Tensor) -> Tensor:
    """Returns g where s > 0, else 0."""
    return torch.ops.aten.threshold_backward.default(g, s, 0)


def _hidden(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W_h h + b_h, in the dtype of the weights; under autocast the state may have a wider one."""
    return F.linear(h.to(weight.dtype), weight, bias)


class Cell(ABC):
    """One step of a recurrent network."""

    def at(self, projected: Tensor) -> Cell:
        """Returns the implementation of this cell for the machine that the projected input is on."""
        return self

    @abstractmethod
    def step(
        self, x: Tensor, state: State, weight: Tensor, bias: Tensor | None
    ) -> tuple[State, Kept]:
        """Returns the next state and the tensors that `pull` needs."""

    @abstractmethod
    def pull(
        self, kept: Kept, grads: State, weight: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor, State]:
        """Returns the gradients of x, of W_h h + b_h and of the previous state, given those of the next one.

        Writes the gradient of x to `out`, if given.
        """


def _like_steps(x: Tensor, hidden: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(c), torch.empty_like(c), torch.empty_like(hidden)


@operation("lstm_step", _like_steps)
def _lstm_step(x: Tensor, hidden: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h', c' and (i, f, g, o), in one launch; all arguments have one dtype."""
    h, after, gates = internals.fused_lstm_cell(x, hidden, c)
    return h, after, gates


def _like_pulls(
    of_h: Tensor, of_c: Tensor, c: Tensor, after: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gates), torch.empty_like(c)


@operation("lstm_pull", _like_pulls)
def _lstm_pull(
    of_h: Tensor, of_c: Tensor, c: Tensor, after: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the gradients of x + W_h h + b_h and of c in one launch."""
    pull = internals.fused_lstm_cell_backward
    of_gates, of_before, _ = pull(of_h, of_c, c, after, gates, False)
    return of_gates, of_before


class _Lstm(Cell):
    """c' = σ(f) c + σ(i) tanh(g),  h' = σ(o) tanh(c'),  with (i, f, g, o) = x + W_h h + b_h."""

    def at(self, projected: Tensor) -> Cell:
        return LSTM_WAYS[chooser_of(projected).pick("step of an LSTM")]

    def step(
        self, x: Tensor, state: State, weight: Tensor, bias: Tensor | None
    ) -> tuple[State, Kept]:
        h, c = state
        gates = _hidden(h, weight, bias).add_(x)
        i, f, g, o = gates.chunk(4, -1)
        gates[:, : 2 * i.shape[1]].sigmoid_()  # i and f
        g.tanh_()
        o.sigmoid_()
        after = f * c + i * g
        shown = after.tanh()
        return (o * shown, after), (i, f, g, o, shown, c)

    def pull(
        self, kept: Kept, grads: State, weight: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor, State]:
        i, f, g, o, shown, c = kept
        of_h, of_c = grads
        of_c = of_c + _through_tanh(of_h * o, shown)
        of_gates = [
            _through_sigmoid(of_c * g, i),
            _through_sigmoid(of_c * c, f),
            _through_tanh(of_c * i, g),
            _through_sigmoid(of_h * shown, o),
        ]
        both = torch.cat(of_gates, -1, out=out).to(weight.dtype)
        return both, both, (both @ weight, of_c * f)


class _FusedLstm(_Lstm):
    """Computes an LSTM step by one product and torch's fused kernel, in the dtype of the states."""

    def step(
        self, x: Tensor, state: State, weight: Tensor, bias: Tensor | None
    ) -> tuple[State, Kept]:
        h, c = state
        hidden = _hidden(h, weight, bias).to(c.dtype)
        output, after, gates = _lstm_step(x.to(c.dtype), hidden, c)
        return (output, after), (gates, c, after)

    def pull(
        self, kept: Kept, grads: State, weight: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor, State]:
        gates, c, after = kept
        of_h, of_c = (t.to(c.dtype) for t in grads)
        found, of_before = _lstm_pull(of_h, of_c, c, after, gates)
        both = found.to(weight.dtype) if out is None else out.copy_(found)
        return both, both, (both @ weight, of_before)


class _Gru(Cell):
    """n = tanh(x_n + σ(r) m),  h' = (h - n) σ(z) + n,  with (r, z, m) = W_h h + b_h and x added to r, z."""

    def step(
        self, x: Tensor, state: State, weight: Tensor, bias: Tensor | None
    ) -> tuple[State, Kept]:
        (h,) = state
        hidden = _hidden(h, weight, bias)
        r, z, m = hidden.chunk(3, -1)
        width = 2 * r.shape[1]
        hidden[:, :width].add_(x[:, :width]).sigmoid_()  # r and z
        n = (x[:, width:] + r * m).tanh_()
        return ((h - n) * z + n,), (r, z, m, n, h)

    def pull(
        self, kept: Kept, grads: State, weight: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor, State]:
        r, z, m, n, h = kept
        (of_h,) = grads
        stays = of_h * z
        of_n = _through_tanh(of_h - stays, n)
        of_gates = [_through_sigmoid(of_n * m, r), _through_sigmoid(of_h * (h - n), z)]
        of_x = torch.cat([*of_gates, of_n], -1, out=out)
        of_hidden = torch.cat([*of_gates, of_n * r], -1).to(weight.dtype)
        return of_x, of_hidden, (of_hidden @ weight + stays,)


class _Plain(Cell):
    """h' = f(x + W_h h + b_h), with an f whose derivative is a function of its value."""

    def __init__(self, f: Callable[[Tensor], Tensor], through: Callable[[Tensor, Tensor], Tensor]):
        self._f = f  # in place
        self._through = through

    def step(
        self, x: Tensor, state: State, weight: Tensor, bias: Tensor | None
    ) -> tuple[State, Kept]:
        h = self._f(_hidden(state[0], weight, bias).add_(x))
        return (h,), (h,)

    def pull(
        self, kept: Kept, grads: State, weight: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Tensor, State]:
        both = torch.cat([self._through(grads[0], kept[0])], out=out).to(weight.dtype)
        return both, both, (both @ weight,)


LSTM, GRU = _Lstm(), _Gru()
LSTM_WAYS: dict[str, Cell] = {"spelled out": LSTM, "fused": _FusedLstm()}
TANH, RELU = _Plain(Tensor.tanh_, _through_tanh), _Plain(Tensor.relu_, _through_relu)
