"""Recurrent modules of every kind, and a way to run and score them that is batch first."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from tests.engine.loop_check import double

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "rnn_tanh": partial(nn.RNN, nonlinearity="tanh"),
    "rnn_relu": partial(nn.RNN, nonlinearity="relu"),
    "lstm": nn.LSTM,
    "gru": nn.GRU,
}
BATCH, TIME, INPUT, HIDDEN = 5, 4, 3, 6


def build(kind: str, *sizes: int, **options: Any) -> nn.RNNBase:
    return KINDS[kind](*(sizes or (INPUT, HIDDEN)), **options).double()


def states_of(module: nn.RNNBase, batch: int) -> tuple[Tensor, ...]:
    """Draw initial states, (B, layers * directions, hidden) each."""
    depth = module.num_layers * (2 if module.bidirectional else 1)
    hidden = double(batch, depth, module.proj_size or module.hidden_size)
    if module.mode != "LSTM":
        return (hidden,)
    return (hidden, double(batch, depth, module.hidden_size))


def run(
    model: Callable[..., Any], module: nn.RNNBase, x: Tensor, *states: Tensor
) -> tuple[Tensor, ...]:
    """Call the model on x (B, T, I) and states (B, L, H); outputs and states come batch first."""
    turned = [state.transpose(0, 1).contiguous() for state in states]
    hx = tuple(turned) if len(turned) == 2 else turned[0] if turned else None
    output, last = model(x if module.batch_first else x.transpose(0, 1), hx)
    lasts = last if isinstance(last, tuple) else (last,)
    return (
        output if module.batch_first else output.transpose(0, 1),
        *(state.transpose(0, 1) for state in lasts),
    )


def losses_of(outputs: tuple[Tensor, ...]) -> Tensor:
    """Score outputs and last states so that each sample and step counts differently: (B,)."""
    return sum(
        ((tensor + 0.5) ** power).flatten(1).sum(1) for power, tensor in enumerate(outputs, start=2)
    )


def losses(model: nn.RNNBase, x: Tensor, *states: Tensor) -> Tensor:
    return losses_of(run(model, model, x, *states))
