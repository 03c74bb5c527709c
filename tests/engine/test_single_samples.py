"""Loops over samples without a batch dimension, and weights cast to complex numbers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad
from pergrad.testing import assert_near, loop_grads
from tests.engine.soundness.judge import Cases, exact_or_refused

CASES = Cases()


@pytest.fixture(autouse=True)
def _float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@CASES.exact()
def convolutions(m: Any, x: Tensor) -> Tensor:
    kernel = m.w.view(3, 1, 3)
    return torch.stack([F.conv1d(row.view(1, 3), kernel, m.a.bias, padding=1) for row in m.b(x)])


@CASES.exact()
def scalars_of_products(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.a(row) @ m.w @ m.b(row) for row in x]).unsqueeze(1)


@CASES.exact()
def elements(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return torch.stack([h[n, n % 3] for n in range(len(x))]).unsqueeze(1)


@CASES.exact()
def rows_by_their_own_index(m: Any, x: Tensor) -> Tensor:
    h, rows = m.a(x), []
    for n in range(len(x)):
        kept = torch.nonzero(x[n] > -9).flatten()
        rows.append(h[n : n + 1, kept])
    return m.b(torch.cat(rows))


@CASES.exact()
def complex_kernel(m: Any, x: Tensor) -> Tensor:
    wave = torch.exp(1j * m.w)
    return x @ (wave * m.w.type(wave.dtype)).real + m.a(x)


@CASES.refused()
def sums_of_earlier_samples(m: Any, x: Tensor) -> Tensor:
    total, sums = torch.zeros(3), []
    for row in x:
        total = total + m.a(row)
        sums.append(total)
    return torch.stack(sums)


@pytest.mark.parametrize("name", CASES)
def test_each_sample_by_itself_is_exact_or_refused(name: str) -> None:
    case = CASES[name]
    assert exact_or_refused(case.made, case.loss_fn) == case.verdict


def test_loss_added_up_sample_by_sample_is_a_sum() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)

    def total(model: nn.Module, x: Tensor) -> Tensor:
        loss = torch.zeros(())
        for row in model(x):
            loss = loss + row.square().sum()
        return loss

    expected = loop_grads(model, total, x)
    for name, rows in pergrad.grads(model, total, x).items():
        assert_near(rows, expected[name], name)


def test_scripted_module_is_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises(pergrad.PergradError, match="scripted or traced"):
        pergrad.norms(scripted, lambda m, x: m(x).sum(1), torch.randn(4, 3))
