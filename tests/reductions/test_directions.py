"""Sums in random directions are those of the whole sums, and every wrong entry shows in them."""

import pytest
import torch
from torch import Tensor

from pergrad.factors import Dense, OuterProduct
from pergrad.reductions import Directions, SampleGradients
from pergrad.reductions.directions import COUNT
from pergrad.testing import assert_near
from tests.reductions.factor_cases import convolution

N, T = 3, 40
SHAPES = [(256, 130), (192, 67), (67, 256), (127, 191), (128, 128)]  # blocks of rows, or of columns


def directions(seed: int = 0) -> Directions:
    drawn = torch.rand(
        Directions.rows, COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return Directions((1 + drawn) * torch.tensor([-1.0, 1.0]).repeat(COUNT // 2))


def outer(o: int, i: int, dtype: torch.dtype = torch.float64) -> OuterProduct:
    torch.manual_seed(0)
    return OuterProduct(torch.randn(N, T, o, dtype=dtype), torch.randn(N, T, i, dtype=dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sums_in_directions_are_directions_of_the_sum(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    factor, some, weights = outer(*shape, dtype), directions(), torch.tensor([0.5, -2.0, 1.5])
    assert some.pay_for([factor])
    gradients = SampleGradients([factor], torch.tensor([1.0, 3.0, 0.25]), bound=10**9)
    found = gradients.weighted_sum_and_norms(weights, some)
    whole = gradients.weighted_sum(weights)
    assert_near(found, some.of(whole))
    assert found.numel() < whole.numel() / 4


@pytest.mark.parametrize("outputs", [64, 96, 256])
@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize(
    ("space", "taps"), [((99,), (3,)), ((12, 15), (3, 2)), ((7, 6, 9), (2, 1, 2))]
)
def test_convolutions_are_summed_in_directions_of_their_outputs(
    space: tuple[int, ...], taps: tuple[int, ...], uses: int, outputs: int
) -> None:
    factor = convolution(3, space, taps, rows=uses, channels=70, outputs=outputs, stride=2)
    some, weights = directions(), torch.tensor([0.5, -2.0, 1.5])
    assert some.pay_for([factor])
    gradients = SampleGradients([factor], bound=10**9)
    found = gradients.weighted_sum_and_norms(weights, some)
    assert_near(found, some.of(gradients.weighted_sum(weights)))
    assert found.shape == (
        outputs // max(b for b in (64, 96, 128) if outputs % b == 0) * COUNT,
        70,
        *taps,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_wrong_entry_shows_in_every_direction_by_its_size_or_more(shape: tuple[int, int]) -> None:
    off = torch.zeros(shape, dtype=torch.float64)
    off[shape[0] // 3, shape[1] // 2] = 0.5
    seen = directions().of(off)
    assert int((seen.abs() >= 0.5).sum()) == int((seen != 0).sum()) == COUNT


@pytest.mark.parametrize("seed", range(20))
def test_many_wrong_entries_show_by_the_size_of_the_largest(seed: int) -> None:
    torch.manual_seed(seed)
    off = torch.randn(256, 5, dtype=torch.float64) * (torch.rand(256, 5) < 0.1)
    some = directions(seed)
    seen, largest = float(some.of(off).abs().max()), float(off.abs().max())
    assert seen >= largest
    assert some.least_error(seen, off.shape) <= largest


def test_other_factors_are_summed_as_they_are() -> None:
    some = directions()
    assert not some.pay_for([outer(131, 137)])  # no blocks of 64 to 128
    assert not some.pay_for([outer(64, 8).part(slice(0, 1))])  # small
    assert not some.pay_for([outer(256, 256, torch.bfloat16)])
    assert not some.pay_for([convolution(3, (9,), (3,), channels=128, outputs=128, groups=2)])
    assert not some.pay_for([convolution(3, (9,), (3,), channels=128, outputs=10)])
    assert not some.pay_for([Dense(torch.ones(N, 256, 256))])
    assert not some.pay_for([outer(256, 256), Dense(torch.ones(N, 256, 256))])
    mixed: Tensor = outer(256, 256).input.float()
    assert not some.pay_for([OuterProduct(outer(256, 256).grad_output, mixed)])


def test_output_gradients_that_were_written_to_are_projected_again() -> None:
    drawn, factor = directions(), outer(256, 130)
    before = drawn.of_factor(factor).materialize()
    again = drawn.of_factor(OuterProduct(factor.grad_output, factor.input)).materialize()
    assert torch.equal(before, again)
    factor.grad_output.mul_(2)
    assert_near(drawn.of_factor(factor).materialize(), 2 * before)
    drawn.forget_last()
    assert_near(drawn.of_factor(factor).materialize(), 2 * before)


@pytest.mark.parametrize("shape", SHAPES)
def test_directions_of_rows_or_columns_are_products_with_the_blocks(shape: tuple[int, int]) -> None:
    some = directions()
    blocks = some._blocks_of(shape)
    total = outer(*shape).materialize()[0]
    drawn = some._drawn[: blocks.size]
    parts = total.unflatten(blocks.dim, (-1, blocks.size))
    expected = (
        torch.einsum("bsi,sk->bki", parts, drawn).flatten(0, 1)
        if blocks.dim == 0
        else torch.einsum("obs,sk->obk", parts, drawn).flatten(1)
    )
    assert_near(some.of(total), expected)
    (found,) = (f.materialize()[0] for f in [some.of_factor(outer(*shape))])
    assert_near(found, expected)
