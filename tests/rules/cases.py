"""Calls of every function that has a rule: together they give each of its arguments a value of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pergrad.rules.normalization import channel_affine

__all__ = ["CASES", "RECURRENT_DEFAULTS", "Case"]

_RANDOM = torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Case:
    """One call of `function`, whose argument `samples` carries the samples."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    samples: Sequence[int | str] = (0,)

    @property
    def name(self) -> str:
        given = [*self.args, *(f"{k}={_short(v)}" for k, v in self.kwargs.items())]
        return " ".join([self.function.__name__, *(_short(v) for v in given)])

    @property
    def call(self) -> Callable[..., Any]:
        return self.function

    def given(self, names: Iterable[str]) -> dict[str, Any]:
        """Map argument names to values, `names` being those of the function in order."""
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}


def _short(value: Any) -> str:
    return "x".join(map(str, value.shape)) if isinstance(value, Tensor) else str(value)


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_RANDOM)


def weight(*shape: int) -> Tensor:
    return data(*shape).requires_grad_()


def index(*shape: int, rows: int = 5) -> Tensor:
    return torch.randint(rows, shape, generator=_RANDOM)


def variance(channels: int) -> Tensor:
    return torch.rand(channels, generator=_RANDOM) + 0.5


def linear() -> list[Case]:
    shapes = [(5, 4), (5, 3, 4), (5, 2, 3, 4), (2, 3, 2, 2, 4), (4, 4, 4), (1, 4), (3, 1, 4)]
    x, w, b = data(5, 3, 4), weight(6, 4), weight(6)
    return [
        *(Case(F.linear, (data(*shape), weight(6, 4), weight(6))) for shape in shapes),
        *(Case(F.linear, (data(*shape), weight(4, 4))) for shape in shapes),
        Case(F.linear, (x, w, None)),
        Case(F.linear, (x,), {"bias": b, "weight": w}),
        Case(F.linear, (x, w), {"bias": b}),
        Case(F.linear, (), {"bias": b, "weight": w, "input": x}, samples=("input",)),
        Case(F.linear, (), {"weight": w, "input": x}, samples=("input",)),
        Case(F.linear, (x, data(6, 4), b)),  # the weight is no parameter at all
    ]


def convolution(function: Callable[..., Tensor], dims: int) -> list[Case]:
    def sizes(*values: int) -> tuple[int, ...]:
        return values[:dims]

    def case(x: Tensor, w: Tensor, b: Tensor | None = None, **options: Any) -> Case:
        return Case(function, (x, w) if b is None else (x, w, b), options)

    space, taps, even = sizes(6, 5, 4), sizes(3, 2, 3), sizes(2, 4, 2)
    x = data(3, 4, *space)
    plain, grouped = weight(6, 4, *taps), weight(6, 2, *taps)
    return [
        case(x, plain, weight(6)),
        case(x, plain),
        case(x, plain, stride=2),
        case(x, plain, stride=sizes(2, 1, 3)),
        case(x, plain, stride=(2,)),
        case(x, plain, padding=1),
        case(x, plain, padding=sizes(1, 0, 2)),
        case(x, plain, padding=(2,)),
        case(x, plain, padding="valid"),
        case(x, plain, padding="same"),
        case(x, weight(6, 4, *even), weight(6), padding="same"),
        case(x, weight(6, 4, *even), padding="same", dilation=sizes(3, 1, 2)),
        case(x, grouped, padding="same", groups=2),
        case(x, plain, padding=1, dilation=2),
        case(x, plain, padding=2, dilation=sizes(1, 2, 1)),
        case(x, grouped, weight(6), groups=2),
        case(x, grouped, groups=2, stride=2, padding=sizes(2, 1, 0)),
        case(x, grouped, groups=2, stride=2, padding=2, dilation=2),
        case(x, weight(4, 1, *taps), groups=4),
        case(x, weight(8, 1, *taps), weight(8), groups=4, padding=1, stride=2),
        case(x, weight(6, 4, *[1] * dims), weight(6)),
        case(x, weight(6, 4, *[1] * dims), stride=2, padding=1),
        case(data(1, 4, *space), plain, weight(6), padding=1),
        case(data(1, 4, *space), grouped, groups=2),
        case(data(4, 4, *[4] * dims), weight(4, 4, *taps), weight(4), padding=1),
        case(data(4, 4, *[4] * dims), weight(4, 1, *taps), groups=4),
        case(data(17, 4, *space), plain, stride=2, dilation=1),
        Case(function, (x, plain, weight(6), 2, 1, 1, 1)),
        Case(function, (x, grouped, None, sizes(1, 2, 1), sizes(2, 1, 1), 2, 2)),
        Case(function, (), {"groups": 2, "weight": grouped, "input": x}, samples=("input",)),
    ]


def layer_norm() -> list[Case]:
    x = data(3, 2, 4, 3, 2)
    cases = []
    for rank in (1, 2, 3):
        shape = tuple(x.shape[-rank:])
        w, b = weight(*shape), weight(*shape)
        cases += [
            Case(F.layer_norm, (x, shape, w, b)),
            Case(F.layer_norm, (x, list(shape), w, b, 0.5)),
            Case(F.layer_norm, (x, shape), {"weight": w}),
            Case(F.layer_norm, (x, shape), {"bias": b, "eps": 0.1}),
            Case(F.layer_norm, (x, torch.Size(shape), None, b)),
            Case(F.layer_norm, (data(1, *shape), shape, w, b)),
        ]
    w, b = weight(4), weight(4)
    return [
        *cases,
        Case(F.layer_norm, (data(5, 4), (4,), w, b)),
        Case(F.layer_norm, (data(4, 4, 4), (4,), w, b)),
        Case(F.layer_norm, (data(4, 4, 4), (4, 4), weight(4, 4), weight(4, 4))),
        Case(F.layer_norm, (data(5, 4),), {"eps": 0.2, "bias": b, "normalized_shape": [4]}),
    ]


def group_norm() -> list[Case]:
    shapes = [(5, 6), (5, 6, 4), (5, 6, 3, 2), (3, 6, 2, 3, 2), (6, 6, 6), (1, 6, 3)]
    w, b = weight(6), weight(6)
    return [
        *(Case(F.group_norm, (data(*shape), 2, w, b)) for shape in shapes),
        *(Case(F.group_norm, (data(*shape), 1, w)) for shape in shapes),
        Case(F.group_norm, (data(5, 6, 4), 6, w, b)),
        Case(F.group_norm, (data(5, 6, 4), 3, data(6)), {"bias": b}),  # torch needs some weight
        Case(F.group_norm, (data(5, 6, 4), 3, w, b, 0.5)),
        Case(F.group_norm, (data(5, 6, 4),), {"eps": 0.3, "num_groups": 2, "weight": w}),
    ]


def affine() -> list[Case]:
    w, b = weight(4), weight(4)
    shapes = [(5, 4), (5, 4, 3), (4, 4, 4), (2, 4, 3, 2), (2, 4, 2, 3, 2), (1, 4)]
    return [
        *(Case(channel_affine, (data(*shape), w, b)) for shape in shapes),
        Case(channel_affine, (data(5, 4, 3), w, None)),
        Case(channel_affine, (data(5, 4, 3), None, b)),
        Case(channel_affine, (data(5, 4, 3),), {"bias": b, "weight": w}),
    ]


def instance_norm() -> list[Case]:
    cases = []
    for shape in [(5, 4, 6), (3, 4, 3, 2), (2, 4, 2, 3, 2), (4, 4, 4), (1, 4, 3)]:
        x, w, b = data(*shape), weight(4), weight(4)
        mean, var = data(4), variance(4)
        cases += [
            Case(F.instance_norm, (x, None, None, w, b)),
            Case(F.instance_norm, (x, mean, var, w, b)),
            Case(F.instance_norm, (x, mean, var, w, b, False)),
            Case(F.instance_norm, (x, mean, var, w), {"use_input_stats": False, "eps": 0.5}),
            Case(F.instance_norm, (x,), {"bias": b, "eps": 0.5}),
            Case(
                F.instance_norm,
                (x,),
                {"momentum": 0.7, "weight": w, "running_var": var, "running_mean": mean},
            ),
            Case(F.instance_norm, (x, mean, var, w, b, True, 0.3, 0.01)),
        ]
    return cases


def embedding() -> list[Case]:
    def case(shape: tuple[int, ...], **options: Any) -> Case:
        return Case(F.embedding, (index(*shape), weight(5, 3)), options)

    every: list[dict[str, Any]] = [
        {},
        {"padding_idx": 2},
        {"padding_idx": -1},
        {"padding_idx": 0, "scale_grad_by_freq": True},
        {"scale_grad_by_freq": True},
        {"max_norm": 0.7},
        {"max_norm": 0.7, "norm_type": 1.0},
        {"max_norm": 0.7, "norm_type": float("inf"), "padding_idx": -2},
        {"sparse": True},
        {"sparse": True, "padding_idx": 1},
    ]
    shapes = [(6,), (4, 6), (3, 2, 4), (5, 5), (1, 3)]
    return [
        *(case(shape, **options) for options in every for shape in shapes),
        Case(F.embedding, (index(4, 6), weight(5, 3), 1, 0.9, 2.0, True, False)),
        Case(
            F.embedding,
            (),
            {"padding_idx": 1, "weight": weight(5, 3), "input": index(4, 6)},
            samples=("input",),
        ),
    ]


# The options of the recurrent functions and their plain values, in the order in which they come
# after the input, the states and the weights; packed calls have no `batch_first`.
RECURRENT_DEFAULTS: dict[str, Any] = {
    "has_biases": True,
    "num_layers": 1,
    "dropout": 0.0,
    "train": False,
    "bidirectional": False,
    "batch_first": False,
}


@dataclass(frozen=True)
class Recurrence(Case):
    """A call of a recurrent function, which takes its states and weights in lists.

    `args` are the input (B, T, i), the lengths (B,) of packed sequences or None, the states
    (B, layers · directions, features) each, then the weights; `kwargs` the options. The result is
    (B, everything that the function gives).
    """

    @property
    def name(self) -> str:
        changed = {k: v for k, v in self.kwargs.items() if v != RECURRENT_DEFAULTS[k]}
        packed = "packed" if self.args[1] is not None else "padded"
        return f"{self.function.__name__} {packed} {len(self.args)} tensors {changed}"

    @property
    def call(self) -> Callable[..., Tensor]:
        return self._run

    def given(self, names: Iterable[str]) -> dict[str, Any]:
        return {"batch_sizes": self.args[1], **self.kwargs}

    def _run(self, x: Tensor, lengths: Tensor | None, *tensors: Tensor, **options: Any) -> Tensor:
        is_lstm = self.function is torch.lstm
        states = [t.transpose(0, 1).contiguous() for t in tensors[: 1 + is_lstm]]
        lists = (states if is_lstm else states[0], list(tensors[1 + is_lstm :]))
        if lengths is None:
            first = options["batch_first"]
            output, *finals = self.function(
                x if first else x.transpose(0, 1), *lists, *options.values()
            )
            output = output if first else output.transpose(0, 1)
        else:
            packed = pack_padded_sequence(x, lengths, batch_first=True)
            rows, *finals = self.function(
                packed.data, packed.batch_sizes, *lists, *list(options.values())[:-1]
            )
            output, _ = pad_packed_sequence(
                packed._replace(data=rows), batch_first=True, total_length=x.shape[1]
            )
        return torch.cat([output.flatten(1), *(f.transpose(0, 1).flatten(1) for f in finals)], 1)


def recurrence(
    function: Callable[..., Any],
    *,
    lengths: Sequence[int] | None = None,
    projected: bool = False,
    batch: int = 3,
    **options: Any,
) -> Recurrence:
    options = {**RECURRENT_DEFAULTS, **options}
    gates = {torch.lstm: 4, torch.gru: 3}.get(function, 1)
    width, hidden, time = 3, 4, 4
    out = 2 if projected else hidden
    directions = 2 if options["bidirectional"] else 1
    weights = []
    for layer in range(options["num_layers"]):
        for _ in range(directions):
            weights += [weight(gates * hidden, out * directions if layer else width)]
            weights += [weight(gates * hidden, out)]
            if options["has_biases"]:
                weights += [weight(gates * hidden), weight(gates * hidden)]
            if projected:
                weights += [weight(out, hidden)]
    depth = options["num_layers"] * directions
    states = [data(batch, depth, out)]
    if function is torch.lstm:
        states += [data(batch, depth, hidden)]
    given = None if lengths is None else torch.tensor(lengths)
    samples = [0, *([] if given is None else [1]), *range(2, 2 + len(states))]
    args = (data(batch, time, width), given, *states, *weights)
    return Recurrence(function, args, options, samples)


def recurrent(function: Callable[..., Any]) -> list[Case]:
    # Dropping everything is the one dropout that a loop draws like a batch.
    cases = [
        recurrence(function),
        recurrence(function, has_biases=False),
        recurrence(function, batch_first=True, batch=1),
        recurrence(function, batch=4, batch_first=True),
        recurrence(function, num_layers=2, has_biases=False),
        recurrence(function, num_layers=2, dropout=1.0, train=True, has_biases=False),
        recurrence(function, bidirectional=True, has_biases=False),
        recurrence(function, lengths=[4, 3, 1], has_biases=False),
        recurrence(function, lengths=[4, 4, 2], bidirectional=True, has_biases=False),
        recurrence(function, lengths=[4], batch=1),
    ]
    if function is torch.lstm:
        cases += [
            recurrence(function, projected=True),
            recurrence(function, projected=True, lengths=[4, 2, 2], has_biases=False),
        ]
    return cases


CASES: list[Case] = [
    *linear(),
    *convolution(F.conv1d, 1),
    *convolution(F.conv2d, 2),
    *convolution(F.conv3d, 3),
    *layer_norm(),
    *group_norm(),
    *affine(),
    *instance_norm(),
    *embedding(),
    *(
        case
        for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
        for case in recurrent(f)
    ),
]
