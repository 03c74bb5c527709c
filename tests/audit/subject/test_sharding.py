import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pergrad.audit.subject.sharding import (
    device_of,
    is_sharded_model,
    name_of,
    refuse_index,
    structure_of,
)
from pergrad.errors import IndexingError


class FSDPNet(nn.Sequential):
    """A class of the user whose name begins like those that `fully_shard` makes."""


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def network():
    return FSDPNet(nn.Linear(2, 2), nn.Tanh())


def test_a_whole_model_is_left_alone():
    model = network()
    assert not is_sharded_model(model)
    assert structure_of(model) == repr(model)
    assert name_of(model) == "FSDPNet"
    refuse_index(model)


def test_a_sharded_model_is_described_as_the_whole_one(mesh):
    model = network()
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh)
    assert is_sharded_model(model)
    assert repr(model) != structure_of(model) == repr(network())
    assert name_of(model) == "FSDPNet"
    assert device_of(model, None) == torch.device("cpu")
    with pytest.raises(IndexingError, match="build the index of the whole model"):
        refuse_index(model)


def test_a_precision_that_sharding_sets_is_part_of_the_structure(mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(network(), mesh=mesh, mp_policy=policy)
    assert "bfloat16" in structure_of(model)
