"""One step of an optimizer over several micro-batches: the mean of the clipped gradients of its samples."""

import importlib
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pergrad.errors import PergradError
from pergrad.integrations.stepping import SampleStep

torch.manual_seed(0)
X, Y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64)


def small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def gradients_of_samples(model: nn.Module) -> list[list[Tensor]]:
    found = []
    for x, y in zip(X, Y, strict=True):
        loss = F.mse_loss(model(x[None]), y[None])
        found.append(list(torch.autograd.grad(loss, list(model.parameters()))))
    return found


def norm(gradient: list[Tensor]) -> Tensor:
    return torch.stack([g.square().sum() for g in gradient]).sum().sqrt()


def step_over_pieces(model: nn.Module, step: SampleStep, sizes: list[int]) -> None:
    for x, y in zip(X.split(sizes), Y.split(sizes), strict=True):
        with step.recording(model):
            F.mse_loss(model(x), y).backward()
    step.finish()


@pytest.mark.parametrize("sizes", [[7], [4, 3], [1] * 7])
def test_gradient_is_the_mean_of_clipped_gradients_of_all_pieces(sizes: list[int]) -> None:
    model, bound = small_model(), 0.8
    each = gradients_of_samples(model)
    norms = torch.stack([norm(g) for g in each])
    assert 0 < (norms > bound).sum() < 7
    step = SampleStep(bound, noise_scale=True)
    step_over_pieces(model, step, sizes)
    for p, *parts in zip(model.parameters(), *each, strict=True):
        clipped = [(bound / n).clamp(max=1.0) * g for n, g in zip(norms, parts, strict=True)]
        torch.testing.assert_close(p.grad, torch.stack(clipped).mean(0))
    torch.testing.assert_close(step.norms, norms)
    assert step.metrics["sample_grad_norm_max"] == pytest.approx(float(norms.max()))
    assert step.metrics["clipped_fraction"] == pytest.approx(float((norms > bound).double().mean()))


def test_noise_scale_is_that_of_all_samples_of_the_step() -> None:
    model = small_model()
    rows = torch.stack(
        [torch.cat([g.flatten() for g in one]) for one in gradients_of_samples(model)]
    )
    trace = rows.var(0).sum()
    mean = rows.mean(0).square().sum() - trace / 7
    step = SampleStep(noise_scale=True)
    step_over_pieces(model, step, [2, 4, 1])
    assert step.metrics["noise_scale"] == pytest.approx(float(trace / mean))
    assert "clipped_fraction" not in step.metrics


def test_without_a_bound_grad_is_that_of_plain_training() -> None:
    model, plain = small_model(), small_model()
    step_over_pieces(model, SampleStep(), [4, 3])
    for x, y in zip(X.split([4, 3]), Y.split([4, 3]), strict=True):
        F.mse_loss(plain(x), y).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def test_second_step_has_its_own_samples_only() -> None:
    model, step = small_model(), SampleStep(1.0)
    step_over_pieces(model, step, [4, 3])
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    step_over_pieces(model, step, [7])
    torch.testing.assert_close([p.grad for p in model.parameters()], first)


def test_error_in_a_block_leaves_nothing_behind() -> None:
    model, step = small_model(), SampleStep(1.0)
    with step.recording(model):
        F.mse_loss(model(X), Y).backward()
    with pytest.raises(RuntimeError, match="shapes"), step.recording(model):
        model(X[:, 1:])
    assert not step.is_open
    assert not step.is_pending
    with pytest.raises(PergradError, match="nothing to step on"):
        step.finish()
    step_over_pieces(model, step, [7])
    assert step.norms is not None
    assert len(step.norms) == 7


def test_dropped_block_leaves_earlier_ones() -> None:
    model, step = small_model(), SampleStep(1.0)
    with step.recording(model):
        F.mse_loss(model(X[:4]), Y[:4]).backward()
    step.open(model)
    model(X)
    step.drop()
    with step.recording(model):
        F.mse_loss(model(X[4:]), Y[4:]).backward()
    step.finish()
    assert step.norms is not None
    assert len(step.norms) == 7


@pytest.mark.parametrize("name", ["accelerate", "hf", "lightning"])
def test_missing_package_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = "transformers" if name == "hf" else name
    for gone in (package, "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, gone, None)
    monkeypatch.delitem(sys.modules, f"pergrad.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"needs {package} .*pergrad\[integrations\]"):
        importlib.import_module(f"pergrad.integrations.{name}")


def test_blocks_do_not_nest() -> None:
    model, step = small_model(), SampleStep(1.0)
    with pytest.raises(PergradError, match="recorded already"), step.recording(model):
        step.open(model)
    assert not step.is_open
    with pytest.raises(PergradError, match="no micro-batch"):
        step.close()
