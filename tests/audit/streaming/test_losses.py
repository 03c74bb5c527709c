import pytest
import torch

from pergrad.audit.streaming.losses import loss_of_samples
from pergrad.errors import AuditError
from tests.audit.cases import data, network


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, x, y: model(x).sum(), r"shape \(4,\), got a scalar: .* reduction='none'"),
        (lambda model, x, y: model(x), r"shape \(4,\), got shape \(4, 3\): sum or average"),
        (lambda model, x, y: model(x[:2]).sum(1), r"shape \(4,\), got shape \(2,\)"),
        (lambda model, x, y: 0.5, "must return a tensor .* got float"),
        (lambda model, x, y: model(x).sum(1).detach(), "does not depend on any parameter"),
        (lambda model, x: model(x).sum(1), "spec.loss raised TypeError"),
        (lambda model, x, y: model(x[:, :2]).sum(1), "spec.loss raised RuntimeError: mat1"),
    ],
)
def test_what_is_no_loss_of_each_sample_is_refused(loss, message):
    with pytest.raises(AuditError, match=message):
        loss_of_samples(loss, network(), data()[:4], 4)


def test_running_out_of_memory_is_left_to_the_caller():
    def greedy(model, x, y):
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        loss_of_samples(greedy, network(), data()[:4], 4)
