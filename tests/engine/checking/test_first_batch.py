"""The first batch of a pass: facts if it is proved, the reason if it is not, the given error if wrong."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from pergrad.engine.checking.first_batch import certified_first
from pergrad.errors import AuditError, IndexingError, PergradError
from pergrad.quantities import Grads, Gram, Norms
from pergrad.quantities.base import SampleReport
from tests.engine.exactness import numbers
from tests.engine.wrong_rule import Scaled, planted

SIZE, D, OUT = 4, 4, 2


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def certified(
    model: nn.Module, losses: Any = loss, error: type[PergradError] = AuditError, **changes: Any
) -> dict[str, Any]:
    batch = (numbers(SIZE, D),)
    options = {"max_bytes": 2**20, "purpose": "look", **changes}
    return certified_first(model, losses, batch, SIZE, error=error, **options)


def test_a_proved_batch_gives_the_facts() -> None:
    norms = Norms()
    found = certified(nn.Linear(D, OUT).double(), quantities=[norms])
    assert found["ok"]
    assert (found["samples"], found["parameters"]) == (SIZE, 2)
    assert found["largest_error"] < 1e-9
    assert found["proved_in"] == "float64"
    assert norms.result.shape == (SIZE,)


def test_a_refused_model_is_proved_sample_by_sample_without_a_warning() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, OUT)).double()
    model[1].register_full_backward_hook(lambda module, of_input, of_output: of_input)
    assert certified(model)["ok"]


def test_an_error_of_the_model_is_the_reason() -> None:
    def broken(model: nn.Module, x: Tensor) -> Tensor:
        raise ValueError("no such column")

    assert certified(nn.Linear(D, OUT).double(), broken) == {
        "ok": False,
        "reason": "no such column",
    }


@pytest.mark.parametrize("error", [AuditError, IndexingError])
def test_wrong_gradients_raise_the_given_error(error: type[PergradError]) -> None:
    wrong = r"first 4 samples are wrong .*--no-certify, to look"
    with planted(0.1, sample=2), pytest.raises(error, match=wrong):
        certified(Scaled(), error=error)


@pytest.fixture
def _job() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def proved_by_shards(model: nn.Module, losses: Any = loss, **changes: Any) -> dict[str, Any]:
    return certified(sharded(model), losses, gathers=False, fallback=None, **changes)


@pytest.mark.usefixtures("_job")
def test_a_sharded_model_is_proved_in_its_own_precision() -> None:
    norms, gram = Norms(), Gram(against={"bias": numbers(3, OUT)})
    found = proved_by_shards(nn.Linear(D, OUT), lambda m, x: loss(m, x.float()), quantities=[norms])
    assert found["ok"], found
    assert (found["samples"], found["parameters"], found["proved_in"]) == (SIZE, 2, "float32")
    assert 0 <= found["largest_error"] < 1e-5
    assert found["notes"][0].startswith("the model is sharded")
    assert norms.result.shape == (SIZE,)
    found = proved_by_shards(nn.Linear(D, OUT).double(), quantities=[gram, Grads()])
    assert found["ok"], found
    assert found["largest_error"] < 1e-12


@pytest.mark.usefixtures("_job")
def test_the_proof_of_a_sharded_model_leaves_its_gradients_and_random_numbers() -> None:
    model = sharded(nn.Sequential(nn.Linear(D, OUT), nn.Dropout(0.5)).double())
    p: Any = model[0].weight  # type: ignore[index]
    p.grad = torch.ones_like(p)
    before, state = p.grad, torch.get_rng_state()
    numbers(SIZE, D)  # as the batch is drawn
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    assert certified(model, gathers=False, fallback=None)["ok"]
    assert p is model[0].weight  # type: ignore[index]
    assert p.grad is before
    assert bool((p.grad.full_tensor() == 1).all())
    assert model[0].bias.grad is None  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.usefixtures("_job")
def test_wrong_gradients_of_a_sharded_model_raise_the_given_error() -> None:
    with planted(0.1, sample=2), pytest.raises(AuditError, match=r"samples are wrong .*: scale$"):
        proved_by_shards(Scaled())


class Lying(Norms):
    """Reports of the last sample what is not its norm."""

    def sample_report(self, number: int, gradient: Mapping[str, Tensor]) -> SampleReport:
        found, expected, scale = super().sample_report(number, gradient)
        return SampleReport(found * (1 + (number == SIZE - 1)), expected, scale)


@pytest.mark.usefixtures("_job")
def test_a_quantity_that_misreports_a_sample_of_a_sharded_model_is_named() -> None:
    with pytest.raises(AuditError, match=r": Lying of sample 3 is off by "):
        proved_by_shards(nn.Linear(D, OUT).double(), quantities=[Lying()])


@pytest.mark.usefixtures("_job")
def test_nothing_is_proved_of_a_sharded_model_whose_gradients_are_not_finite() -> None:
    found = proved_by_shards(nn.Linear(D, OUT).double(), lambda m, x: loss(m, x) * torch.inf)
    assert not found["ok"]
    assert "ordinary gradients are not finite" in found["reason"]


@pytest.mark.usefixtures("_job")
def test_samples_of_a_sharded_model_that_meet_are_found() -> None:
    class Mean(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.detach().mean() * 1e-3

    with pytest.raises(AuditError, match="first 4 samples are wrong"):
        proved_by_shards(Mean(D, OUT).double())
