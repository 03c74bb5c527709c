import numpy as np
import pytest
import torch
from torch import nn

from pergrad.audit.streaming.gradients import Gradients, joined_rows
from pergrad.audit.subject.spec import grouped_parameters
from pergrad.errors import PergradError
from tests.audit.cases import losses, mlp, network


def rows_of(spec, count, *, dtype=torch.float64, sketch_dim=64):
    model = spec.model.to(dtype)
    groups = grouped_parameters(spec)
    gradients = Gradients(model, spec, groups, sketch_dim=sketch_dim, seed=0)
    return gradients.rows(spec.dataset[:count], count)


def alone(spec, row):
    """The loss and the gradients of one sample, by an ordinary backward."""
    x, y = spec.dataset[row : row + 1]
    loss = losses(spec.model, x.double(), y).sum()
    trained = {name: p for name, p in spec.model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()))
    return loss.item(), dict(zip(trained, found, strict=True))


@pytest.mark.parametrize("frozen", [False, True])
def test_rows_are_those_of_one_backward_a_sample(frozen):
    spec = mlp()
    spec.model[0].weight.requires_grad_(not frozen)
    rows = rows_of(spec, 9)
    for row in range(9):
        loss, grads = alone(spec, row)
        by_group = [[g for n, g in grads.items() if n.startswith(group)] for group in ("0", "2")]
        expected = [torch.cat([g.flatten() for g in group]).norm() for group in by_group]
        np.testing.assert_allclose(rows.loss[row], loss, rtol=1e-12)
        np.testing.assert_allclose(rows.group_norms[row], expected, rtol=1e-12)
        np.testing.assert_allclose(rows.norm[row], np.linalg.norm(expected), rtol=1e-12)


def test_sketches_keep_inner_products_about():
    spec = mlp()
    rows = rows_of(spec, 9, sketch_dim=4096)
    grads = [torch.cat([g.flatten() for g in alone(spec, row)[1].values()]) for row in range(9)]
    exact = torch.stack(grads) @ torch.stack(grads).T
    error = rows.sketch @ rows.sketch.T - exact.numpy()
    assert np.abs(error).max() < 0.1 * np.outer(rows.norm, rows.norm).max()


def test_sketch_is_as_precise_as_the_model():
    assert rows_of(mlp(), 2).sketch.dtype == np.float64
    assert rows_of(mlp(), 2, dtype=torch.float32).sketch.dtype == np.float32
    assert rows_of(mlp(), 2, dtype=torch.bfloat16).sketch.dtype == np.float32


def test_nothing_is_left_on_the_model():
    spec = mlp()
    rows_of(spec, 3)
    assert all(p.grad is None and not hasattr(p, "grad_sample") for p in spec.model.parameters())


def test_samples_that_mix_are_refused():
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    with pytest.raises(PergradError, match="BatchNorm in training mode"):
        rows_of(mlp(model=model), 3)


def test_a_parameter_that_the_loss_does_not_reach_has_norm_zero():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = network(), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    spec = mlp(model=Half(), groups=lambda name: name.partition(".")[0])
    rows = rows_of(spec, 4)
    assert (rows.group_norms[:, 1] == 0).all()
    np.testing.assert_allclose(rows.group_norms[:, 0], rows.norm, rtol=1e-12)


def test_joined_rows_are_in_order():
    spec = mlp()
    parts = [rows_of(spec, 2), rows_of(spec, 3)]
    assert len(joined_rows(parts)) == 5
    assert np.array_equal(joined_rows(parts).loss[2:], parts[1].loss)
