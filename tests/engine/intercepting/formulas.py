"""Models of one formula over a matrix `w` and a vector `v`, for tests of the recorder."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pergrad.engine.samples.sizes import BatchSize
from pergrad.testing import assert_near
from tests.engine.exactness import Formula, numbers

D = 4


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)  # type: ignore[no-any-return]


def model_of(function: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    return Formula(function, w=numbers(D, D), v=numbers(D))


def linear(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.w, m.v)


def assert_all_near(
    found: dict[str, Tensor], expected: dict[str, Tensor], times: float = 1
) -> None:
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        assert_near(found[name], times * rows, name)


def reshapes_by_size(m: Any, x: Tensor) -> Tensor:
    assert isinstance(x.size(0), BatchSize)
    assert isinstance(x.size(dim=-2), BatchSize)
    assert isinstance(x.size()[0], BatchSize)
    assert not isinstance(x.size(1), BatchSize)
    assert isinstance(len(x), int)
    return F.linear(x.view(x.size(0), 2, -1), m.w[:, :2]).reshape(x.size(dim=0), -1)
