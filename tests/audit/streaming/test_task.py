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


def test_a_sharded_model_has_the_identity_of_the_whole_one(alone):
    model = fully_shard(network(), mesh=init_device_mesh("cpu", (1,)))
    found = with_one_hash(made_task(mlp(model=model), AuditOptions(), Ranks()), Ranks())
    wanted = with_one_hash(made_task(mlp(), AuditOptions(), Ranks()), Ranks())
    assert found.is_sharded
    assert found.identity == wanted.identity
    with pytest.raises(AuditError, match="over cpu devices"):
        made_task(mlp(model=model), AuditOptions(device="cuda"), Ranks())


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
