"""Recurrent layers, and single steps of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.rules.cases.case import Case, data, weight

__all__ = ["CASES", "LAYER_DEFAULTS"]

# The options of the layers and their plain values, in the order in which they come after the input,
# the states and the weights; packed calls have no `batch_first`, the others no `batch_sizes`.
LAYER_DEFAULTS: dict[str, Any] = {
    "has_biases": True,
    "num_layers": 1,
    "dropout": 0.0,
    "train": False,
    "bidirectional": False,
    "batch_first": False,
}


def layer(
    function: Callable[..., Any],
    *,
    lengths: Sequence[int] | None = None,
    projected: bool = False,
    batch: int = 3,
    **options: Any,
) -> Case:
    """Make a call of a recurrent function on (B, T, i), giving (B, all that it gives)."""
    options = {**LAYER_DEFAULTS, **options}
    gates = {torch.lstm: 4, torch.gru: 3}.get(function, 1)
    width, hidden, time = 3, 4, 4
    out = 2 if projected else hidden
    directions = 2 if options["bidirectional"] else 1
    weights = []
    for k in range(options["num_layers"]):
        for _ in range(directions):
            weights += [weight(gates * hidden, out * directions if k else width)]
            weights += [weight(gates * hidden, out)]
            if options["has_biases"]:
                weights += [weight(gates * hidden), weight(gates * hidden)]
            if projected:
                weights += [weight(out, hidden)]
    depth = options["num_layers"] * directions
    states = [data(batch, depth, out)]
    if function is torch.lstm:
        states += [data(batch, depth, hidden)]

    def call(x: Tensor, lengths: Tensor | None, *tensors: Tensor) -> Tensor:
        turned = [t.transpose(0, 1).contiguous() for t in tensors[: len(states)]]
        lists = (turned if len(turned) > 1 else turned[0], list(tensors[len(states) :]))
        if lengths is None:
            first = options["batch_first"]
            x = x if first else x.transpose(0, 1)
            output, *finals = function(x, *lists, *options.values())
            output = output if first else output.transpose(0, 1)
        else:
            packed = pack_padded_sequence(x, lengths, batch_first=True)
            plain = list(options.values())[:-1]
            rows, *finals = function(packed.data, packed.batch_sizes, *lists, *plain)
            output, _ = pad_packed_sequence(
                packed._replace(data=rows), batch_first=True, total_length=x.shape[1]
            )
        return torch.cat([output.flatten(1), *(f.transpose(0, 1).flatten(1) for f in finals)], 1)

    given = None if lengths is None else torch.tensor(lengths)
    samples = [0, *([] if given is None else [1]), *range(2, 2 + len(states))]
    args = (data(batch, time, width), given, *states, *weights)
    return Case(function, args, {}, samples, call, {"batch_sizes": given, **options})


def layers(function: Callable[..., Any]) -> list[Case]:
    # Dropping everything is the one dropout that a loop draws like a batch.
    cases = [
        layer(function),
        layer(function, has_biases=False),
        layer(function, batch_first=True, batch=1),
        layer(function, batch=4, batch_first=True),
        layer(function, num_layers=2, has_biases=False),
        layer(function, num_layers=2, dropout=1.0, train=True, has_biases=False),
        layer(function, bidirectional=True, has_biases=False),
        layer(function, lengths=[4, 3, 1], has_biases=False),
        layer(function, lengths=[4, 4, 2], bidirectional=True, has_biases=False),
        layer(function, lengths=[4], batch=1),
    ]
    if function is torch.lstm:
        cases += [
            layer(function, projected=True),
            layer(function, projected=True, lengths=[4, 2, 2], has_biases=False),
        ]
    return cases


def step(function: Callable[..., Any], batch: int, *, bias: bool) -> Case:
    """Make a call of a recurrent cell, giving (B, all that it gives)."""
    gates = {torch.lstm_cell: 4, torch.gru_cell: 3}.get(function, 1)
    count = 2 if function is torch.lstm_cell else 1
    states = [data(batch, 4) for _ in range(count)]
    weights = [weight(gates * 4, 3), weight(gates * 4, 4)]
    if bias:
        weights += [weight(gates * 4), weight(gates * 4)]

    def call(x: Tensor, *tensors: Tensor) -> Tensor:
        hx = tensors[:count] if count > 1 else tensors[0]
        output = function(x, hx, *tensors[count:])
        return output if isinstance(output, Tensor) else torch.cat(output, 1)

    x = data(batch, 3)
    names = ["w_ih", "w_hh", "b_ih", "b_hh"]
    given = {"input": x, "hx": states, **dict(zip(names, weights, strict=False))}
    return Case(function, (x, *states, *weights), {}, range(1 + count), call, given)


CELLS = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
CASES = [
    *(case for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu) for case in layers(f)),
    *(step(f, batch, bias=bias) for f in CELLS for batch in (5, 4, 1) for bias in (True, False)),
]
