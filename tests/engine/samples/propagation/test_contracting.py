"""Layouts through matrix products and other contractions."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.samples.propagation.dependence import Batched, assert_followed

properties = settings(deadline=None, derandomize=True, max_examples=120)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


@properties
@given(st.sampled_from([2, 3, 1]), st.data())
def test_product_with_a_constant_is_followed(count: int, data: st.DataObject) -> None:
    """The samples may be a batch dimension, the rows, the columns, or be summed over."""
    sizes = st.sampled_from([2, 3, count])
    front = data.draw(st.lists(sizes, max_size=2))
    m, k, n = data.draw(sizes), data.draw(sizes), data.draw(sizes)
    shape = [*front, m, k]
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] = count
    exact = dim != len(shape) - 1 and not (count == 1 and front)
    x = Batched(tuple(shape), dim)
    assert_followed(count, lambda t: t @ ones(shape[-1], n), x, exact=exact)
    assert_followed(
        count, lambda t: torch.matmul(ones(*shape[:-2], n, shape[-1]), t.mT), x, exact=exact
    )
    assert_followed(count, lambda t: t.matmul(ones(shape[-1])), x, exact=exact)
    assert_followed(count, lambda t: F.linear(t, ones(n, shape[-1]), ones(n)), x, exact=exact)
    left = dim != len(shape) - 2 and not (count == 1 and front)
    assert_followed(count, lambda t: ones(shape[-2]) @ t, x, exact=left)
    assert_followed(count, lambda t: ones(2, shape[-2]) @ t, x, exact=left)


Products = dict[str, Callable[[Tensor, Tensor], object]]
BATCHED: Products = {
    "matmul": lambda a, b: a @ b.mT,
    "bmm": lambda a, b: torch.bmm(a, b.transpose(1, 2)),
    "baddbmm": lambda a, b: torch.baddbmm(ones(3, 3), a, b.mT),
    "baddbmm of three": lambda a, b: torch.baddbmm(a @ b.mT, a, b.mT),
    "einsum": lambda a, b: torch.einsum("bij,bkj->bik", a, b),
    "einsum, no arrow": lambda a, b: torch.einsum("bij,bkj", a, b),
    "einsum, batch last": lambda a, b: torch.einsum("bij,bkj->ikb", a, b),
    "einsum, ellipsis": lambda a, b: torch.einsum("...ij,...kj->...ik", a, b),
    "einsum of a list": lambda a, b: torch.einsum("bij, bkj -> bik", [a, b]),
    "einsum by numbers": lambda a, b: torch.einsum(a, [0, 1, 2], b, [0, 3, 2], [0, 1, 3]),
    "attention": lambda a, b: F.scaled_dot_product_attention(a, b, a),
    "causal attention": lambda a, b: F.scaled_dot_product_attention(a, b, b, is_causal=True),
    "attention with a mask": lambda a, b: F.scaled_dot_product_attention(
        query=a, key=b, value=b, attn_mask=ones(3, 3)
    ),
    "attention of heads": lambda a, b: F.scaled_dot_product_attention(
        a.unsqueeze(1), b.unsqueeze(1), b.unsqueeze(1)
    ),
    "element product and sum": lambda a, b: (a * b).sum(-1),
    "tensordot with a constant": lambda a, b: torch.tensordot(a, ones(3, 2), 1),
    "distances": lambda a, b: torch.cdist(a, b),
    "bilinear": lambda a, b: F.bilinear(a, b, ones(2, 3, 3)),
}


@pytest.mark.parametrize("name", BATCHED)
def test_product_of_two_batches_is_followed(name: str) -> None:
    assert_followed(3, BATCHED[name], Batched((3, 3, 3)), Batched((3, 3, 3)))


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("dims", [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)])
def test_product_of_samples_in_any_two_places_is_not_false(
    name: str, dims: tuple[int, int]
) -> None:
    first, second = (Batched((3, 3, 3), dim) for dim in dims)
    assert_followed(3, BATCHED[name], first, second, exact=False)


@pytest.mark.parametrize("name", BATCHED)
def test_product_of_batches_in_different_order_is_not_false(name: str) -> None:
    plain, turned = Batched((3, 3, 3)), Batched((3, 3, 3), owners=(2, 1, 0))
    other = Batched((3, 3, 3), owners=(1, 2, 0))
    assert_followed(3, BATCHED[name], plain, turned, exact=False)
    assert_followed(3, BATCHED[name], turned, plain, exact=False)
    assert_followed(3, BATCHED[name], turned, other, exact=False)


@pytest.mark.parametrize("name", [n for n in BATCHED if n not in ("distances", "bilinear")])
def test_product_of_batches_in_one_other_order_is_followed(name: str) -> None:
    turned = Batched((3, 3, 3), owners=(2, 0, 2))
    exact = name not in ("einsum by numbers", "tensordot with a constant")
    assert_followed(3, BATCHED[name], turned, turned, exact=exact)


MATRICES: Products = {
    "mm": lambda a, b: torch.mm(a, b.t()),
    "gram": lambda a, b: a @ b.t(),
    "covariance": lambda a, b: a.t() @ b,
    "mv": lambda a, b: torch.mv(a, b[:, 0]),
    "dot": lambda a, b: torch.dot(a[:, 0], b[0]),
    "addmm": lambda a, b: torch.addmm(a, a, ones(3, 3)),
    "addmm, samples in the columns": lambda a, b: torch.addmm(a.t(), ones(3, 3), b.t()),
    "addmm of both": lambda a, b: torch.addmm(b.t(), a, ones(3, 3)),
    "addmv": lambda a, b: torch.addmv(b[:, 0], a, ones(3)),
    "addbmm": lambda a, b: torch.addbmm(ones(1, 1), a.unsqueeze(1), b.unsqueeze(2)),
    "linear of a batched weight": lambda a, b: F.linear(ones(3, 3), a),
    "linear of two batches": lambda a, b: F.linear(a, b),
    "attention without a batch": lambda a, b: F.scaled_dot_product_attention(a, b, b),
    "attention of constant keys": lambda a, b: F.scaled_dot_product_attention(
        a, ones(3, 3), ones(3, 3)
    ),
    "attention to samples": lambda a, b: F.scaled_dot_product_attention(ones(3, 3), a, b),
    "outer": lambda a, b: torch.outer(a[:, 0], ones(3)),
    "outer of two": lambda a, b: torch.outer(a[:, 0], b[:, 1]),
    "kron": lambda a, b: torch.kron(a, ones(2, 2)),
    "kron from the left": lambda a, b: torch.kron(ones(2, 2), a),
    "multi_dot": lambda a, b: torch.linalg.multi_dot([a, ones(3, 3), ones(3, 3)]),
    "inner": lambda a, b: torch.inner(a, ones(3, 3)),
    "einsum diagonal": lambda a, b: torch.einsum("ii->i", a),
    "einsum trace": lambda a, b: torch.einsum("ii", a),
    "einsum outer": lambda a, b: torch.einsum("bi,cj->bcij", a, b),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_product_of_matrices_is_not_false(name: str, dims: tuple[int, int]) -> None:
    first, second = (Batched((3, 3), dim) for dim in dims)
    assert_followed(3, MATRICES[name], first, second, exact=False)


@pytest.mark.parametrize(
    "name", ["mm", "addmm", "addmv", "linear of a batched weight", "multi_dot", "inner", "outer"]
)
def test_product_of_a_matrix_of_samples_and_a_constant_is_followed(name: str) -> None:
    assert_followed(3, lambda a: MATRICES[name](a, ones(3, 3)), Batched((3, 3)))
