"""The oracle, one backward a sample, and checks against it, for pergrad's tests and for users' own rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from pergrad.engine import call_for_per_sample_grads
from pergrad.engine.recording.arguments import leaves, map_leaves
from pergrad.errors import PergradError
from pergrad.runtime.tolerances import largest, tolerance_of_rule

__all__ = ["assert_near", "check_rule", "loop_grads"]


def loop_grads(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    *batch: Any,
    batch_size: int | None = None,
    batch_dim: int = 0,
) -> dict[str, Tensor]:
    """Computes per-sample gradients by a loop: one forward and one backward for each sample.

    Every tensor in `batch` (any pytree, mapping or dataclass) with `batch_size` entries along `batch_dim` is
    sliced; the others are passed unchanged. By default the first tensor gives the size. Parameters that a
    sample does not reach have zeros.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> loop_grads(model, lambda model, x: model(x).sum(), torch.eye(2))["weight"]
    tensor([[[1., 0.]],
    <BLANKLINE>
            [[0., 1.]]])
    """
    if batch_size is None:
        tensors = (t for t in leaves(batch) if isinstance(t, Tensor))
        first = next((t for t in tensors if t.dim() > batch_dim), None)
        if first is None:
            raise PergradError("no tensor in the batch to read its size from: pass batch_size")
        batch_size = first.shape[batch_dim]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def one(n: int) -> list[Tensor]:
        def pick(value: Any) -> Any:
            is_batched = isinstance(value, Tensor) and value.dim() > batch_dim
            if not is_batched or value.shape[batch_dim] != batch_size:
                return value
            return value.narrow(batch_dim, n, 1)

        loss = loss_fn(model, *map_leaves(pick, batch)).sum()
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return [
            torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
            for p, g in zip(parameters.values(), grads, strict=True)
        ]

    samples = [one(n) for n in range(batch_size)]
    return {
        name: torch.stack([sample[k] for sample in samples]) for k, name in enumerate(parameters)
    }


class _Applied(nn.Module):
    """Wraps a function as a module: its weights are parameters, its arguments with samples the input."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        samples: Sequence[int | str],
    ) -> None:
        super().__init__()
        self.function = function
        self.args: dict[int | str, Any] = dict(enumerate(args))
        self.args.update(kwargs)
        self.samples = samples
        self.weights = nn.ParameterDict()
        for key, value in self.args.items():
            if isinstance(value, Tensor) and value.requires_grad and key not in samples:
                self.weights[f"argument {key}"] = nn.Parameter(value.detach().clone())

    def forward(self, *inputs: Tensor) -> Any:
        given = dict(self.args)
        given.update(zip(self.samples, inputs, strict=True))
        for key in given:
            if f"argument {key}" in self.weights:
                given[key] = self.weights[f"argument {key}"]
            elif isinstance(given[key], Tensor) and key not in self.samples:
                given[key] = given[key].clone()  # some functions update buffers in place
        args = [value for key, value in given.items() if isinstance(key, int)]
        kwargs = {key: value for key, value in given.items() if isinstance(key, str)}
        return self.function(*args, **kwargs)


def check_rule(
    function: Callable[..., Any],
    *args: Any,
    samples: Sequence[int | str] = (0,),
    batch_dim: int = 0,
    dtype: torch.dtype = torch.float64,
    **kwargs: Any,
) -> None:
    """Checks the rule of `function` on one call of it; raises AssertionError if it is wrong.

    The arguments that require grad and carry no samples are the weights. The per-sample gradients of every
    non-empty set of weights, the others frozen, are compared with one backward a sample, for a sum and for a
    mean as the loss. The output and the gradient of the input are compared with those of the plain call.

    Args:
        function: the function whose rule is checked.
        args: its arguments.
        samples: positions or names of the arguments that carry samples.
        batch_dim: the dimension of the samples in those arguments and in the output.
        dtype: floating tensors are cast to it; the tolerance is 1e-9 of the largest element in
            float64 and 1e-4 in float32.
        kwargs: its keyword arguments.

    >>> import torch, torch.nn.functional as F
    >>> weight = torch.randn(3, 4, requires_grad=True)
    >>> check_rule(F.linear, torch.randn(5, 4), weight)
    """

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().to(dtype).requires_grad_(value.requires_grad)

    args, kwargs = map_leaves(cast, (args, kwargs))
    model = _Applied(function, args, kwargs, samples)
    if not model.weights:
        raise PergradError("check_rule needs an argument that requires grad and carries no samples")
    inputs = [model.args[key] for key in samples]
    with torch.no_grad():
        cotangent = torch.randn_like(model(*inputs))
    size = cotangent.shape[batch_dim]
    weights = list(model.weights)
    for count in range(1, len(weights) + 1):
        for chosen in itertools.combinations(weights, count):
            for name, weight in model.weights.items():
                weight.requires_grad_(name in chosen)
            expected = loop_grads(model, _weighted, *inputs, cotangent, batch_dim=batch_dim)
            for loss_reduction in ("sum", "mean"):
                _compare(model, inputs, cotangent, batch_dim, size, loss_reduction, expected)


def _weighted(model: nn.Module, *inputs_and_cotangent: Tensor) -> Tensor:
    *inputs, cotangent = inputs_and_cotangent
    return (model(*inputs) * cotangent).sum()


def _compare(
    model: _Applied,
    inputs: Sequence[Tensor],
    cotangent: Tensor,
    batch_dim: int,
    size: int,
    loss_reduction: Any,
    expected: Mapping[str, Tensor],
) -> None:
    def leaves() -> list[Tensor]:
        return [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]

    plain_inputs, own_inputs = leaves(), leaves()
    plain = model(*plain_inputs)
    call = call_for_per_sample_grads(
        model, batch_size=size, loss_reduction=loss_reduction, batch_first=batch_dim == 0
    )
    own = call(*own_inputs)
    scale = size if loss_reduction == "mean" else 1
    torch.autograd.backward((plain * cotangent).sum() / scale)
    for p in model.parameters():
        p.grad = None
    torch.autograd.backward((own * cotangent).sum() / scale)
    try:
        assert_near(own, plain, "output")
        for ours, theirs in zip(own_inputs, plain_inputs, strict=True):
            if theirs.grad is not None:
                assert_near(ours.grad, theirs.grad, "gradient of the input")
        for name, p in model.named_parameters():
            assert p.grad is None, f"{name} got an ordinary gradient"
            if p.requires_grad:
                assert_near(p.grad_sample, expected[name], f"{name}, {loss_reduction}")  # type: ignore[attr-defined]
            else:
                assert not hasattr(p, "grad_sample"), f"{name} is frozen but got a grad_sample"
    finally:
        for p in model.parameters():
            if hasattr(p, "grad_sample"):
                del p.grad_sample


def assert_near(actual: Tensor | None, expected: Tensor, what: str = "tensor") -> None:
    """Asserts equal shape and dtype, and no element off by more than the dtype's share of the largest one.

    >>> assert_near(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    """
    tolerance = tolerance_of_rule(expected.dtype)
    assert actual is not None, f"{what}: missing"
    assert_close(
        actual,
        expected,
        rtol=0,
        atol=tolerance * max(largest(expected), tolerance),
        msg=lambda text: f"{what}: {text}",
    )
