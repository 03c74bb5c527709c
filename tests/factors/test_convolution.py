"""Both ways to a convolution's per-sample gradients, against each other and against plain autograd."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pergrad.factors import Convolution
from pergrad.factors import convolution as module
from pergrad.testing import assert_near

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def by_loop(factor: Convolution) -> Tensor:
    """Differentiate the plain convolution of each sample's own rows, padded beforehand."""
    sides = [side for pair in reversed(factor.padding) for side in pair]
    convolve = CONVOLUTIONS[len(factor.stride)]
    kernel = torch.zeros(factor.kernel, dtype=factor.input.dtype, requires_grad=True)
    gradients = []
    for x, g in zip(factor.input, factor.grad_output, strict=True):
        output: Any = convolve(
            F.pad(x, sides), kernel, None, factor.stride, 0, factor.dilation, factor.groups
        )
        (gradient,) = torch.autograd.grad(output, kernel, g)
        gradients.append(gradient)
    return torch.stack(gradients)


def convolution(
    n: int = 3,
    rows: int = 1,
    channels: int = 2,
    out_channels: int = 3,
    groups: int = 1,
    space: tuple[int, ...] = (5, 6),
    taps: tuple[int, ...] = (3, 2),
    stride: tuple[int, ...] = (1, 1),
    padding: tuple[tuple[int, int], ...] = ((0, 0), (0, 0)),
    dilation: tuple[int, ...] = (1, 1),
) -> Convolution:
    """Make a factor with `channels` and `out_channels` a group, and random values."""
    padded = [size + sum(pair) for size, pair in zip(space, padding, strict=True)]
    out = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(padded, taps, stride, dilation, strict=True)
    ]
    random = torch.Generator().manual_seed(0)
    x, g = (
        torch.randn(n, rows, c * groups, *shape, generator=random, dtype=torch.float64)
        for c, shape in ((channels, space), (out_channels, out))
    )
    return Convolution(
        g, x, (groups * out_channels, channels, *taps), stride, padding, dilation, groups
    )


@st.composite
def convolutions(draw: st.DrawFn) -> Convolution:
    dims = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    taps, dilation = each(1, 3), each(1, 3)
    padding = tuple(zip(each(0, 2), each(0, 2), strict=True))
    least = [d * (k - 1) + 1 - sum(p) for d, k, p in zip(dilation, taps, padding, strict=True)]
    space = tuple(max(low, 1) + more for low, more in zip(least, each(0, 3), strict=True))
    return convolution(
        n=draw(st.integers(1, 4)),
        rows=draw(st.integers(1, 3)),
        channels=draw(st.integers(1, 3)),
        out_channels=draw(st.integers(1, 3)),
        groups=draw(st.integers(1, 3)),
        space=space,
        taps=taps,
        stride=each(1, 3),
        padding=padding,
        dilation=dilation,
    )


@settings(deadline=None, derandomize=True, max_examples=150)
@given(convolutions())
def test_both_ways_equal_the_loop(factor: Convolution) -> None:
    expected = by_loop(factor)
    assert_near(factor.by_windows(), expected, "by windows")
    assert_near(factor.by_samples_as_groups(), expected, "by samples as groups")
    assert_near(factor.materialize(), expected, "as chosen")
    outputs, channels, *taps = factor.kernel
    last = factor.channels_last().materialize().view(-1, outputs, *taps, channels)
    assert_near(last.movedim(-1, 2), expected, "channels last")


@pytest.mark.parametrize(
    "sizes",
    [
        {"channels": 16, "space": (12, 12)},
        {"channels": 16, "space": (4, 4)},
        {"channels": 1, "groups": 16},
        {"channels": 1},
        {"taps": (1, 1), "channels": 16},
    ],
    ids=str,
)
def test_choice_changes_no_number(sizes: dict[str, Any]) -> None:
    factor = convolution(**sizes)
    assert_near(factor.materialize(), by_loop(factor))


@pytest.mark.parametrize("way", ["by_windows", "by_samples_as_groups"])
def test_input_and_gradient_may_lie_anyhow_in_memory(way: str) -> None:
    plain = convolution(rows=2, groups=2)
    strided = Convolution(
        plain.grad_output.transpose(0, -1).contiguous().transpose(0, -1),
        plain.input.transpose(1, -2).contiguous().transpose(1, -2),
        *(plain.kernel, plain.stride, plain.padding, plain.dilation, plain.groups),
    )
    assert_near(getattr(strided, way)(), by_loop(plain))


@pytest.mark.parametrize("way", ["by_windows", "by_samples_as_groups"])
def test_gradient_broadcast_over_positions_is_accepted(way: str) -> None:
    plain = convolution(n=2)
    g = plain.grad_output[..., :1, :1].expand(plain.grad_output.shape)
    factor = Convolution(g, plain.input, plain.kernel, plain.stride, plain.padding, (1, 1), 1)
    assert_near(getattr(factor, way)(), by_loop(factor))


@pytest.mark.parametrize("way", ["by_windows", "by_samples_as_groups"])
def test_result_has_the_dtype_of_the_gradient(way: str) -> None:
    plain = convolution()
    mixed = Convolution(
        plain.grad_output.float(),
        plain.input,
        *(plain.kernel, plain.stride, plain.padding, plain.dilation, plain.groups),
    )
    assert_near(getattr(mixed, way)(), by_loop(plain).float())


@pytest.mark.parametrize("dims", [1, 2])
def test_factor_in_two_dimensions_has_the_same_gradient(dims: int) -> None:
    factor = convolution(
        rows=2,
        groups=2,
        space=(7, 9)[-dims:],
        taps=(2, 3)[-dims:],
        stride=(3, 2)[-dims:],
        padding=((1, 1), (2, 2))[-dims:],
        dilation=(1, 2)[-dims:],
    )
    g, x, taps, stride, padding, dilation, groups = factor.in_two_dimensions()
    assert (g.dim(), x.dim(), len(taps), len(stride), len(padding), len(dilation)) == (
        5,
        5,
        *[2] * 4,
    )
    wide = Convolution(
        g,
        x,
        (*factor.kernel[:2], *taps),
        tuple(stride),
        tuple((side, side) for side in padding),
        tuple(dilation),
        groups,
    )
    assert_near(by_loop(wide).view(factor.shape), by_loop(factor))


def test_only_windows_need_memory_beside_the_gradient() -> None:
    by_windows = convolution(rows=2, channels=2, groups=3, space=(5, 6), taps=(3, 2))
    assert by_windows.scratch == 3 * (2 * 3 * 2) * (2 * 3 * 5)
    by_groups = convolution(channels=1, groups=2)
    assert by_groups.scratch == 0
    assert not by_groups.channels_last_is_cheaper


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_product_of_windows_has_the_same_gradient(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    factor = convolution(rows=2, groups=groups, padding=((1, 0), (2, 1)), stride=(2, 1))
    picked: list[str] = []

    class Transposing:
        def pick(self, choice: str, problem: tuple[Any, ...] = ()) -> str:
            picked.append(choice)
            return "transposed" if choice == "product of windows" else "as it is"

    monkeypatch.setattr(module, "chooser_of", lambda _: Transposing())
    found = factor.by_windows()
    assert picked == ["product of windows"]
    assert found.is_contiguous()
    assert_near(found, by_loop(factor))


def test_order_of_windows_follows_the_longer_pieces() -> None:
    assert not convolution(channels=2, space=(5, 6), taps=(3, 2)).channels_last_is_cheaper
    assert convolution(channels=5, space=(5, 6), taps=(3, 2)).channels_last_is_cheaper
    assert not convolution(channels=4, space=(5, 6), taps=(3, 2)).channels_last_is_cheaper


def test_an_input_with_equal_padding_is_not_copied() -> None:
    for before, after, is_copied in ((0, 0, False), (1, 1, False), (1, 0, True)):
        g, x = torch.randn(2, 1, 3, 2 + before + after), torch.randn(2, 1, 2, 4)
        factor = Convolution(g, x, (3, 2, 3), (1,), ((before, after),), (1,), 1)
        found, padding = factor._input_and_padding()
        assert (found is not x) is is_copied
        assert padding == [0 if is_copied else before]
