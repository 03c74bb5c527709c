"""`ExpandedWeight` against a loop over samples, on torch's own sample inputs of each function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import pergrad
from tests.engine.torch_databases import EXPANDED_WEIGHT_OPS

Reduction = Literal["sum", "mean"]
EXACT = {"rtol": 1e-9, "atol": 1e-11, "equal_nan": True}  # eps < 0 makes NaN in some samples

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


@dataclass(frozen=True)
class Sample:
    """One call of a function, and which of its arguments are weights."""

    name: str
    function: Callable[..., Tensor]
    input: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def weights(self) -> dict[int | str, Tensor]:
        every = {**dict(enumerate(self.args)), **self.kwargs}
        return {key: arg for key, arg in every.items() if is_weight(arg)}

    def is_batched(self) -> bool:
        if self.input.dim() == 0 or self.input.shape[0] == 0:
            return False
        if self.function is F.linear:
            return self.input.dim() > 1
        if self.function is F.layer_norm:
            return self.input.dim() > len(self.args[0])
        if self.function in (F.conv1d, F.conv2d, F.conv3d):
            return self.input.dim() == self.args[0].dim()
        return True

    def call(self, x: Tensor, weights: dict[int | str, Tensor]) -> Tensor:
        """Call the function; running statistics are copies, so that no call sees another's."""
        every = {**dict(enumerate(self.args)), **self.kwargs}
        copies = {key: arg.clone() for key, arg in every.items() if isinstance(arg, Tensor)}
        every = {**every, **copies, **weights}
        args = [every.pop(position) for position in range(len(self.args))]
        return self.function(x, *args, **every)


def is_weight(arg: object) -> bool:
    return isinstance(arg, Tensor) and arg.is_floating_point() and arg.requires_grad


def samples_of(op: Any) -> list[Sample]:
    torch.manual_seed(0)
    found = []
    for index, sample in enumerate(op.sample_inputs("cpu", torch.float64, requires_grad=True)):
        name = f"{op.name.removeprefix('nn.functional.')}-{index}"
        if op.name == "nn.functional.embedding":
            # The database names the table as the input, since only it is differentiable.
            index_tensor, *rest = sample.args
            found.append(
                Sample(name, F.embedding, index_tensor, (sample.input, *rest), sample.kwargs)
            )
        else:
            found.append(Sample(name, op.op, sample.input, sample.args, sample.kwargs))
    return found


SAMPLES = [sample for op in EXPANDED_WEIGHT_OPS for sample in samples_of(op) if sample.weights()]
BATCHED = [sample for sample in SAMPLES if sample.is_batched()]
UNBATCHED = [sample for sample in SAMPLES if not sample.is_batched()]


def enlarged(sample: Sample) -> Sample:
    """Give the sample seven rows: many of the database have one, which cannot mix with another."""
    rows = torch.randint(sample.input.shape[0], (7,))
    x = sample.input.detach()[rows]
    if x.is_floating_point():
        x = x + torch.randn_like(x)
    return Sample(sample.name, sample.function, x, sample.args, sample.kwargs)


def loop_over_samples(sample: Sample, cotangent: Tensor) -> dict[int | str, Tensor]:
    rows: dict[int | str, list[Tensor]] = {key: [] for key in sample.weights()}
    for n in range(sample.input.shape[0]):
        weights = {key: weight.detach().clone() for key, weight in sample.weights().items()}
        for weight in weights.values():
            weight.requires_grad_()
        output = sample.call(sample.input.detach()[n : n + 1], weights)
        (output * cotangent[n : n + 1]).sum().backward()
        for key, weight in weights.items():
            assert weight.grad is not None
            rows[key].append(weight.grad)
    return {key: torch.stack(grads) for key, grads in rows.items()}


def check_against_loop(sample: Sample, loss_reduction: Reduction, input_needs_grad: bool) -> None:
    needs_grad = input_needs_grad and sample.input.is_floating_point()
    batch = sample.input.shape[0]
    plain_input = sample.input.detach().clone().requires_grad_(needs_grad)
    plain_output = sample.call(plain_input, {})
    cotangent = torch.randn_like(plain_output)
    scale = 1 / batch if loss_reduction == "mean" else 1.0

    originals = {
        key: weight.detach().clone().requires_grad_() for key, weight in sample.weights().items()
    }
    expanded = {
        key: pergrad.ExpandedWeight(original, batch, loss_reduction)
        for key, original in originals.items()
    }
    x = sample.input.detach().clone().requires_grad_(needs_grad)
    output = sample.call(x, expanded)
    assert_close(output, plain_output, **EXACT)
    (output * cotangent).sum().mul(scale).backward()

    expected = loop_over_samples(sample, cotangent)
    for key, original in originals.items():
        assert original.grad is None
        assert_close(original.grad_sample, expected[key], **EXACT)  # type: ignore[attr-defined]
    if needs_grad:
        (plain_output * cotangent).sum().mul(scale).backward()
        assert_close(x.grad, plain_input.grad, **EXACT)
    else:
        assert x.grad is None


def test_database_has_the_functions_of_the_contract() -> None:
    names = {op.name.removeprefix("nn.functional.") for op in EXPANDED_WEIGHT_OPS}
    assert names >= {
        "conv1d",
        "conv2d",
        "conv3d",
        "embedding",
        "group_norm",
        "instance_norm",
        "layer_norm",
        "linear",
    }
    assert {sample.function for sample in BATCHED} >= {op.op for op in EXPANDED_WEIGHT_OPS} - {
        op.op for op in EXPANDED_WEIGHT_OPS if op.name == "nn.functional.embedding"
    } | {F.embedding}


@pytest.mark.parametrize("input_needs_grad", [False, True], ids=["input", "input with grad"])
@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
@pytest.mark.parametrize("sample", BATCHED, ids=lambda sample: sample.name)
def test_grad_samples_equal_the_loop(
    sample: Sample, loss_reduction: Reduction, input_needs_grad: bool
) -> None:
    check_against_loop(sample, loss_reduction, input_needs_grad)


@pytest.mark.parametrize("sample", BATCHED, ids=lambda sample: sample.name)
def test_grad_samples_of_an_enlarged_batch_equal_the_loop(sample: Sample) -> None:
    torch.manual_seed(1)
    check_against_loop(enlarged(sample), "mean", input_needs_grad=True)


@pytest.mark.parametrize("sample", BATCHED, ids=lambda sample: sample.name)
def test_each_weight_may_be_frozen_while_the_others_are_expanded(sample: Sample) -> None:
    batch = sample.input.shape[0]
    cotangent = torch.randn_like(sample.call(sample.input, {}))
    expected = loop_over_samples(sample, cotangent)
    for trained in sample.weights():
        weights = {key: weight.detach().clone() for key, weight in sample.weights().items()}
        original = weights[trained].requires_grad_()
        weights[trained] = pergrad.ExpandedWeight(original, batch, "sum")
        (sample.call(sample.input.detach(), weights) * cotangent).sum().backward()
        assert_close(original.grad_sample, expected[trained], **EXACT)  # type: ignore[attr-defined]
        assert all(not hasattr(weights[key], "grad_sample") for key in weights if key != trained)


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
@pytest.mark.parametrize("sample", UNBATCHED, ids=lambda sample: sample.name)
def test_sample_without_a_batch_is_refused(sample: Sample, loss_reduction: Reduction) -> None:
    batch = sample.input.shape[0] if sample.input.dim() else 1
    originals = {key: weight.detach().requires_grad_() for key, weight in sample.weights().items()}
    with pytest.raises(RuntimeError):
        sample.call(
            sample.input.detach(),
            {
                key: pergrad.ExpandedWeight(original, batch, loss_reduction)
                for key, original in originals.items()
            },
        )
    assert all(not hasattr(original, "grad_sample") for original in originals.values())
