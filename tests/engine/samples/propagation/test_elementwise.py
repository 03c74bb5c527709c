"""Layouts through operations on each element, with broadcasting."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.samples.propagation.dependence import Batched, assert_followed
from tests.engine.samples.propagation.inputs import batches

Batch = tuple[int, Batched]
properties = settings(deadline=None, derandomize=True, max_examples=150)


@properties
@given(batches(max_rank=2), st.data())
def test_broadcasting_with_a_constant_is_followed(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    front = data.draw(st.lists(st.sampled_from([1, 2, count]), max_size=2))
    own = [
        data.draw(st.sampled_from([1, size] if size > 1 or d == x.dim else [1, 2, count]))
        for d, size in enumerate(x.shape)
    ]
    keep = data.draw(st.integers(0, len(own)))
    c = torch.ones(front + own if keep == 0 else own[keep:], dtype=torch.float64)
    assert_followed(count, lambda t: (t + c, c * t, torch.sub(c, t), torch.where(c > 0, t, c)), x)


@properties
@given(batches(max_rank=2), st.data())
def test_two_batches_are_followed_where_they_agree(batch: Batch, data: st.DataObject) -> None:
    count, x = batch
    shape = [data.draw(st.sampled_from([1, s])) if d != x.dim else s for d, s in enumerate(x.shape)]
    y = Batched(tuple(shape), x.dim, x.pre, x.post, x.owners)
    assert_followed(count, lambda a, b: (a + b, b * a, torch.maximum(a, b)), x, y)


@settings(properties, max_examples=250)
@given(st.sampled_from([2, 3, 1]), st.data())
def test_two_batches_are_never_followed_falsely(count: int, data: st.DataObject) -> None:
    """Samples in any two places, in any two orders: only those that agree may keep a layout."""
    size = 2 * count
    layouts = st.sampled_from(["post", "pre", "owners"])

    def draw(rank: int) -> Batched:
        dim, kind = data.draw(st.integers(0, rank - 1)), data.draw(layouts)
        shape = [data.draw(st.sampled_from([1, size])) for _ in range(rank)]
        shape[dim] = size
        if kind == "owners":
            owners = data.draw(st.lists(st.integers(0, count - 1), min_size=size, max_size=size))
            return Batched(tuple(shape), dim, owners=tuple(owners))
        return Batched(tuple(shape), dim, *((1, 2) if kind == "post" else (2, 1)))

    first, second = draw(data.draw(st.integers(1, 2))), draw(2)
    assert_followed(count, lambda a, b: a * b, first, second, exact=False)


UNARY: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (-x, x + 1, 2 - x, x / 3, 1 / x, x**2, 2**x, x % 2, abs(x)),
    "in place": lambda x: x.clone().add_(1).mul_(2).neg_().relu_(),
    "operators in place": lambda x: _in_place(x),
    "activations": lambda x: (F.gelu(x), F.silu(x), F.relu(x), x.tanh(), F.leaky_relu(x), F.elu(x)),
    "dropouts": lambda x: (F.dropout(x), F.dropout(x, training=False), F.alpha_dropout(x)),
    "casts": lambda x: (x.float(), x.to(torch.float32), x.type_as(x), x.double(), x.half()),
    "copies": lambda x: (x.clone(), x.contiguous(), x.cpu(), x.to("cpu")),
    "clamps": lambda x: (x.clamp(0, 1), x.clamp(min=0), x.clip(max=0), torch.clamp_min(x, 0)),
    "masks": lambda x: (
        x.masked_fill(x > 0, 0),
        x.masked_fill(torch.tensor([True, False, True]), 1.0),
    ),
    "three": lambda x: (torch.lerp(x, 2 * x, 0.5), torch.addcmul(x, x, x), torch.addcdiv(x, x, x)),
    "unknown to the table": lambda x: (torch.special.entr(x.abs()), torch.special.i0(x)),
    "logical": lambda x: x * (x > 0).logical_and(x < 1).double(),
}


def _in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x += 1
    x *= 3
    x /= 2
    x -= torch.ones(3, dtype=torch.float64)
    return x


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize(
    "x",
    [
        Batched((3, 3)),
        Batched((3, 3), 1),
        Batched((6, 3), post=2),
        Batched((3, 3), owners=(2, 0, 2)),
    ],
    ids=str,
)
def test_operations_on_each_element_are_followed(name: str, x: Batched) -> None:
    exact = name != "unknown to the table" or x.owners is None
    assert_followed(3, UNARY[name], x, exact=exact)


ACROSS: dict[str, Callable[[Tensor], object]] = {
    "with its transpose": lambda x: (x + x.t(), x * x.t(), torch.where(x > 0, x, x.t())),
    "with another order": lambda x: (x + x.flip(0), torch.maximum(x.flip(0), x)),
    "in place": lambda x: x.clone().add_(x.flip(0)),
    "one with all": lambda x: x[:, None] - x[None],
    "with its mean": lambda x: x - x.mean(0),
    "with one of them": lambda x: x - x[:1],
    "with the one before": lambda x: x[1:] - x[:-1],
    "lerp": lambda x: torch.lerp(x, x.flip(0), 0.5),
    "addcmul": lambda x: torch.addcmul(x, x, x.t()),
}


@pytest.mark.parametrize("name", ACROSS)
def test_operations_across_samples_are_not_false(name: str) -> None:
    assert_followed(3, ACROSS[name], Batched((3, 3)), exact=False)
