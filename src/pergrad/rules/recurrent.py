"""Recurrent networks, written as linear maps and cells, so that every weight has a rule.

torch hands over all layers at once: `weights` is flat, (w_ih, w_hh[, b_ih, b_hh][, w_hr]) for each
layer and direction. Packed input comes as its rows, with the number of sequences alive at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from pergrad.rules.registry import decomposes
from pergrad.rules.samples import carry_samples

__all__ = ["gru_cell", "lstm_cell", "relu_cell", "tanh_cell"]

State: TypeAlias = tuple[Tensor, ...]  # (h,) or (h, c), each (rows, features)
Cell: TypeAlias = Callable[[Tensor, Tensor, State], State]


def lstm_cell(x: Tensor, h: Tensor, state: State) -> State:
    """From the gates' two halves, W_i x + b_i and W_h h + b_h, to (h, c)."""
    if has_torch_function((x, h, *state)):
        return handle_torch_function(lstm_cell, (x, h, *state), x, h, state)
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(x: Tensor, h: Tensor, state: State) -> State:
    """The reset gate scales the hidden half of the candidate only."""
    if has_torch_function((x, h, *state)):
        return handle_torch_function(gru_cell, (x, h, *state), x, h, state)
    x_r, x_z, x_n = x.chunk(3, -1)
    h_r, h_z, h_n = h.chunk(3, -1)
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return ((state[0] - n) * (x_z + h_z).sigmoid() + n,)


def tanh_cell(x: Tensor, h: Tensor, state: State) -> State:
    """tanh(W_i x + b_i + W_h h + b_h)."""
    if has_torch_function((x, h, *state)):
        return handle_torch_function(tanh_cell, (x, h, *state), x, h, state)
    return ((x + h).tanh(),)


def relu_cell(x: Tensor, h: Tensor, state: State) -> State:
    """relu(W_i x + b_i + W_h h + b_h)."""
    if has_torch_function((x, h, *state)):
        return handle_torch_function(relu_cell, (x, h, *state), x, h, state)
    return ((x + h).relu(),)


def _layer(
    projected: Sequence[Tensor],  # W_i x + b_i for each step, in the order of time: (rows alive, o)
    start: State,
    w_hh: Tensor,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    cell: Cell,
    reverse: bool,
) -> tuple[list[Tensor], State]:
    """One layer in one direction: the outputs in the order of time, and the final state."""
    steps = projected[::-1] if reverse else projected
    alive = len(steps[0])
    state = tuple(s[:alive] for s in start)
    outputs: list[Tensor] = []
    ended: list[State] = []  # the states of sequences that are over, the shortest last
    for x in steps:
        if len(x) < alive:
            ended.insert(0, tuple(s[len(x) :] for s in state))
            state = tuple(s[: len(x)] for s in state)
        elif len(x) > alive:
            state = tuple(
                torch.cat([s, s0[alive : len(x)]]) for s, s0 in zip(state, start, strict=True)
            )
        alive = len(x)
        state = cell(x, F.linear(state[0], w_hh, b_hh), state)
        if w_hr is not None:
            state = (F.linear(state[0], w_hr), *state[1:])
        outputs.append(state[0])
    if ended:
        state = tuple(torch.cat(parts) for parts in zip(state, *ended, strict=True))
    return outputs[::-1] if reverse else outputs, state


def _stack(
    cell: Cell,
    split: Callable[[Tensor], Sequence[Tensor]],  # into steps
    join: Callable[[list[Tensor]], Tensor],  # its inverse
    input: Tensor,
    states: Sequence[Tensor],  # (h0,) or (h0, c0), each (layers * directions, rows, features)
    weights: Sequence[Tensor],
    bias: bool,
    num_layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
) -> tuple[Tensor, list[Tensor]]:
    """All layers: the last one's output, joined, and the final states of all."""
    directions = 2 if bidirectional else 1
    per_layer = len(weights) // (num_layers * directions)
    finals: list[State] = []
    output = input
    for layer in range(num_layers):
        if layer > 0 and dropout and training:
            output = F.dropout(output, dropout, training=True)
        outputs: list[Tensor] = []
        for direction in range(directions):
            k = layer * directions + direction
            w_ih, w_hh, *rest = weights[k * per_layer : (k + 1) * per_layer]
            b_ih, b_hh = (rest.pop(0), rest.pop(0)) if bias else (None, None)
            w_hr = rest.pop() if rest else None
            projected = split(F.linear(output, w_ih, b_ih))
            start = tuple(carry_samples(s[k], projected[0]) for s in states)
            steps, final = _layer(projected, start, w_hh, b_hh, w_hr, cell, reverse=direction == 1)
            outputs.append(join(steps))
            finals.append(final)
        output = torch.cat(outputs, -1) if bidirectional else outputs[0]
    return output, [torch.stack(parts) for parts in zip(*finals, strict=True)]


def _unpacked(cell: Cell, input: Tensor, states: Sequence[Tensor], *options: Any) -> Any:
    *rest, batch_first = options
    time_first = input.transpose(0, 1) if batch_first else input
    output, finals = _stack(cell, torch.unbind, torch.stack, time_first, states, *rest)
    return output.transpose(0, 1) if batch_first else output, finals


def _packed(
    cell: Cell, data: Tensor, batch_sizes: Tensor, states: Sequence[Tensor], *options: Any
) -> Any:
    sizes: list[int] = batch_sizes.tolist()
    return _stack(cell, lambda x: x.split(sizes), torch.cat, data, states, *options)


def _run(cell: Cell, args: Sequence[Any], states_of: Callable[[Any], Sequence[Tensor]]) -> Any:
    if isinstance(args[3], list | tuple):
        data, batch_sizes, hx, *options = args
        return _packed(cell, data, batch_sizes, states_of(hx), *options)
    input, hx, *options = args
    return _unpacked(cell, input, states_of(hx), *options)


@decomposes(torch.lstm)
def lstm(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    output, (h, c) = _run(lstm_cell, args, tuple)
    return output, h, c


def _single_state(cell: Cell) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(*args: Any) -> tuple[Tensor, Tensor]:
        output, (h,) = _run(cell, args, lambda hx: (hx,))
        return output, h

    return run


decomposes(torch.gru)(_single_state(gru_cell))
decomposes(torch.rnn_tanh)(_single_state(tanh_cell))
decomposes(torch.rnn_relu)(_single_state(relu_cell))


def _single_step(cell: Cell, states_of: Callable[[Any], State]) -> Callable[..., Any]:
    """The cells of torch.nn: one step, (x, hx, w_ih, w_hh, b_ih, b_hh)."""

    def run(
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        projected = F.linear(input, w_ih, b_ih)
        state = tuple(carry_samples(s, projected) for s in states_of(hx))
        state = cell(projected, F.linear(state[0], w_hh, b_hh), state)
        return state if len(state) > 1 else state[0]

    return run


decomposes(torch.lstm_cell)(_single_step(lstm_cell, tuple))
decomposes(torch.gru_cell)(_single_step(gru_cell, lambda hx: (hx,)))
decomposes(torch.rnn_tanh_cell)(_single_step(tanh_cell, lambda hx: (hx,)))
decomposes(torch.rnn_relu_cell)(_single_step(relu_cell, lambda hx: (hx,)))
