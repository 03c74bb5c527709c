"""Bad input gets the words that torch's private API uses, since programs match on them.

Each case is given to torch's own implementation and to pergrad: both must refuse it, with the same
fixed pieces of wording, so a torch release that rewords a check is noticed here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils._expanded_weights import ExpandedWeight as TorchExpandedWeight
from torch.nn.utils._expanded_weights.expanded_weights_utils import forward_helper
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads as torch_call

import pergrad
from pergrad.errors import PergradError

TORCH = SimpleNamespace(call_for_per_sample_grads=torch_call, ExpandedWeight=TorchExpandedWeight)


@dataclass(frozen=True)
class Refusal:
    """An action that an API (torch's or pergrad's) refuses, and the pieces of what it says."""

    name: str
    act: Callable[[Any], object]
    pieces: tuple[str, ...]


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def leave_grad_sample_behind(module: nn.Module, *, frozen: bool = False) -> nn.Module:
    last = list(module.parameters())[-1]
    last.grad_sample = torch.zeros(2, *last.shape)  # type: ignore[attr-defined]
    last.requires_grad_(not frozen)
    return module


class PickFromDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        return self.linear(inputs["x"])


TWO_SIZES = (
    "When computing batch size, found at least one input with batch size ",
    " and one with batch size ",
    "Please specify it explicitly using the batch size kwarg in call_for_per_sample_grads",
)
LEFT_OVER = (
    "Current Expanded Weights accumulates the gradients, which will be incorrect for multiple "
    "calls without clearing gradients.",
    "Please clear out the grad_sample parameter of ",
)
MISMATCH = (
    "Expected ExpandedWeights to have batch size matching input but got input batch size of 3 "
    "with ExpandedWeight of batch size 5",
)
NO_TENSOR = (
    "Unable to find a tensor in the passed args and kwargs. They may not be pytree-able and so ",
    "cannot compute the batch size from the inputs. Please specify it explicitly",
)
ZERO_BATCH = ("0 is not a valid batch size for Expanded Weights but got input tensor of ",)

CALL_REFUSALS = [
    Refusal(
        "two positional sizes",
        lambda api: api.call_for_per_sample_grads(nn.Bilinear(3, 3, 2))(
            torch.randn(4, 3), torch.randn(6, 3)
        ),
        (*TWO_SIZES, "batch size 4 and", "batch size 6."),
    ),
    Refusal(
        "a positional and a keyword size",
        lambda api: api.call_for_per_sample_grads(nn.Bilinear(3, 3, 2))(
            torch.randn(4, 3), input2=torch.randn(6, 3)
        ),
        (*TWO_SIZES, "batch size 4 and", "batch size 6."),
    ),
    Refusal(
        "two sizes inside a dict",
        lambda api: api.call_for_per_sample_grads(PickFromDict())(
            {"x": torch.randn(4, 3), "unused": [torch.randn(6)]}
        ),
        TWO_SIZES,
    ),
    Refusal(
        "two sizes in dimension one",
        lambda api: api.call_for_per_sample_grads(nn.Bilinear(3, 3, 2), batch_first=False)(
            torch.randn(2, 4, 3), torch.randn(2, 6, 3)
        ),
        (*TWO_SIZES, "batch size 4 and", "batch size 6."),
    ),
    Refusal(
        "no argument at all",
        lambda api: api.call_for_per_sample_grads(nn.Linear(3, 2))(),
        NO_TENSOR,
    ),
    Refusal(
        "no tensor among the arguments",
        lambda api: api.call_for_per_sample_grads(PickFromDict())({"x": [1.0, 2.0]}),
        NO_TENSOR,
    ),
    Refusal(
        "batch size of a wrong type",
        lambda api: api.call_for_per_sample_grads(nn.Linear(3, 2), batch_size=4.0),
        ("Batch size passed must be None or an integer, got float",),
    ),
    Refusal(
        "batch size as a string",
        lambda api: api.call_for_per_sample_grads(nn.Linear(3, 2), batch_size="4"),
        ("Batch size passed must be None or an integer, got str",),
    ),
    Refusal(
        "batch size zero",
        lambda api: api.call_for_per_sample_grads(nn.Linear(3, 2), batch_size=0),
        ("Batch size must be positive, got 0",),
    ),
    Refusal(
        "batch size negative",
        lambda api: api.call_for_per_sample_grads(nn.Linear(3, 2), batch_size=-2),
        ("Batch size must be positive, got -2",),
    ),
    Refusal(
        "a tensor instead of a module",
        lambda api: api.call_for_per_sample_grads(torch.randn(3)),
        ("Module passed must be nn.Module, got Tensor",),
    ),
    Refusal(
        "a function instead of a module",
        lambda api: api.call_for_per_sample_grads(nn.Linear(3, 2).forward),
        ("Module passed must be nn.Module, got method",),
    ),
    Refusal(
        "unknown loss_reduction",
        lambda api: api.call_for_per_sample_grads(nn.Linear(3, 2), loss_reduction="max"),
        ("Expected loss_reduction argument to be sum or mean, got max",),
    ),
    Refusal(
        "loss_reduction None",
        lambda api: api.call_for_per_sample_grads(nn.Linear(3, 2), loss_reduction=None),
        ("Expected loss_reduction argument to be sum or mean, got None",),
    ),
    Refusal(
        "grad_sample left over",
        lambda api: api.call_for_per_sample_grads(leave_grad_sample_behind(nn.Linear(3, 2))),
        LEFT_OVER,
    ),
    Refusal(
        "grad_sample left over on a frozen parameter",
        lambda api: api.call_for_per_sample_grads(
            leave_grad_sample_behind(nn.Sequential(nn.Linear(3, 2)), frozen=True)
        ),
        LEFT_OVER,
    ),
    Refusal(
        "given batch size is not the input's",
        lambda api: api.call_for_per_sample_grads(nn.Linear(4, 2), batch_size=5)(torch.randn(3, 4)),
        MISMATCH,
    ),
    Refusal(
        "zero batch through a module",
        lambda api: api.call_for_per_sample_grads(nn.Linear(4, 2))(torch.randn(0, 4)),
        ZERO_BATCH,
    ),
]

NO_BATCH_DIMENSION = (
    "Input does not have a batch dimension. Expanded Weights expected input of at least rank 2, "
    "got of rank ",
)
UNBATCHED_CONVOLUTION = (
    "Expanded Weights only support convolution with batched input, got ",
    "unbatched input of dim ",
    "expected input of dim ",
)
OVER_THE_BATCH = (
    "Expanded Weights: Layer norm should not normalize over batch dimension for per sample "
    "gradient",
    "matched input shape",
)

WEIGHT_REFUSALS = [
    Refusal(
        "weight that is a float",
        lambda api: api.ExpandedWeight(3.0, 4, "sum"),
        ("Can only make Expanded Weights of Tensors, got float",),
    ),
    Refusal(
        "weight that is a list",
        lambda api: api.ExpandedWeight([torch.ones(2)], 4, "sum"),
        ("Can only make Expanded Weights of Tensors, got list",),
    ),
    Refusal(
        "weight without requires_grad",
        lambda api: api.ExpandedWeight(torch.randn(2, 3), 4, "sum"),
        # torch 2.11 goes on with "require_grad", torch 2.13 and pergrad with "requires_grad".
        ("Can only build ExpandedWeights objects of tensors that require", "_grad"),
    ),
    Refusal(
        "batch size is not the input's, weight",
        lambda api: F.linear(torch.randn(3, 4), api.ExpandedWeight(weight(2, 4), 5, "sum")),
        MISMATCH,
    ),
    Refusal(
        "batch size is not the input's, bias",
        lambda api: F.linear(
            torch.randn(3, 4), torch.randn(2, 4), api.ExpandedWeight(weight(2), 5, "sum")
        ),
        MISMATCH,
    ),
    Refusal(
        "batch size is not the input's, convolution",
        lambda api: F.conv2d(
            torch.randn(3, 1, 4, 4), api.ExpandedWeight(weight(2, 1, 2, 2), 5, "sum")
        ),
        MISMATCH,
    ),
    Refusal(
        "two loss_reductions in one call",
        lambda api: F.linear(
            torch.randn(3, 4),
            api.ExpandedWeight(weight(2, 4), 3, "sum"),
            api.ExpandedWeight(weight(2), 3, "mean"),
        ),
        (
            "Expected ExpandedWeights to all have the same loss_reduction argument but got one",
            "with sum and one with mean",
        ),
    ),
    Refusal(
        "input that is itself an ExpandedWeight",
        lambda api: F.linear(
            api.ExpandedWeight(weight(3, 4), 3, "sum"), api.ExpandedWeight(weight(2, 4), 3, "sum")
        ),
        (
            "Expanded Weights do not support inputs that are also ExpandedWeights. ",
            "Input must be a Tensor, got ExpandedWeight in function linear",
        ),
    ),
    Refusal(
        "input of rank 0",
        lambda api: F.conv1d(torch.tensor(1.0), api.ExpandedWeight(weight(2, 1, 2), 1, "sum")),
        (
            "Expanded Weights requires a batch dimension but got an input of size 0 in function "
            "conv1d",
        ),
    ),
    Refusal(
        "zero batch",
        lambda api: F.linear(torch.randn(0, 4), api.ExpandedWeight(weight(2, 4), 3, "sum")),
        (*ZERO_BATCH, "in function linear"),
    ),
    Refusal(
        "zero batch, convolution",
        lambda api: F.conv1d(torch.randn(0, 1, 4), api.ExpandedWeight(weight(2, 1, 2), 3, "sum")),
        (*ZERO_BATCH, "in function conv1d"),
    ),
    Refusal(
        "linear with an input of rank 1",
        lambda api: F.linear(torch.randn(4), api.ExpandedWeight(weight(2, 4), 4, "sum")),
        (*NO_BATCH_DIMENSION, "of rank 1"),
    ),
    Refusal(
        "linear with an input of rank 0",
        lambda api: F.linear(torch.tensor(1.0), api.ExpandedWeight(weight(2, 4), 4, "sum")),
        (*NO_BATCH_DIMENSION, "of rank 0"),
    ),
    Refusal(
        "unbatched conv1d",
        lambda api: F.conv1d(torch.randn(3, 8), api.ExpandedWeight(weight(2, 3, 3), 3, "sum")),
        (*UNBATCHED_CONVOLUTION, "input of dim 2", "input of dim 3"),
    ),
    Refusal(
        "unbatched conv2d",
        lambda api: F.conv2d(
            torch.randn(3, 8, 8), api.ExpandedWeight(weight(2, 3, 3, 3), 3, "sum")
        ),
        (*UNBATCHED_CONVOLUTION, "input of dim 3", "input of dim 4"),
    ),
    Refusal(
        "unbatched conv3d",
        lambda api: F.conv3d(
            torch.randn(3, 4, 4, 4), api.ExpandedWeight(weight(2, 3, 3, 3, 3), 3, "sum")
        ),
        (*UNBATCHED_CONVOLUTION, "input of dim 4", "input of dim 5"),
    ),
    Refusal(
        "layer norm over the batch dimension",
        lambda api: F.layer_norm(
            torch.randn(3, 4), (3, 4), api.ExpandedWeight(weight(3, 4), 3, "sum")
        ),
        (*OVER_THE_BATCH, "(3, 4)"),
    ),
    Refusal(
        "rows of a weight",
        lambda api: api.ExpandedWeight(weight(3, 4), 5, "sum")[torch.tensor([0, 1, 2, 0, 1])],
        ("Expanded Weights encountered but cannot handle function __getitem__",),
    ),
    Refusal(
        "layer norm of a vector",
        lambda api: F.layer_norm(
            torch.randn(3), (3,), bias=api.ExpandedWeight(weight(3), 3, "sum")
        ),
        OVER_THE_BATCH,
    ),
]


@pytest.mark.parametrize("api", [TORCH, pergrad], ids=["torch", "pergrad"])
@pytest.mark.parametrize("refusal", CALL_REFUSALS + WEIGHT_REFUSALS, ids=lambda case: case.name)
def test_bad_input_is_refused_in_torchs_words(refusal: Refusal, api: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        refusal.act(api)
    message = str(caught.value)
    missing = [piece for piece in refusal.pieces if piece not in message]
    assert not missing, f"{missing} not said in: {message}"
    if api is pergrad:
        assert isinstance(caught.value, PergradError)


def test_input_that_is_no_tensor_is_refused_in_torchs_words() -> None:
    pieces = (
        "Expanded Weights requires a Tensor as the first input to get the batch dimension, ",
        "got list in function layer_norm",
    )
    # No function of torch.nn reaches torch's check: each fails earlier on the attributes of a list.
    with pytest.raises(RuntimeError, match=pieces[0] + pieces[1]):
        forward_helper(F.layer_norm, ([1.0], (1,)), {"weight": None})
    with pytest.raises(PergradError) as caught:
        F.layer_norm([1.0], (1,), pergrad.ExpandedWeight(weight(1), 1, "sum"))
    assert all(piece in str(caught.value) for piece in pieces)


@pytest.mark.parametrize("api", [TORCH, pergrad], ids=["torch", "pergrad"])
def test_unknown_padding_string_is_refused(api: Any) -> None:
    with pytest.raises(RuntimeError):
        F.conv1d(
            torch.randn(3, 1, 4), api.ExpandedWeight(weight(2, 1, 2), 3, "sum"), padding="reflect"
        )


@pytest.mark.parametrize(
    "act",
    [
        lambda model: pergrad.call_for_per_sample_grads(model, batch_size=5)(torch.randn(3, 4)),
        lambda model: pergrad.call_for_per_sample_grads(model)(torch.randn(0, 4)),
        lambda model: pergrad.call_for_per_sample_grads(model)(torch.randn(4)),
        lambda model: pergrad.call_for_per_sample_grads(model)(torch.randn(3, 5)),
    ],
    ids=["batch size mismatch", "zero batch", "unbatched", "shape error of the module's own"],
)
def test_refused_call_leaves_the_model_as_it_was(act: Callable[[nn.Module], object]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    with pytest.raises(RuntimeError):
        act(model)
    assert dict(model.named_parameters()).keys() == before.keys()
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert getattr(parameter, "grad_sample", None) is None
        assert parameter.grad is None
        assert not parameter._backward_hooks
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    model(torch.randn(3, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("api", [TORCH, pergrad], ids=["torch", "pergrad"])
def test_wrapper_has_name_and_docstring_of_forward(api: Any) -> None:
    class Documented(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Give x back."""
            return x

    module = Documented()
    wrapper = api.call_for_per_sample_grads(module)
    assert wrapper.__name__ == "forward"
    assert wrapper.__qualname__ == module.forward.__qualname__
    assert wrapper.__doc__ == "Give x back."


@pytest.mark.parametrize("api", [TORCH, pergrad], ids=["torch", "pergrad"])
def test_options_are_keyword_only(api: Any) -> None:
    with pytest.raises(TypeError):
        api.call_for_per_sample_grads(nn.Linear(3, 2), 4)


@pytest.mark.parametrize("api", [TORCH, pergrad], ids=["torch", "pergrad"])
def test_expanded_weight_refers_to_the_weight_it_expands(api: Any) -> None:
    original = weight(2, 3)
    expanded = api.ExpandedWeight(original, 4, "sum")
    assert expanded.orig_weight is original
    assert isinstance(expanded, torch.Tensor)
    assert expanded.shape == original.shape
    assert expanded.dtype == original.dtype


def test_cleared_grad_sample_is_accepted() -> None:
    model = leave_grad_sample_behind(nn.Linear(3, 2))
    for parameter in model.parameters():
        parameter.grad_sample = None  # type: ignore[attr-defined]
    pergrad.call_for_per_sample_grads(model)(torch.randn(4, 3)).sum().backward()
    assert all(parameter.grad_sample.shape[0] == 4 for parameter in model.parameters())
