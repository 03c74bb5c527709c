"""Decomposes recurrent networks into layers whose weights have rules.

torch passes all layers at once: `weights` is flat, (w_ih, w_hh[, b_ih, b_hh][, w_hr]) for each layer and
direction. Packed input consists of its rows and the number of active sequences at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pergrad.rules.cells import GRU, LSTM, RELU, TANH, Cell, State
from pergrad.rules.recurrence import (
    Steps,
    linear_over_steps,
    recurrent_states,
    started_from,
    unrolled,
)
from pergrad.rules.registry import decomposes
from pergrad.rules.samples import carry_samples

__all__: list[str] = []


def _layer(
    cell: Cell,
    steps: Steps,
    input: Tensor,
    states: Sequence[Tensor],  # (h0,) or (h0, c0), each (rows, features)
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    w_hr: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Runs one layer in one direction; returns its output and its last states."""
    projected = F.linear(started_from(steps, input, states[0]), w_ih, b_ih)
    like = steps.first(projected)
    start = tuple([carry_samples(s, like) for s in states])

    def value(weight: Tensor) -> Tensor:  # cast as autocast casts the weight of a linear map
        return weight.detach().to(projected.dtype)

    w, b = value(w_hh), None if b_hh is None else value(b_hh)
    r = None if w_hr is None else value(w_hr)
    run, before, unprojected = unrolled(cell, steps, projected, start, w, b, r)
    hidden = linear_over_steps(before, w_hh, b_hh, projected.detach())
    shown = None
    if w_hr is not None and unprojected is not None:
        shown = linear_over_steps(unprojected, w_hr, None, carry_samples(run.output, before))
    return recurrent_states(steps, projected, start, hidden, shown, w, r, run)


def _stack(
    cell: Cell,
    steps: Steps,
    input: Tensor,
    states: Sequence[Tensor],  # (h0,) or (h0, c0), each (layers * directions, rows, features)
    weights: Sequence[Tensor],
    bias: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Runs all layers; returns the output of the last one and the last states of all."""
    directions = 2 if bidirectional else 1
    per_layer = len(weights) // (num_layers * directions)
    lasts: list[State] = []
    output = input
    for layer in range(num_layers):
        if layer > 0 and dropout and training:
            output = _dropped(output, dropout, steps)
        outputs: list[Tensor] = []
        for direction in range(directions):
            k = layer * directions + direction
            w_ih, w_hh, *rest = weights[k * per_layer : (k + 1) * per_layer]
            b_ih, b_hh = (rest.pop(0), rest.pop(0)) if bias else (None, None)
            w_hr = rest.pop() if rest else None
            start = [s[k] for s in states]
            order = steps._replace(reverse=direction == 1)
            found, *last = _layer(cell, order, output, start, w_ih, w_hh, b_ih, b_hh, w_hr)
            outputs.append(found)
            lasts.append(tuple(last))
        output = torch.cat(outputs, -1) if bidirectional else outputs[0]
    return output, [torch.stack(parts) for parts in zip(*lasts, strict=True)]


def _dropped(output: Tensor, dropout: float, steps: Steps) -> Tensor:
    """Applies dropout with torch's random numbers, which it draws step after step."""
    if steps.dim == 0:
        return F.dropout(output, dropout, training=True)
    in_order = output.transpose(0, 1).contiguous()
    return F.dropout(in_order, dropout, training=True).transpose(0, 1)


def _run(cell: Cell, args: Sequence[Any], states_of: Callable[[Any], Sequence[Tensor]]) -> Any:
    if isinstance(args[3], list | tuple):
        data, batch_sizes, hx, *options = args
        steps = Steps(0, False, tuple(batch_sizes.tolist()))
        return _stack(cell, steps, data, states_of(hx), *options)
    input, hx, *options, batch_first = args
    return _stack(cell, Steps(1 if batch_first else 0, False), input, states_of(hx), *options)


@decomposes(torch.lstm)
def lstm(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    output, (h, c) = _run(LSTM, args, tuple)
    return output, h, c


def _single_state(cell: Cell) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(*args: Any) -> tuple[Tensor, Tensor]:
        output, (h,) = _run(cell, args, lambda hx: (hx,))
        return output, h

    return run


decomposes(torch.gru)(_single_state(GRU))
decomposes(torch.rnn_tanh)(_single_state(TANH))
decomposes(torch.rnn_relu)(_single_state(RELU))


def _single_step(cell: Cell, states_of: Callable[[Any], State]) -> Callable[..., Any]:
    """Decomposes a cell of torch.nn into a layer with one step."""

    def run(
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        steps = Steps(0, False)
        _, *state = _layer(cell, steps, input[None], states_of(hx), w_ih, w_hh, b_ih, b_hh)
        return tuple(state) if len(state) > 1 else state[0]

    return run


decomposes(torch.lstm_cell)(_single_step(LSTM, tuple))
decomposes(torch.gru_cell)(_single_step(GRU, lambda hx: (hx,)))
decomposes(torch.rnn_tanh_cell)(_single_step(TANH, lambda hx: (hx,)))
decomposes(torch.rnn_relu_cell)(_single_step(RELU, lambda hx: (hx,)))
