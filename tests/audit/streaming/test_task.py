import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pergrad.audit import AuditOptions
from pergrad.audit.streaming.ranks import Ranks
from pergrad.audit.streaming.task import made_task, with_buckets, with_one_hash
from pergrad.errors import AuditError
from tests.audit.cases import mlp, network


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sharded_model_is_refused_by_the_name_of_what_shards_it(alone):
    model = fully_shard(network(), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(AuditError, match=r"fully_shard shards this model.*whole model"):
        made_task(mlp(model=model), AuditOptions(), Ranks())


class Second(Ranks):
    """The second of two processes; the first one has decided."""

    def first_decides(self, decide):
        return "hash of the first"


def test_the_first_process_hashes_the_model_for_all():
    task = made_task(mlp(), AuditOptions(), Ranks())
    assert with_one_hash(task, Second(1, 2)).identity["model"] == "hash of the first"
    assert len(with_one_hash(task, Ranks()).identity["model"]) == 16


def test_without_a_token_budget_samples_keep_their_order():
    task = made_task(mlp(), AuditOptions(), Ranks())
    assert with_buckets(task, Ranks()) is task
