from dataclasses import replace

import pytest
import torch

pytest.importorskip("jax")

from benchmarks.jax_models import Net, forward_of
from benchmarks.jax_steps import array, only_norms, vmapped
from benchmarks.models import MODELS, build

CPU = torch.device("cpu")


class Seen(dict[str, object]):
    """Weights that note which of them are used."""

    def __init__(self, weights: dict[str, object]) -> None:
        super().__init__(weights)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> object:
        self.used.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: object = None) -> object:
        self.used.add(name)
        return super().get(name, default)


@pytest.mark.parametrize("model", MODELS)
def test_forward_uses_every_parameter_and_gives_what_torch_gives(model: str) -> None:
    task = build(model, "tiny", seed=0, device=CPU)
    weights = Seen({name: array(p) for name, p in task.model.named_parameters()})
    net = Net(weights, "float32")
    forward = forward_of(task.model)
    found = [torch.from_dlpack(forward(net, x)) for x in array(task.inputs[:2])]
    assert weights.used >= weights.keys()
    torch.testing.assert_close(torch.stack(found), task.model(task.inputs[:2]).detach())


@pytest.mark.slow
def test_norms_are_those_of_jaxs_own_loop() -> None:
    task = build("transformer", "tiny", seed=0, device=CPU)
    each = [
        vmapped(replace(task, inputs=x[None], targets=y[None]), only_norms)()["norms"]
        for x, y in zip(task.inputs, task.targets, strict=True)
    ]
    torch.testing.assert_close(vmapped(task, only_norms)()["norms"], torch.cat(each))


def test_memory_is_at_least_that_of_weights_batch_and_results() -> None:
    task = build("mlp", "tiny", seed=0, device=CPU)
    step = vmapped(task, only_norms)
    assert step.peak_bytes >= task.resident_bytes() + step()["norms"].nbytes


def test_products_are_in_the_type_of_autocast() -> None:
    task = build("mlp", "tiny", seed=0, device=CPU)
    exact = vmapped(task, only_norms)()["norms"]
    with torch.autocast("cpu", torch.bfloat16):
        coarse = vmapped(task, only_norms)()["norms"]
    assert coarse.dtype == torch.float32
    assert 1e-4 < ((coarse - exact).norm() / exact.norm()).item() < 0.1


def test_model_that_is_not_written_in_jax_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"Linear has no JAX version.*Transformer"):
        forward_of(torch.nn.Linear(1, 1))
