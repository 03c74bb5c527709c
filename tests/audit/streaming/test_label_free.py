import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pergrad.audit.streaming.gradients import Gradients
from pergrad.audit.streaming.label_free import (
    LabelFree,
    checked_logits,
    checked_target,
    class_shares,
)
from pergrad.audit.streaming.sketching.narrowing import as_matrix
from pergrad.audit.subject.losses import LossOfLogits
from pergrad.audit.subject.spec import grouped_parameters
from pergrad.errors import AuditError
from pergrad.reductions import CountSketch
from tests.audit.cases import data, losses, mlp, network

DIM = 64


class Tied(nn.Module):
    """Uses one weight twice, and has a parameter that no output depends on."""

    def __init__(self, *, unused: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        if unused:
            self.spare = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


def logits(model, x, y):
    return model(x)


def shared(model, **changes):
    loss = LossOfLogits(logits, lambda out, x, y: F.cross_entropy(out, y, reduction="none"))
    return mlp(model=model, loss=loss, logits=logits, target=lambda x, y: y, **changes)


def rows_of(spec, **options):
    model = spec.model
    made = Gradients(
        model, spec, grouped_parameters(spec), sketch_dim=DIM, seed=0, free_dim=DIM, **options
    )
    return made.rows(tuple(spec.dataset.tensors), len(spec.dataset))


def by_a_loop(model, x, v):
    """Sketch the gradient of logits · v of each sample alone."""
    shapes = {n: as_matrix(p.shape) for n, p in model.named_parameters()}
    sketches = CountSketch.of_all(shapes, DIM, 1)
    rows = []
    for sample in x:
        found = torch.autograd.grad(
            (model(sample[None])[0] @ v), list(model.parameters()), allow_unused=True
        )
        row = torch.zeros(DIM, dtype=torch.float64)
        for (name, p), g in zip(model.named_parameters(), found, strict=True):
            buckets, signs = sketches[name].entries()
            flat = torch.zeros_like(p).flatten() if g is None else g.flatten()
            row.index_add_(0, buckets, flat * signs)
        rows.append(row)
    return torch.stack(rows)


def direction(classes):
    v = torch.randn(classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return v - v.mean()


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("way", ["shared", "apart"])
def test_label_free_sketches_are_those_of_a_loop_over_the_samples(way, unused) -> None:
    torch.manual_seed(0)
    model = Tied(unused=unused).double()
    spec = shared(model, dataset=data(9, dtype=torch.float64))
    if way == "apart":
        spec = mlp(
            model=model, dataset=spec.dataset, logits=logits, target=lambda x, y: y, loss=losses
        )
    found = rows_of(spec)
    expected = by_a_loop(model, spec.dataset.tensors[0], direction(3))
    np.testing.assert_allclose(found.free[:, 0], expected.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("unused", [False, True])
def test_one_forward_pass_gives_the_same_rows_as_two(unused) -> None:
    torch.manual_seed(0)
    model = Tied(unused=unused).double()
    both = shared(model, dataset=data(9, dtype=torch.float64))
    apart = mlp(
        model=model, dataset=both.dataset, logits=logits, target=lambda x, y: y, loss=losses
    )
    one, two = rows_of(both), rows_of(apart)
    for name in ("loss", "norm", "group_norms", "sketch", "free", "predicted", "probability"):
        np.testing.assert_allclose(getattr(one, name), getattr(two, name), rtol=1e-9, atol=1e-12)


def test_one_forward_pass_is_run_where_the_loss_is_one_of_the_logits() -> None:
    calls = []

    class Counting(nn.Sequential):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    rows_of(shared(Counting(*network())))
    assert len(calls) == 1


def test_checkpoints_come_before_the_model() -> None:
    spec = shared(network())
    earlier = network(seed=1)
    found = rows_of(spec, checkpoints=[earlier])
    assert found.free.shape == (len(spec.dataset), 2, DIM)
    np.testing.assert_allclose(found.free[:, 1], rows_of(spec).free[:, 0])
    np.testing.assert_allclose(found.free[:, 0], rows_of(shared(earlier)).free[:, 0])


def test_the_direction_does_not_change_when_all_logits_shift() -> None:
    free, values = LabelFree(8, 3), torch.randn(4, 5, dtype=torch.float64)
    torch.testing.assert_close(free.of_logits(values), free.of_logits(values + 7))


def test_one_logit_stands_for_two_classes() -> None:
    shares = class_shares(torch.tensor([[0.0], [100.0]]))
    torch.testing.assert_close(shares, torch.tensor([[0.5, 0.5], [0.0, 1.0]]).double())


def test_logits_and_targets_of_another_shape_are_refused() -> None:
    x, y = data(4).tensors
    with pytest.raises(AuditError, match=r"spec.logits must return logits of shape \(4, classes\)"):
        checked_logits(lambda model, x, y: model(x).sum(), network(), (x, y), 4)
    with pytest.raises(AuditError, match=r"spec.logits raised ZeroDivisionError.*test_label_free"):
        checked_logits(lambda model, x, y: 1 / 0, network(), (x, y), 4)
    with pytest.raises(AuditError, match=r"whole numbers of shape \(4,\)"):
        checked_target(lambda x, y: y.float(), (x, y), 4, 3)


def test_classes_without_a_logit_are_refused_and_negative_ones_are_unknown() -> None:
    y = torch.tensor([1, 3, -1])
    with pytest.raises(AuditError, match=r"class 3, and spec.logits have the classes 0 to 2"):
        checked_target(lambda y: y, (y,), 3, 3)
    assert checked_target(lambda y: y, (y,), 3, 4).tolist() == [1, 3, -1]
