import pytest
import torch

from benchmarks.conv_ways import WAYS, Shape, loop, plain

SHAPES = [
    Shape(3, 4, 6, 7, 3, 1, 1),
    Shape(3, 4, 6, 8, 3, 2, 1),
    Shape(2, 4, 6, 6, 1, 2),
    Shape(2, 4, 6, 9, 3, 2, 2, groups=2, dilation=2),
    Shape(2, 4, 4, 5, 3, 1, 1, groups=4),
]


@pytest.mark.parametrize("shape", SHAPES, ids=Shape.label)
@pytest.mark.parametrize("way", WAYS)
def test_way_agrees_with_the_loop(way: str, shape: Shape) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape.n, shape.c, shape.size, shape.size, dtype=torch.float64)
    g = torch.randn(shape.n, shape.o, shape.out_size, shape.out_size, dtype=torch.float64)
    expected = loop(x, g, shape)
    torch.testing.assert_close(WAYS[way](x, g, shape), expected)
    torch.testing.assert_close(expected.sum(0), plain(x, g, shape))
