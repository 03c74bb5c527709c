"""Products of all pairs of rows keep samples apart exactly where no pair of two samples matters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad
from pergrad.errors import MixedSamplesError
from pergrad.testing import assert_near
from tests.engine.exactness import Formula, numbers

IDS = torch.tensor([0, 1, 1, 0, 2])
OWN = IDS[:, None] == IDS
LOWEST = torch.finfo(torch.float64).min


def model_of(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (layer(x)[None] for layer in (m.q, m.k, m.v))
        return attend(q, k, v)[0].square().sum(1)

    layers = {name: nn.Linear(3, 4, bias=name != "k") for name in "qkv"}
    return Formula(forward, **layers).double()


def of_scores(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: change(q @ k.transpose(-1, -2)) @ v


def _sdpa(mask: Any, **options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


APART = {
    "additive, infinite": of_scores(
        lambda s: (s + torch.zeros(5, 5).double().masked_fill(~OWN, -torch.inf)).softmax(-1)
    ),
    "additive, lowest": of_scores(lambda s: (s / 2 + (~OWN).double() * LOWEST).softmax(-1)),
    "masked fill": of_scores(lambda s: s.masked_fill(~OWN, -torch.inf).softmax(-1)),
    "where": of_scores(lambda s: torch.where(OWN, s, -torch.inf).softmax(dim=-1)),
    "linear attention": of_scores(lambda s: s * OWN),
    "dropout": of_scores(lambda s: F.dropout(s.masked_fill(~OWN, -torch.inf).softmax(-1), 0.0)),
    "SDPA, bool": _sdpa(OWN),
    "SDPA, float": _sdpa(torch.zeros(5, 5).double().masked_fill(~OWN, -torch.inf)),
}
MEETING = {
    "no mask": of_scores(lambda s: s.softmax(-1)),
    "mask after softmax": of_scores(lambda s: s.softmax(-1) * OWN),
    "one pair too many": of_scores(
        lambda s: s.masked_fill(~OWN & (torch.arange(25).view(5, 5) != 1), -torch.inf).softmax(-1)
    ),
    "weak mask": of_scores(lambda s: (s - 5 * (~OWN).double()).softmax(-1)),
    "softmax over rows": of_scores(lambda s: s.masked_fill(~OWN, -9.0).softmax(-2) * OWN),
    "cancelled": of_scores(lambda s: s - s.detach() + OWN.double()),
    "SDPA, none": _sdpa(None),
    "SDPA, causal": _sdpa(None, is_causal=True),
    "SDPA, one pair too many": _sdpa(OWN | (torch.arange(25).view(5, 5) == 1)),
    "SDPA, weak": _sdpa(-5 * (~OWN).double()),
}


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", APART)
def test_masks_by_value_keep_samples_apart(name: str) -> None:
    model, x = model_of(APART[name]), numbers(5, 3)
    found = pergrad.grads(model, lambda m, x: m(x), x, owners=IDS)
    losses = model(x)
    for n in range(3):
        expected = torch.autograd.grad(
            losses[n == IDS].sum(), list(model.parameters()), retain_graph=True
        )
        for (key, rows), g in zip(found.items(), expected, strict=True):
            assert_near(rows[n], g, key)


@pytest.mark.parametrize("name", MEETING)
def test_a_pair_of_two_samples_that_matters_is_refused(name: str) -> None:
    model = model_of(MEETING[name])
    with pytest.raises(MixedSamplesError):
        pergrad.grads(model, lambda m, x: m(x), numbers(5, 3), owners=IDS)
