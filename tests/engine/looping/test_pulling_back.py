"""Ordinary gradients are dense, and zeros where nothing reaches a parameter."""

import torch
from torch import nn

from pergrad.engine.looping.pulling_back import pulled_back
from tests.engine.exactness import numbers


def test_unreached_parameters_have_zeros_and_sparse_gradients_are_dense() -> None:
    table, unused = nn.Embedding(7, 2, sparse=True).double(), nn.Parameter(numbers(2))
    out = table(torch.arange(3)).sum()
    named = {"table": table.weight, "unused": unused}
    found = pulled_back([out], [torch.ones_like(out)], named, list(named.values()))
    assert not found["table"].is_sparse
    assert found["table"].any()
    assert not found["unused"].any()
