"""A compiled step keeps little for its backward, and its numbers are the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.inductor_prims import force_stride_order
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import pergrad
from pergrad.engine.compiling.passes import activation_memory
from pergrad.engine.compiling.passes.graph import calls
from tests.engine.rewritten import rewritten

_CAST, _SIGNS = torch.ops.aten._to_copy.default, torch.ops.aten.threshold_backward.default


def test_what_is_cast_twice_is_cast_once() -> None:
    def step(x: Tensor) -> list[Tensor]:
        y = x + 1
        return [y.bfloat16() * 2, y.detach().bfloat16() * 3, y.half() * 4]

    graph, x = rewritten(activation_memory.keep_less, step, torch.randn(5)), torch.randn(5)
    assert len(calls(graph.graph, _CAST)) == 2
    assert all(map(torch.equal, graph(x), step(x)))


def test_results_share_no_memory() -> None:
    def step(x: Tensor) -> list[Tensor]:
        y = x + 1
        return [y.bfloat16(), y.bfloat16().view(5, 1)]

    one, other = rewritten(activation_memory.keep_less, step, torch.randn(5))(torch.randn(5))
    one.zero_()
    assert other.any()


def test_what_was_written_to_between_two_casts_is_cast_twice() -> None:
    def step(x: Tensor) -> list[Tensor]:
        y = x + 1
        before = y.bfloat16() * 2
        y.add_(1)
        return [before, y.bfloat16() * 2]

    graph, x = rewritten(activation_memory.keep_less, step, torch.randn(5)), torch.randn(5)
    assert all(map(torch.equal, graph(x), step(x)))


def _through_relu(dtype: torch.dtype):
    def step(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = F.relu(x)
        (gradient,) = torch.autograd.grad((y.to(dtype).float() * y).sum(), x)
        return [gradient]

    return step


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
    ids=["bfloat16", "float16, which ends at 6e-8"],
)
def test_a_relus_backward_looks_at_a_copy_that_has_the_same_signs(
    dtype: torch.dtype, expected: torch.dtype
) -> None:
    x = torch.tensor([-1.0, -1e-30, 0.0, 1e-30, 1.0])
    graph = rewritten(activation_memory.keep_less, _through_relu(dtype), x)
    (node,) = calls(graph.graph, _SIGNS)
    assert node.args[1].meta["val"].dtype is expected
    assert torch.equal(*graph(x), *_through_relu(dtype)(x))


def _normed(x: Tensor, weight: Tensor) -> list[Tensor]:
    weight = weight.detach().requires_grad_()
    x = x + x.sin()
    y = F.layer_norm(x, (4,), weight)
    return [*torch.autograd.grad((y * x).sum(), weight)]


@pytest.mark.parametrize("is_on_gpu", [True, False])
def test_sums_that_layer_norms_read_are_written_on_a_gpu(
    is_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_memory, "is_on_gpu", lambda node: is_on_gpu)
    inputs = torch.randn(3, 4), torch.randn(4)
    graph = rewritten(activation_memory.keep_less, _normed, *inputs)
    assert len(calls(graph.graph, force_stride_order)) == is_on_gpu
    assert torch.equal(*graph(*inputs), *_normed(*inputs))


def _channels_first(x: Tensor, weight: Tensor) -> list[Tensor]:
    """ViTDet's end: a sum in the order of an image, normalised, and viewed in that order."""
    last = (x + 1).permute(0, 2, 3, 1)
    total = last + last.sin()
    return [F.layer_norm(total, (4,), weight), (total + 1).permute(0, 3, 1, 2).view(3, 8, 5)]


def test_sums_keep_the_strides_that_a_view_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_memory, "is_on_gpu", lambda node: True)
    inputs = torch.randn(3, 4, 5, 2), torch.randn(4)
    graph = rewritten(activation_memory.keep_less, _channels_first, *inputs)
    assert len(calls(graph.graph, force_stride_order)) == 1
    FakeTensorProp(graph).propagate(*inputs)  # an error where a view has other strides
    for found, expected in zip(graph(*inputs), _channels_first(*inputs), strict=True):
        assert torch.equal(found, expected)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(8), nn.Linear(8, 8)
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x + x.sin())
        return x + self.third(F.relu(self.first(y) * self.second(y)).float())


def test_a_compiled_step_gives_what_it_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_memory, "is_on_gpu", lambda node: True)
    torch.manual_seed(0)
    model, x = _Block(), torch.randn(3, 5, 8)
    norms = pergrad.Norms()
    step = pergrad.compiled(model, lambda model, x: model(x).square().sum((1, 2)), norms)
    step(x)
    expected = norms.result.clone()
    step(x)
    assert step.graphs == 1
    torch.testing.assert_close(norms.result, expected)
