"""Tensors made out of sight: judged by their graphs, or promised until a recomputation proves them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.samples.layouts import Lost
from pergrad.engine.samples.proving import note
from pergrad.errors import MixedSamplesError
from tests.engine.exactness import numbers
from tests.engine.trackers import N, samples, tracker_of, use

OUT_OF_SIGHT: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "rows": ((0, 1, 1), lambda x: x.exp()),
    "transposed": ((1, 1, 1), lambda x: x.t() * 2),
    "flattened": ((0, 1, 3), lambda x: x.reshape(-1)),
    "mapped": ((0, 1, 1), lambda x: torch.vmap(lambda row: row.cumsum(0))(x)),
    "sum": ("total", lambda x: x.sum()),
    "sum of squares": ("total", lambda x: x.square().sum(0)),
    "softmax over samples": ("unknown", lambda x: x.softmax(0)),
    # No row has a place, but each term of a sum of them has one sample.
    "reversed": ("total", lambda x: x.flip(0)),
    "log-sum-exp": ("unknown", lambda x: x.logsumexp(0)),
    "both ways": ("total", lambda x: torch.diag_embed(x[:, 0])),
    "square of the reversed": ("unknown", lambda x: x + x.flip(0).square() * x),
}


@pytest.mark.parametrize("is_forward", [True, False], ids=["in the forward", "in the loss"])
@pytest.mark.parametrize("name", OUT_OF_SIGHT)
def test_a_tensor_made_out_of_sight_is_judged_by_its_graph(name: str, is_forward: bool) -> None:
    expected, function = OUT_OF_SIGHT[name]
    tracker = tracker_of()
    tracker.untagged_are_constant = is_forward
    y = function(use(tracker, N, 3))
    found = tracker.layout(y)
    assert (found.why if isinstance(found, Lost) else found.key) == expected
    assert tracker.layout(y) is found, "judged once"
    if expected != "unknown":
        y.sum().backward()
        return
    made_by = type(y.grad_fn).__name__.removesuffix("Backward0")
    with pytest.raises(MixedSamplesError, match=f"out of sight of the recorder, by `{made_by}`"):
        y.sum().backward()


def test_all_that_one_sample_makes_out_of_sight_is_its_own() -> None:
    tracker = tracker_of(1)
    assert tracker.layout(use(tracker, 1, 3).reshape(3)).key == (0, 1, 3)  # type: ignore[union-attr]


def test_nothing_is_judged_without_a_use_of_a_weight_behind() -> None:
    tracker = tracker_of()
    x = samples(tracker, N, 3, grad=True)
    tracker.untagged_are_constant = True
    assert tracker.layout(x.softmax(0)) is tracker.constant
    tracker.untagged_are_constant = False
    assert tracker.layout(x.softmax(0)) == tracker.scope.samples(0)  # by its shape


def packed_use(tracker: Tracker, *shape: int) -> Tensor:
    """A use inside of a checkpoint, whose saved tensors are packed."""
    t = numbers(*shape).requires_grad_() * 1
    note(t, tracker.scope.samples(0), is_packed=True)
    tracker.mark(t, tracker.scope.samples(0))
    return t


def test_a_layout_inside_of_a_checkpoint_is_a_promise_that_must_be_kept() -> None:
    tracker = tracker_of()
    tracker.check_promises()
    y = packed_use(tracker, N, 3).exp()
    assert tracker.layout(y) == tracker.scope.samples(0)
    with pytest.raises(MixedSamplesError, match=r"\(4, 3\) .* by `Exp` in a checkpoint"):
        tracker.check_promises()


class Recomputes(torch.autograd.Function):
    """Looks at a tensor within a backward pass, as a recomputation does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[], None]) -> Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            ctx.look()
        return grad, None


@pytest.mark.parametrize(
    ("function", "is_kept"),
    [(torch.exp, True), (lambda x: x.softmax(0), False), (lambda x: x.softmax(1), True)],
    ids=["rows", "over samples", "over columns"],
)
def test_a_recomputation_keeps_promises_that_it_proves(function: Any, is_kept: bool) -> None:
    tracker = tracker_of()
    tracker.layout(function(packed_use(tracker, N, 3)))
    x = numbers(1).requires_grad_()
    Recomputes.apply(x, lambda: tracker.layout(function(use(tracker, N, 3)))).sum().backward()
    if is_kept:
        tracker.check_promises()
    else:
        with pytest.raises(MixedSamplesError, match="does not prove"):
            tracker.check_promises()
