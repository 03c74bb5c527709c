"""EK-FAC: bases of Kronecker products and measured diagonals, for linear, convolution and table layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pergrad.errors import IndexingError
from tests.index.cases import built, data, flat_gradients, losses, network


def oracle(model: nn.Sequential, x: Tensor, y: Tensor, damping: float) -> Tensor:
    """Compute scores of all pairs by one backward pass for each sample, layer by layer."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    inputs: dict[nn.Module, Tensor] = {}
    outputs: dict[nn.Module, Tensor] = {}

    def keep(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        output.retain_grad()
        inputs[layer], outputs[layer] = given[0].detach(), output

    handles = [layer.register_forward_hook(keep) for layer in layers]
    losses(model, x, y).sum().backward()
    for handle in handles:
        handle.remove()
    scores = torch.zeros(len(x), len(x), dtype=x.dtype)
    for layer in layers:
        one = torch.ones(len(x), 1, dtype=x.dtype)
        given, g = torch.cat([inputs[layer], one], 1), outputs[layer].grad
        assert g is not None
        left, right = (torch.linalg.eigh(t.T @ t).eigenvectors for t in (g, given))
        rotated = torch.einsum("no,op,ni,ij->npj", g, left, given, right)
        diagonal = rotated.square().mean(0)
        solved = rotated / (diagonal + damping * diagonal.mean())
        scores += solved.flatten(1) @ rotated.flatten(1).T
    return scores


def test_scores_are_those_of_the_formula() -> None:
    model, (x, y) = network(), data().tensors
    index = built(model=model, preconditioner="ekfac", damping=0.3)
    torch.testing.assert_close(index.scores((x, y)), oracle(model, x, y, 0.3), rtol=1e-7, atol=1e-7)


def test_a_convolution_is_a_linear_layer_of_its_windows() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(0, 3, (12,))
    linear = nn.Linear(6, 3).double()
    wide = nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 3, 1).double(), nn.Flatten())
    with torch.no_grad():
        wide[1].weight.copy_(linear.weight[:, :, None, None])
        wide[1].bias.copy_(linear.bias)
    both = [
        built(model=m, dataset=TensorDataset(x, y), preconditioner="ekfac").scores((x, y))
        for m in (nn.Sequential(linear), wide)
    ]
    torch.testing.assert_close(*both, rtol=1e-8, atol=1e-9)


def test_tables_and_scales_have_preconditioners_too() -> None:
    torch.manual_seed(0)
    x, y = torch.randint(0, 7, (20, 4)), torch.randint(0, 3, (20,))
    model = nn.Sequential(
        nn.Embedding(7, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(20, 3)
    ).double()
    index = built(model=model, dataset=TensorDataset(x, y), preconditioner="ekfac", damping=1e9)
    g = flat_gradients(model, x, y)
    found = index.scores((x[:3], y[:3]))  # a huge damping leaves plain dots, layer by layer scaled
    assert found.shape == (3, 20)
    assert torch.isfinite(found).all()
    parts = dict(zip((n for n, _ in model.named_parameters()), _split(model, g), strict=True))
    expected = torch.zeros(3, 20, dtype=torch.float64)
    for names in (("0.weight",), ("1.weight",), ("1.bias",), ("3.weight", "3.bias")):
        part = torch.cat([parts[name] for name in names], 1)
        mean = part.square().sum(1).mean() / part.shape[1]
        expected += part[:3] @ part.T / (1e9 * mean)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-15)


def _split(model: nn.Module, flat: Tensor) -> tuple[Tensor, ...]:
    return flat.split([p.numel() for p in model.parameters()], 1)


def test_sampled_labels_do_not_depend_on_the_given_ones() -> None:
    x, y = data().tensors
    model = network()
    same = [
        built(
            model=model, dataset=TensorDataset(x, labels), preconditioner="ekfac", labels="sampled"
        )
        for labels in (y, (y + 1) % 3)
    ]
    states = [torch.load(i.path / "preconditioner" / "ekfac-sampled-0.pt") for i in same]
    for name, held in states[0].items():
        for key, tensor in held.items():
            torch.testing.assert_close(tensor, states[1][name][key])


def test_a_damping_of_zero_on_a_singular_product_is_refused() -> None:
    index = built(dataset=data(1), preconditioner="ekfac", damping=0.0)
    with pytest.raises(IndexingError, match="is singular with a damping of 0: pass a larger"):
        index.scores(data(3, seed=7).tensors)


def test_a_parameter_that_no_sample_moves_adds_nothing() -> None:
    model = network()
    with torch.no_grad():
        model[2].weight.zero_()  # no gradient comes below
    x, y = data(3, seed=7).tensors
    scores = built(model=model, preconditioner="ekfac").scores((x, y))
    assert scores.isfinite().all()
    assert scores.abs().max() > 0


def test_samples_that_are_not_finite_are_refused() -> None:
    x, y = data().tensors
    x[3] = float("nan")
    with pytest.raises(IndexingError, match="the gradients of some samples are not finite"):
        built(dataset=TensorDataset(x, y), preconditioner="ekfac")
