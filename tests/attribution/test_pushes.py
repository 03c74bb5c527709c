import numpy as np
import pytest
import torch

import pergrad
from pergrad.attribution import pushes
from tests.attribution.gradient_cases import gradients


def test_strongest_helpers_and_harmers_are_those_of_comparing_all() -> None:
    rows = gradients(40, 5)
    index = np.arange(40) + 100
    found = pushes(index, rows, np.array([7, 30]), each=3)
    at = 0
    for row in (7, 30):
        cosines = {
            other: rows[row] @ rows[other] / np.linalg.norm(rows[row]) / np.linalg.norm(rows[other])
            for other in range(40)
            if other != row
        }
        by_cosine = sorted(cosines, key=cosines.__getitem__)
        for other in by_cosine[:-4:-1] + by_cosine[:3]:
            assert (found.index[at], found.other[at]) == (row + 100, other + 100)
            assert found.cosine[at] == pytest.approx(cosines[other])
            assert found.dot[at] == pytest.approx(rows[row] @ rows[other])
            at += 1
    assert at == len(found)


def test_a_step_on_a_helper_lowers_the_loss_and_on_a_harmer_raises_it() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).double()
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))

    def losses(model, x, y):
        return torch.nn.functional.cross_entropy(model(x), y, reduction="none")

    grads = torch.cat([g.flatten(1) for g in pergrad.grads(model, losses, x, y).values()], dim=1)
    found = pushes(np.arange(20), grads.numpy(), np.array([0]), each=2)
    assert len(found) == 4
    before = losses(model, x[:1], y[:1]).item()
    rate, start = 1e-4, torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    for other, dot in zip(found.other, found.dot, strict=True):
        step = start - rate * grads[other]
        torch.nn.utils.vector_to_parameters(step, model.parameters())
        change = losses(model, x[:1], y[:1]).item() - before
        assert change == pytest.approx(-rate * dot, rel=1e-2)


def test_there_may_be_neither_helpers_nor_harmers() -> None:
    rows = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert len(pushes(np.arange(3), rows, np.arange(3))) == 0
    assert len(pushes(np.arange(3), rows, np.empty(0, dtype=np.int64))) == 0
