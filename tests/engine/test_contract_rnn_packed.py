"""Packed sequences under `call_for_per_sample_grads`, against a loop over unpadded samples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close

import pergrad
from pergrad.testing import loop_grads
from tests.engine.loop_check import EXACT, Reduction, assert_grad_samples, double, reduce
from tests.engine.recurrent_cases import (
    BATCH,
    HIDDEN,
    INPUT,
    KINDS,
    TIME,
    build,
    losses,
    states_of,
)

every_kind = pytest.mark.parametrize("kind", KINDS)
LENGTHS = {
    "sorted": [4, 3, 3, 1, 1],
    "unsorted": [2, 4, 1, 4, 3],
    "equal": [4, 4, 4, 4, 4],
    "one sample": [3],
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def trimmed_losses(model: nn.RNNBase, x: Tensor, lengths: Tensor, *states: Tensor) -> Tensor:
    """Score one sample without its padding: (1,)."""
    return losses(model, x[:, : int(lengths)], *states)


def packed_losses(
    model: Callable[..., Any],
    module: nn.RNNBase,
    x: Tensor,
    lengths: Tensor,
    *states: Tensor,
    enforce_sorted: bool,
) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=enforce_sorted)
    hx: Any = tuple(state.transpose(0, 1).contiguous() for state in states)
    output, last = model(packed, hx if len(hx) == 2 else hx[0] if hx else None)
    assert isinstance(output, PackedSequence)
    padded, _ = pad_packed_sequence(output, batch_first=True)
    steps = torch.arange(padded.shape[1])[None] < lengths[:, None]
    lasts = last if isinstance(last, tuple) else (last,)
    return (((padded + 0.5) ** 2) * steps[..., None]).sum((1, 2)) + sum(
        ((state.transpose(0, 1) + 0.5) ** power).flatten(1).sum(1)
        for power, state in enumerate(lasts, start=3)
    )


@every_kind
@pytest.mark.parametrize(
    ("lengths", "enforce_sorted"),
    [
        ("sorted", True),
        ("sorted", False),
        ("unsorted", False),
        ("equal", True),
        ("one sample", True),
    ],
)
@pytest.mark.parametrize("given_states", [False, True], ids=["zero states", "given states"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"num_layers": 2, "bias": False}],
    ids=str,
)
def test_packed_sequence_gives_rows_in_the_order_of_the_caller(
    kind: str, lengths: str, enforce_sorted: bool, given_states: bool, options: dict[str, Any]
) -> None:
    module = build(kind, batch_first=True, **options)
    sizes = torch.tensor(LENGTHS[lengths])
    batch = len(sizes)
    states = states_of(module, batch) if given_states else ()
    x = double(batch, TIME, INPUT)
    expected = loop_grads(module, trimmed_losses, x, sizes, *states)

    leaves = [tensor.clone().requires_grad_() for tensor in (x, *states)]

    def score(model: Any, x: Tensor, *states: Tensor) -> Tensor:
        return packed_losses(model, module, x, sizes, *states, enforce_sorted=enforce_sorted)

    plain = score(module, *leaves)
    got = score(pergrad.call_for_per_sample_grads(module, batch_size=batch), *leaves)
    assert_close(got, plain, **EXACT)
    got.sum().backward()
    assert_grad_samples(module, expected)
    for leaf, grad in zip(leaves, torch.autograd.grad(plain.sum(), leaves), strict=True):
        assert_close(leaf.grad, grad, **EXACT)


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_packed_sequence_with_projections_and_cut_layers(loss_reduction: Reduction) -> None:
    module = build(
        "lstm", proj_size=2, num_layers=2, bidirectional=True, dropout=1.0, batch_first=True
    )
    sizes = torch.tensor(LENGTHS["unsorted"])
    x = double(BATCH, TIME, INPUT)
    expected = loop_grads(module, trimmed_losses, x, sizes)
    wrapped = pergrad.call_for_per_sample_grads(
        module, batch_size=BATCH, loss_reduction=loss_reduction
    )
    got = packed_losses(wrapped, module, x, sizes, enforce_sorted=False)
    reduce(got, loss_reduction).backward()
    assert_grad_samples(module, expected)


class PackInside(nn.Module):
    """Packs what it computed from its own input, and unpacks what the layer gives."""

    def __init__(self, kind: str, *, enforce_sorted: bool, batch_first: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(2, INPUT)
        self.recurrent = KINDS[kind](
            INPUT, HIDDEN, num_layers=2, bidirectional=True, batch_first=batch_first
        )
        self.leave = nn.Linear(2 * HIDDEN, 3)
        self.enforce_sorted = enforce_sorted

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            torch.tanh(self.enter(x)),
            lengths,
            batch_first=True,
            enforce_sorted=self.enforce_sorted,
        )
        output, _ = self.recurrent(packed)
        padded, _ = pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])
        return self.leave(padded)


@every_kind
@pytest.mark.parametrize(
    ("lengths", "enforce_sorted"), [("sorted", True), ("unsorted", False), ("equal", True)]
)
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_packing_inside_the_forward(
    kind: str, lengths: str, enforce_sorted: bool, batch_first: bool, loss_reduction: Reduction
) -> None:
    model = PackInside(kind, enforce_sorted=enforce_sorted, batch_first=batch_first).double()
    sizes = torch.tensor(LENGTHS[lengths])
    x = double(BATCH, TIME, 2).requires_grad_()
    cotangent = double(BATCH, TIME, 3)

    def scores(model: Any, x: Tensor, sizes: Tensor, cotangent: Tensor) -> Tensor:
        return (model(x, sizes) * cotangent).sum((1, 2))

    expected = loop_grads(model, scores, x.detach(), sizes, cotangent)
    wrapped = pergrad.call_for_per_sample_grads(model, loss_reduction=loss_reduction)
    reduce(scores(wrapped, x, sizes, cotangent), loss_reduction).backward()
    assert_grad_samples(model, expected)
    loss = reduce(scores(model, x, sizes, cotangent), loss_reduction)
    (grad,) = torch.autograd.grad(loss, x)
    assert_close(x.grad, grad, **EXACT)
