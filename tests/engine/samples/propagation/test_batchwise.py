"""Layouts through the operations of torch.nn."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.engine.samples.propagation.dependence import Batched, assert_followed


def data(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


IMAGES: dict[str, Callable[[Tensor], object]] = {
    "convolution": lambda x: F.conv2d(x, data(3, 3, 2, 2), data(3), padding=1),
    "grouped convolution": lambda x: F.conv2d(x, data(3, 1, 2, 2), groups=3),
    "transposed convolution": lambda x: F.conv_transpose2d(x, data(3, 3, 2, 2)),
    "max pool": lambda x: (F.max_pool2d(x, 2), F.max_pool2d(x, 2, return_indices=True)),
    "average pool": lambda x: (F.avg_pool2d(x, 2), F.lp_pool2d(x, 2, 2)),
    "adaptive pool": lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, (1, 2))),
    "interpolation": lambda x: (F.interpolate(x, scale_factor=2), F.interpolate(x, (2, 2))),
    "bilinear": lambda x: F.interpolate(x, size=4, mode="bilinear"),
    "pixel_unshuffle": lambda x: F.pixel_shuffle(F.pixel_unshuffle(x[..., :2, :2], 2), 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 3),
    "pads": lambda x: (F.pad(x, (1, 1)), F.pad(x, (1, 0, 0, 2)), F.pad(x, (1, 1, 1, 1), "reflect")),
    "crop": lambda x: F.pad(x, (-1, 0, 1, -1)),
    "unfold": lambda x: F.unfold(x, 2),
    "fold": lambda x: F.fold(F.unfold(x, 2), (3, 3), 2),
    "grid_sample": lambda x: F.grid_sample(x, data(3, 2, 2, 2), align_corners=False),
    "group norm": lambda x: (F.group_norm(x, 1), F.group_norm(x, 3, data(3), data(3))),
    "instance norm": lambda x: (F.instance_norm(x), F.instance_norm(x, weight=data(3))),
    "layer norm": lambda x: (F.layer_norm(x, (3,)), F.layer_norm(x, (3, 3, 3))),
    "rms norm": lambda x: F.rms_norm(x, (3, 3)),
    "local response norm": lambda x: F.local_response_norm(x, 2),
    "batch norm in eval mode": lambda x: F.batch_norm(x, data(3), data(3)),
    "batch norm in training": lambda x: F.batch_norm(x, None, None, training=True),
    "batch norm by keywords": lambda x: F.batch_norm(
        input=x, running_mean=data(3), running_var=data(3), training=False
    ),
    "dropouts": lambda x: (F.dropout2d(x), F.feature_alpha_dropout(x), F.dropout3d(x[None])[0]),
    "row losses": lambda x: F.mse_loss(x, data(3, 3, 3, 3), reduction="none"),
    "class losses": lambda x: F.cross_entropy(x, torch.zeros(3, 3, 3).long(), reduction="none"),
    "class losses of weights": lambda x: F.nll_loss(
        x, torch.zeros(3, 3, 3).long(), data(3), reduction="none"
    ),
    "losses of all": lambda x: (F.mse_loss(x, data(3, 3, 3, 3)), F.l1_loss(x, x.flip(1))),
}
MIXES = {"batch norm in training"}  # whatever the dimension of the samples
TO_A_NUMBER = {"losses of all"}


@pytest.mark.parametrize("name", IMAGES)
def test_batched_operation_is_followed(name: str) -> None:
    exact = name not in MIXES | TO_A_NUMBER
    assert_followed(3, IMAGES[name], Batched((3, 3, 3, 3)), exact=exact)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_operation_on_samples_in_another_place_is_not_false(name: str, dim: int) -> None:
    assert_followed(3, IMAGES[name], Batched((3, 3, 3, 3), dim), exact=False)


@pytest.mark.parametrize(
    "x", [Batched((3, 3, 3, 3), owners=(2, 0, 2)), Batched((6, 3, 3, 3), post=2)], ids=str
)
@pytest.mark.parametrize("name", ["convolution", "max pool", "group norm", "layer norm", "pads"])
def test_operation_on_several_rows_a_sample_is_followed(name: str, x: Batched) -> None:
    assert_followed(3, IMAGES[name], x)


UNBATCHED: dict[str, Callable[[Tensor], object]] = {
    "convolution": lambda x: F.conv1d(x, data(3, 3, 1)),
    "grouped convolution": lambda x: F.conv1d(x, data(3, 1, 2), groups=3),
    "transposed convolution": lambda x: F.conv_transpose1d(x, data(3, 3, 1)),
    "max pool": lambda x: F.max_pool1d(x, 2),
    "average pool": lambda x: F.avg_pool1d(x, 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.view(3, 1, 3).repeat(4, 1, 1)[:12:4], 1),
    "shift over the samples": lambda x: F.pad(x, (0, 0, 1, -1)),
    "longer over the samples": lambda x: F.pad(x, (0, 0, 1, 1)),
    "layer norm over the samples": lambda x: F.layer_norm(x, (3, 3)),
    "circular": lambda x: F.pad(x[None], (1, 1), "circular"),
}


@pytest.mark.parametrize("name", UNBATCHED)
@pytest.mark.parametrize("dim", [0, 1])
def test_samples_taken_for_channels_are_not_false(name: str, dim: int) -> None:
    assert_followed(3, UNBATCHED[name], Batched((3, 3), dim), exact=False)


TABLE = data(5, 4)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_look_up_follows_its_index(rank: int) -> None:
    def look_up(x: Tensor) -> object:
        index = (x.detach() > 0).long()
        picked = F.embedding(index, TABLE), torch.embedding(TABLE, index), F.one_hot(index, 4)
        return [p * x.unsqueeze(-1) for p in picked]

    for dim in range(rank):
        assert_followed(3, look_up, Batched((3, 3, 3)[:rank], dim))


def test_bags_are_followed() -> None:
    def bags(x: Tensor) -> Tensor:
        return F.embedding_bag((x.detach() > 0).long(), TABLE) * x[:, :1]

    assert_followed(3, bags, Batched((3, 2)))


MODULES: dict[str, nn.Module] = {
    "attention": nn.MultiheadAttention(4, 2, batch_first=True),
    "transformer": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "lstm": nn.LSTM(4, 4, batch_first=True),
    "gru": nn.GRU(4, 4, bidirectional=True, batch_first=True),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("count", [3, 4, 1])
def test_module_without_recorded_parameters_is_followed(name: str, count: int) -> None:
    module = MODULES[name].double().requires_grad_(False)

    def run(x: Tensor) -> Tensor:
        output = module(x, x, x) if name == "attention" else module(x)
        return output if isinstance(output, Tensor) else output[0]

    assert_followed(count, run, Batched((count, 4, 4)))
