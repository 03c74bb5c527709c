"""`grad_sample` as an attribute: factors add up in the weight's dtype, and batches must fit."""

import pytest
import torch
from torch import Tensor, nn

from pergrad.engine.collecting.grad_samples import (
    GradSampleSink,
    add_to_grad_sample,
    check_batch_sizes,
)
from pergrad.errors import BatchSizeError
from pergrad.factors import Dense, OuterProduct
from tests.engine.exactness import numbers


def weight_of(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, 3, dtype=dtype))


def grad_sample(weight: Tensor) -> Tensor:
    return weight.grad_sample  # type: ignore[attr-defined, no-any-return]


def test_the_first_gradients_are_taken_and_later_ones_added() -> None:
    weight, first, second = weight_of(), numbers(4, 2, 3), numbers(4, 2, 3)
    kept = first.clone()
    add_to_grad_sample(weight, first)
    assert torch.equal(grad_sample(weight), first)
    add_to_grad_sample(weight, second)
    assert torch.equal(grad_sample(weight), kept + second)
    assert torch.equal(first, kept), "the earlier tensor may be somebody else's"


def test_a_grad_sample_of_none_counts_as_none() -> None:
    weight, rows = weight_of(), numbers(4, 2, 3)
    weight.grad_sample = None  # type: ignore[attr-defined]
    add_to_grad_sample(weight, rows)
    assert torch.equal(grad_sample(weight), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_dtype_of_the_weight(dtype: torch.dtype) -> None:
    weight, rows = weight_of(dtype), numbers(4, 2, 3)
    for times in (1, 2):
        add_to_grad_sample(weight, rows)
        assert grad_sample(weight).dtype is dtype
        assert torch.equal(grad_sample(weight), times * rows.to(dtype))


@pytest.mark.parametrize("sizes", [(4, 3), (3, 4), (1, 3), (3, 1)])
def test_batches_of_different_sizes_are_refused_with_both_sizes(sizes: tuple[int, int]) -> None:
    earlier, later = sizes
    weight = weight_of()
    add_to_grad_sample(weight, first := numbers(earlier, 2, 3))
    with pytest.raises(
        BatchSizeError, match=f"batch of {later} samples .* batch of {earlier}: set"
    ):
        add_to_grad_sample(weight, numbers(later, 2, 3))
    assert torch.equal(grad_sample(weight), first)


def test_nothing_and_the_same_size_pass_the_check() -> None:
    check_batch_sizes(None, numbers(4, 2))
    check_batch_sizes(numbers(4, 2), numbers(4, 2))
    with pytest.raises(BatchSizeError):
        check_batch_sizes(numbers(4, 2), numbers(5, 2))


@pytest.mark.parametrize("scale", [1, 3])
def test_a_sink_adds_every_factor_of_its_weight_times_the_scale(scale: int) -> None:
    first, second = weight_of(), weight_of()
    sink = GradSampleSink({"first": first, "second": second}, scale)
    g, x, rows = numbers(4, 1, 2), numbers(4, 1, 3), numbers(4, 2, 3)
    sink.add("first", OuterProduct(g, x))
    sink.add("second", Dense(rows))
    sink.add("first", Dense(rows))
    of_first = torch.einsum("nto,nti->noi", g, x)
    torch.testing.assert_close(grad_sample(first), scale * (of_first + rows))
    torch.testing.assert_close(grad_sample(second), scale * rows)


def test_a_sink_takes_everything_at_once_and_in_one_pass() -> None:
    sink = GradSampleSink({"w": weight_of()}, 1)
    assert sink.passes == 1
    assert sink.expects("w")
    assert not sink.queue.defers_rules
