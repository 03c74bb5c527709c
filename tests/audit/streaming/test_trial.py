import pytest
import torch

from pergrad.audit import AuditOptions
from pergrad.audit.streaming.trial import first_batch
from pergrad.errors import AuditError
from tests.audit.cases import data, mlp, scalar_loss


def test_the_first_batch_is_in_the_type_asked_for():
    model, (x, y) = first_batch(mlp(), AuditOptions(batch_size=3, dtype="float64"))
    assert x.dtype == next(model.parameters()).dtype == torch.float64
    assert torch.equal(y, data()[:3][1])


def test_there_may_be_fewer_samples_than_asked_for():
    _, (x, _) = first_batch(mlp(size=2), AuditOptions(batch_size=3))
    assert len(x) == 2


def test_a_loss_that_is_not_per_sample_is_refused():
    with pytest.raises(AuditError, match="got a scalar"):
        first_batch(scalar_loss(), AuditOptions())
