"""Sizes that count samples stay tagged only where they still do."""

import copy
import pickle

from hypothesis import given
from hypothesis import strategies as st

from pergrad.engine.samples.sizes import BatchSize

sizes = st.integers(1, 12)


@given(sizes, sizes)
def test_a_product_is_tagged_from_either_side(a: int, b: int) -> None:
    for product in (BatchSize(a) * b, b * BatchSize(a)):
        assert product == a * b
        assert type(product) is BatchSize


@given(sizes, sizes)
def test_a_quotient_is_tagged_where_nothing_is_left_over_and_more_than_one_remains(
    a: int, b: int
) -> None:
    quotient = BatchSize(a) // b
    assert quotient == a // b
    assert (type(quotient) is BatchSize) == (a % b == 0 and a // b > 1)


@given(sizes, sizes)
def test_sums_and_differences_count_no_samples(a: int, b: int) -> None:
    assert type(BatchSize(a) + b) is int
    assert type(BatchSize(a) - b) is int


def test_products_with_what_is_no_int_are_as_those_of_an_int() -> None:
    assert BatchSize(4) * 0.5 == 2.0
    assert type(BatchSize(4) * 0.5) is float
    assert BatchSize(2) * [1] == [1, 1]
    assert type(BatchSize(4) // 2.0) is float


def test_a_copy_that_leaves_the_step_is_a_plain_int() -> None:
    assert type(pickle.loads(pickle.dumps(BatchSize(4)))) is int
    assert copy.deepcopy(BatchSize(4)) == 4
