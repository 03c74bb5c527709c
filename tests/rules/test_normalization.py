"""Group normalisation by torch's own kernel, against the product with the normalised input."""

import pytest
import torch
import torch.nn.functional as F

from pergrad.factors import Dense
from pergrad.rules.normalization import group_norm
from pergrad.testing import assert_near


@pytest.mark.parametrize("shape", [(4, 1, 6, 5), (3, 2, 6, 4, 3), (2, 3, 6)])
@pytest.mark.parametrize("groups", [1, 3])
def test_scale_and_shift_are_sums_over_each_samples_positions(shape, groups):
    generator = torch.Generator().manual_seed(0)
    g, x = (torch.randn(shape, dtype=torch.float64, generator=generator) * 3 + 1 for _ in range(2))
    g, x = (
        t.transpose(1, -1).contiguous().transpose(1, -1) for t in (g, x)
    )  # out of order in memory
    found = {name: factor() for name, factor in group_norm(g, x, groups).items()}
    normalized = F.group_norm(x.flatten(0, 1), groups).view(shape)
    dims = [1, *range(3, len(shape))]
    assert_near(found["weight"].materialize(), (g * normalized).sum(dims))
    assert_near(found["bias"].materialize(), g.sum(dims))


def test_low_precision_is_summed_up_in_the_type_that_is_asked_for():
    g = torch.ones(2, 1, 4, 3000, dtype=torch.bfloat16)
    factor = group_norm(g, torch.randn_like(g), 2)["bias"]()
    assert not isinstance(factor, Dense)
    assert factor.materialize(torch.float32)[0, 0] == 3000


def test_a_shift_alone_needs_no_input():
    g = torch.ones(2, 1, 4, 5)
    assert_near(group_norm(g, None, 2)["bias"]().materialize(), torch.full((2, 4), 5.0))
