"""Max pooling in pieces with channels last, against torch's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pergrad.audit.streaming import pooling
from pergrad.audit.streaming.pooling import pooling_in_pieces
from pergrad.runtime import internals
from tests.reductions.factor_cases import data

OPTIONS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (2, 3), "stride": (1, 2), "ceil_mode": True},
    {"kernel_size": 2, "dilation": 2, "return_indices": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["plain", "ties", "nan", "few channels", "channels last", "one"])
def test_values_and_gradients_are_those_of_torch(options, kind, monkeypatch):
    monkeypatch.setattr(pooling, "_PIECE", 2 * 8 * 7 * 9 * 4)  # two images
    images = data(1 if kind == "one" else 5, 3 if kind == "few channels" else 8, 7, 9).float()
    if kind == "ties":
        images = images.round()
    if kind == "nan":
        images[1, 2, 3, 4:6] = torch.nan
    if kind == "channels last":
        images = images.contiguous(memory_format=torch.channels_last)
    of_both = []
    for context in (torch.enable_grad(), pooling_in_pieces(nn.MaxPool2d(2))):
        x = images.clone().requires_grad_()
        with context:
            found = F.max_pool2d(x, **options)
        outs = found if isinstance(found, tuple) else (found,)
        assert outs[0].is_contiguous() == (kind != "channels last")
        weights = data(*outs[0].shape).float()
        of_both.append((*outs, *torch.autograd.grad((outs[0] * weights).sum(), x)))
    for own, other in zip(*of_both, strict=True):
        assert torch.equal(own.nan_to_num(7.0), other.nan_to_num(7.0))
        assert own.stride() == other.stride()


def test_a_batch_is_pooled_in_pieces(monkeypatch):
    monkeypatch.setattr(pooling, "_PIECE", 2 * 8 * 4 * 4 * 4)
    lengths = []

    def pool(images, *options):
        lengths.append((len(images), images.is_contiguous(memory_format=torch.channels_last)))
        return torch.ops.aten.max_pool2d_with_indices(images, *options)

    pooling._pooled(pool, data(5, 8, 4, 4).float(), [2, 2], [2, 2])
    assert lengths == [(2, True), (2, True), (1, True)]


def test_only_models_that_pool_enter_the_context():
    seen = []
    for model in (nn.Linear(2, 2), nn.Sequential(nn.Conv2d(1, 8, 3), nn.MaxPool2d(2))):
        with pooling_in_pieces(model) as context:
            seen.append(context is not None)
    assert seen == [False, True]
    with internals.replacing_operators({}):  # all others run as they are
        assert torch.equal(F.relu(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))
