"""Quantities of complex parameters are those of their real and imaginary parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pergrad
from pergrad.factors import Dense
from pergrad.reductions.complex_gradients import ComplexGradients, gradients_of
from pergrad.testing import assert_near, loop_grads

COMPLEX = torch.complex128


class Model(nn.Module):
    """Complex and real parameters, used in the way that a test asks for; `unused` gets no gradient."""

    def __init__(self, use: Callable[["Model", Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        real = dtype.to_real()
        self.linear = nn.Linear(4, 4, dtype=dtype)
        self.conv = nn.Conv1d(1, 2, 2, dtype=dtype)
        self.v = nn.Parameter(torch.randn(4, dtype=dtype))
        self.table = nn.Parameter(torch.randn(6, 4, dtype=dtype))
        self.unused = nn.Parameter(torch.randn(2, dtype=dtype))
        self.scalar = nn.Parameter(torch.randn((), dtype=dtype))
        self.real = nn.Linear(4, 4, dtype=real)
        self.use, self.dtype = use, dtype

    def forward(self, x: Tensor) -> Tensor:
        out = self.use(self, x.to(self.dtype))
        return torch.view_as_real(out).flatten(1) if out.is_complex() else out.flatten(1)


USES: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "linear": lambda m, x: m.linear(m.linear(x).tanh()),
    "convolution": lambda m, x: m.conv(x.unsqueeze(1)),
    "broadcast": lambda m, x: x * m.v + m.v.conj() * m.scalar,
    "matmul": lambda m, x: x @ m.table.mH @ m.table,
    "einsum": lambda m, x: torch.einsum("ni,oi->no", x, m.table.conj()),
    "derived": lambda m, x: F.linear(x, m.table.exp() * m.v.abs(), None),
    "rows": lambda m, x: m.table[x.real.argmax(1)] * x,
    "parts of a weight": lambda m, x: x.real * m.v.real + torch.view_as_real(m.v)[:, 1],
    "real weight, complex samples": lambda m, x: (
        F.linear(x, m.real.weight.to(m.dtype)) * m.real.bias
    ),
    "modulus": lambda m, x: m.real(m.linear(x).abs()),
    "spectrum": lambda m, x: torch.fft.ifft(torch.fft.fft(x) * m.v),
    "from parts": lambda m, x: torch.complex(m.real(x.real), x.imag) * m.v,
}


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return ((model(x) + 0.5) ** 2).sum(1)


def made(name: str, dtype: torch.dtype = COMPLEX) -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(USES[name], dtype), torch.randn(5, 4, dtype=dtype)


def parts(t: Tensor) -> Tensor:
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def near(actual: Tensor, expected: Tensor, what: str = "tensor") -> None:
    assert actual.dtype == expected.dtype
    assert_near(parts(actual), parts(expected), what)


def flat(grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([parts(g).reshape(len(g), -1) for g in grads.values()], 1)


def recorded(model: nn.Module, x: Tensor, *quantities: Any) -> Any:
    with pergrad.record(model, *quantities):
        losses(model, x).sum().backward()
    return quantities[0] if len(quantities) == 1 else quantities


@pytest.mark.parametrize("name", USES)
def test_every_quantity_is_that_of_the_loop(name: str) -> None:
    model, x = made(name)
    each = loop_grads(model, losses, x)
    rows = flat(each)
    lengths = rows.norm(dim=1)
    direction = {key: g[0] + g[1] for key, g in each.items()}
    bound = float(lengths.median())
    clips = [pergrad.ClippedSum(bound, memory=memory) for memory in ("kept", "low", "high")]
    grads, norms, moment, variance, dots, gram, against, noise, *sums = recorded(
        *(model, x, pergrad.Grads(), pergrad.Norms(), pergrad.SecondMoment(), pergrad.Variance()),
        *(pergrad.Dots(direction), pergrad.Gram(), pergrad.Gram(each), pergrad.NoiseScale()),
        *(clips[0], clips[2]),
    )
    sums.append(recorded(model, x, clips[1]))
    near(norms.result, lengths)
    near(dots.result, rows @ (rows[0] + rows[1]))
    near(gram.result, rows @ rows.T)
    near(against.result, rows @ rows.T)
    weights = (bound / lengths).clamp(max=1)
    for key, g in each.items():
        near(grads.result[key], g, key)
        near(norms.per_param[key], parts(g).reshape(5, -1).norm(dim=1), key)
        near(moment.result[key], g.abs().square().sum(0), key)
        near(variance.mean[key], g.mean(0), key)
        near(variance.result[key], (g - g.mean(0)).abs().square().sum(0) / 4, key)
        for found in sums:
            near(found.norms, lengths)
            near(found.result[key], torch.einsum("n,n...->...", weights.to(g.dtype), g), key)
    mean = rows.mean(0).square().sum()
    trace = (rows.square().sum() - 5 * mean) / 4
    near(torch.tensor(noise.trace, dtype=torch.float64), trace)
    near(torch.tensor(noise.squared_mean, dtype=torch.float64), mean - trace / 5)


@pytest.mark.parametrize("method", ["count", "two_sided"])
def test_sketches_are_linear_and_keep_inner_products(method: Any) -> None:
    model, x = made("linear")
    rows = flat(loop_grads(model, losses, x))
    found = recorded(model, x, pergrad.Projection(4096, method=method)).result
    again = pergrad.Projection(4096, method=method)
    with pergrad.record(model, again, sample_weights=torch.full((5,), 2.0, dtype=torch.float64)):
        losses(model, x).sum().backward()
    near(again.result, 2 * found)
    scale = rows.norm(dim=1)[:, None] * rows.norm(dim=1)
    assert ((found @ found.T - rows @ rows.T) / scale).abs().max() < 0.15


def test_scaled_batches_are_joined() -> None:
    model, x = made("modulus")
    whole = recorded(model, x, pergrad.Variance(), pergrad.NoiseScale(), pergrad.SecondMoment())
    parts_of = [
        recorded(model, half, pergrad.Variance(), pergrad.NoiseScale(), pergrad.SecondMoment())
        for half in (x[:2], x[2:])
    ]
    for all_of, first, second in zip(whole, *parts_of, strict=True):
        first += second
        if isinstance(all_of.result, float):
            assert first.result == pytest.approx(all_of.result)
        else:
            for key, value in all_of.result.items():
                near(first.result[key], value, key)


@pytest.mark.parametrize("name", ["linear", "modulus", "derived", "broadcast"])
def test_complex64_compiled_steps_and_the_contract_agree_with_the_loop(name: str) -> None:
    model, x = made(name, torch.complex64)
    each = loop_grads(model, losses, x)
    grads, clipped = pergrad.Grads(), pergrad.ClippedSum(1e6)
    step = pergrad.compiled(model, losses, grads, clipped, backend="eager")
    for _ in range(3):
        step(x)
    losses(pergrad.call_for_per_sample_grads(model), x).sum().backward()  # type: ignore[arg-type]
    clipped.assign()
    for key, p in model.named_parameters():
        near(grads.result[key], each[key], key)
        assert clipped.result[key].dtype == p.dtype
        assert p.grad is not None
        near(p.grad, each[key].sum(0), key)
        if hasattr(p, "grad_sample"):
            near(p.grad_sample, each[key], key)


def test_a_real_parameter_gets_the_real_part() -> None:
    gradients = torch.randn(3, 2, dtype=COMPLEX)
    found = gradients_of(torch.zeros(2, dtype=torch.float64), [Dense(gradients)], 2.0, 2**20)
    near(found.materialize(), 2 * gradients.real)


def test_conjugate_views_and_several_uses_are_added() -> None:
    a, b = torch.randn(3, 2, dtype=COMPLEX), torch.randn(3, 2, dtype=COMPLEX)
    found = ComplexGradients([Dense(a.conj()), Dense(b)], bound=2**20)
    near(found.materialize(), a.conj() + b)
    near(found.squared_norms(), (a.conj() + b).abs().square().sum(1))
