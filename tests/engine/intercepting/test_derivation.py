"""Weights computed from weights, tied, shared and repeated over the batch, against the loop."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

import pergrad
from pergrad.errors import UnsupportedFunctionError
from pergrad.testing import loop_grads
from tests.engine.exactness import Case, Formula, assert_exact, numbers, of

# A batch of 4 has the size of every other dimension.
T = D = 4

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")


SEQUENCE, VECTOR = of((T, D)), of((D,))


def formula(
    function: Callable[..., Any],
    batch: Callable[[int], tuple[Tensor, ...]] = SEQUENCE,
    **shapes: tuple[int, ...],
) -> Case:
    """A function of a module with random parameters of the given shapes."""
    return Case(
        lambda: Formula(function, **{name: numbers(*shape) for name, shape in shapes.items()}),
        batch,
    )


def with_parts(
    function: Callable[..., Any],
    parts: Callable[[], dict[str, nn.Module]],
    batch: Callable[[int], tuple[Tensor, ...]] = SEQUENCE,
) -> Case:
    return Case(lambda: Formula(function, **parts()).double(), batch)


def through(x: Tensor, *weights: Tensor) -> Tensor:
    """x through linear maps with a bend between."""
    for weight in weights:
        x = F.linear(x, weight).tanh()
    return x


W = (D, D)
VIEWS = {
    "view": formula(lambda m, x: F.linear(x, m.w.view(D, D)), w=(D * D,)),
    "reshape, flatten": formula(lambda m, x: F.linear(x, m.w.flatten().reshape(3, D)), w=(3, D)),
    "unflatten": formula(lambda m, x: F.linear(x, m.w.unflatten(0, (3, D))), w=(12,)),
    "slice": formula(lambda m, x: through(x, m.w[:D], m.w[2:]), w=(6, D)),
    "strided slice": formula(lambda m, x: F.linear(x, m.w[::2, 1:]), w=(6, 5)),
    "one row": formula(lambda m, x: x * m.w[1], w=W),
    "one element": formula(lambda m, x: x * m.w[1, 2] + m.w[-1, -1], w=W),
    "select, narrow": formula(lambda m, x: through(x, m.w.select(0, 1).narrow(0, 1, 3)), w=(2, *W)),
    "rows by index": formula(lambda m, x: F.linear(x, m.w[[2, 0, 0]]), w=W),
    "rows by mask": formula(lambda m, x: F.linear(x, m.w[m.w.detach()[:, 0] > -9]), w=W),
    "transpose": formula(lambda m, x: F.linear(x, m.w.t()), w=(D, 3)),
    "T, mT": formula(lambda m, x: x @ m.w.T + x @ m.w.mT, w=W),
    "transpose of a square": formula(lambda m, x: F.linear(x, m.w.transpose(0, 1)), w=W),
    "transpose of a transpose": formula(lambda m, x: F.linear(x, m.w.t().t()), w=(3, D)),
    "permute": formula(lambda m, x: F.linear(x, m.w.permute(2, 0, 1).flatten(0, 1)), w=(3, D, D)),
    "both sides": formula(lambda m, x: x @ m.w @ m.w.t() + F.linear(x, m.w), w=W),
    "movedim, squeeze": formula(
        lambda m, x: F.linear(x, m.w.unsqueeze(0).movedim(1, 2).squeeze(0)), w=(D, 3)
    ),
    "expanded": formula(lambda m, x: F.linear(x, m.w.expand(3, D)), w=(1, D)),
    "expand_as": formula(lambda m, x: x + m.w.expand_as(x), w=(1, D)),
    "cast to a tensor's type": formula(
        lambda m, x: torch.bmm(m.w.to(x).unsqueeze(0), m.v.type_as(x).unsqueeze(0))[0] * x,
        w=W,
        v=W,
    ),
    "cast to a weight's type": formula(
        lambda m, x: F.linear(x.to(m.w), m.w.to(tensor=x)) + x.type_as(m.w), w=W
    ),
    "sparse": formula(
        lambda m, x: F.linear(
            x,
            torch.sparse_coo_tensor(
                torch.tensor([[0, 2, 1], [1, 1, 3]]), m.w, W, check_invariants=True
            ).to_dense(),
        ),
        w=(3,),
    ),
    "rows of an index expanded to the batch": formula(
        lambda m, x: torch.cat(
            [
                F.embedding(torch.arange(3).expand(x.shape[0], -1)[:1], m.w).repeat(len(x), 1, 1),
                F.embedding(torch.arange(3).repeat(x.shape[0], 1)[:1], m.w).repeat(len(x), 1, 1),
                x,
            ],
            1,
        ),
        w=(3, D),
    ),
    "chunk of a fused weight": formula(
        lambda m, x: sum(through(x, w) for w in m.w.chunk(3)), w=(3 * D, D)
    ),
    "split of a fused weight": formula(
        lambda m, x: torch.cat([F.linear(x, w) for w in m.w.split([D, 2, 3])], -1), w=(9, D)
    ),
    "unbind": formula(lambda m, x: through(x, *m.w.unbind(0)), w=(3, *W)),
    "iteration": formula(lambda m, x: through(x, *m.w), w=(2, *W)),
    "one half unused": formula(lambda m, x: through(x, m.w.chunk(2)[0]), w=(6, D)),
    "stack, cat": formula(
        lambda m, x: F.linear(x, torch.cat([m.a, m.b])) @ torch.stack([m.c, m.c, m.c]),
        a=(2, D),
        b=(1, D),
        c=(D,),
    ),
    "diag, tril": formula(lambda m, x: F.linear(x, torch.diag(m.d) + m.w.tril()), d=(D,), w=W),
    "float": formula(lambda m, x: F.linear(x, m.w.double()), w=W),
    "there and back": formula(lambda m, x: F.linear(x, m.w.to(torch.float64).contiguous()), w=W),
    "contiguous transpose": formula(lambda m, x: F.linear(x, m.w.t().contiguous()), w=(D, 3)),
    "bias from a row": formula(lambda m, x: F.linear(x, m.w[:, :D], m.w[:, D]), w=(3, D + 1)),
    "convolution of a slice": formula(
        lambda m, x: F.conv1d(x, m.w[:, :D], m.w[:, -1, 0], padding=1), w=(3, D + 1, 3)
    ),
}

COMPUTED = {
    "scaled": formula(lambda m, x: F.linear(x, m.w * m.s / 3), w=W, s=()),
    "softmax": formula(lambda m, x: x @ m.w.softmax(0), w=W),
    "mixture of layers": formula(
        lambda m, x: sum(s * x**k for k, s in enumerate(m.s.softmax(0), 1)), s=(3,)
    ),
    "exp": formula(lambda m, x: x * m.log.exp() + F.softplus(m.log), log=(D,)),
    "A of a state space": formula(
        lambda m, x: torch.exp(x.sigmoid().unsqueeze(-1) * -torch.exp(m.log)), log=(D, 3)
    ),
    "normalised": formula(lambda m, x: F.linear(F.normalize(x, dim=-1), F.normalize(m.w)), w=W),
    "one plus weight": formula(lambda m, x: x * (1 + m.w), w=(D,)),
    "inverse": formula(
        lambda m, x: F.linear(x, torch.linalg.inv(m.w + 5 * torch.eye(D, dtype=x.dtype))), w=W
    ),
    "LoRA merged": formula(
        lambda m, x: F.linear(x, m.w + 0.5 * m.b @ m.a), w=(3, D), a=(2, D), b=(3, 2)
    ),
    "LoRA apart": formula(
        lambda m, x: F.linear(x, m.w) + 0.5 * F.linear(F.linear(x, m.a), m.b),
        w=(3, D),
        a=(2, D),
        b=(3, 2),
    ),
    "DoRA": formula(
        lambda m, x: (
            F.linear(x, m.g * (v := m.w + m.b @ m.a) / v.norm(dim=1, keepdim=True))
            + F.linear(x, v / v.detach().norm(dim=1, keepdim=True))
        ),  # as PEFT does
        w=(3, D),
        a=(2, D),
        b=(3, 2),
        g=(3, 1),
    ),
    "low rank by einsum": formula(
        lambda m, x: x @ torch.einsum("ir,ro->io", m.a, m.b), a=(D, 2), b=(2, 3)
    ),
    "Kronecker": formula(lambda m, x: x @ torch.kron(m.a, m.b), a=(2, 2), b=(2, 2)),
    "chain of three": formula(lambda m, x: x @ (m.w @ m.w @ m.w).tanh(), w=W),
    "diamond": formula(lambda m, x: through(x, u := m.w.tanh(), u * 2, u.t()), w=W),
    "penalised by max": formula(lambda m, x: x * m.w.amax() + m.w.sum() + m.w.mean(0), w=W),
    "standardised convolution": formula(
        lambda m, x: F.conv1d(
            x, (m.w - m.w.mean((1, 2), keepdim=True)) / m.w.std((1, 2), keepdim=True)
        ),
        w=(3, D, 2),
    ),
    "quantised, straight through": formula(
        lambda m, x: F.linear(x, m.w + (m.w.round() - m.w).detach()), w=W
    ),
    "masked": formula(lambda m, x: F.linear(x, m.w * torch.ones(D, D).tril()), w=W),
    "masked_fill": formula(
        lambda m, x: F.linear(x, m.w.masked_fill(torch.eye(D, dtype=torch.bool), 0.0)), w=W
    ),
    "hypernetwork": formula(
        lambda m, x: F.linear(x, F.linear(m.code, m.w).view(3, D)), code=(2,), w=(3 * D, 2)
    ),
    "complex rotation": formula(
        lambda m, x: torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(m.r.exp(), m.a)
        ).flatten(-2),
        r=(2,),
        a=(2,),
    ),
}


def into_zeros(m: Any, x: Tensor) -> Tensor:
    table = torch.zeros(T, D, dtype=x.dtype)
    table[1] = m.w
    table[2:] = 2 * m.w
    return x + table


def into_buffer(m: Any, x: Tensor) -> Tensor:
    table = x.new_zeros(T, D)
    table.copy_(m.w)
    table.mul_(2)
    return x + table


def add_into(m: Any, x: Tensor) -> Tensor:
    table = torch.zeros(T, D, dtype=x.dtype)
    table += m.w
    return x * table.index_add_(0, torch.tensor([0, 2]), m.w[:2])


def toeplitz(m: Any, x: Tensor) -> Tensor:
    """Relative positions: a bias for each distance, for two heads."""
    distance = torch.arange(T)[:, None] - torch.arange(T)[None] + T - 1
    bias = m.w[distance].permute(2, 0, 1)
    return (x.unsqueeze(1) @ x.unsqueeze(1).mT + bias).softmax(-1)


def buckets(m: Any, x: Tensor) -> Tensor:
    """As in T5: an embedding of the bucket of each distance."""
    distance = (
        (torch.arange(x.shape[1])[:, None] - torch.arange(x.size(1))[None]).abs().clamp(max=2)
    )
    bias = F.embedding(distance, m.w).permute(2, 0, 1).unsqueeze(0)
    return (x @ x.mT).unsqueeze(1) + bias


POSITIONS = {
    "broadcast": formula(lambda m, x: x + m.w, w=(1, T, D)),
    "cut to length": formula(lambda m, x: x + m.w[:, : x.shape[1]], w=(1, 9, D)),
    "without batch": formula(lambda m, x: x + m.w[: x.size(1)], w=(9, D)),
    "one index for all": formula(
        lambda m, x: x + F.embedding(torch.arange(x.shape[1]).unsqueeze(0), m.w), w=(9, D)
    ),
    "index expanded": formula(
        lambda m, x: x + F.embedding(torch.arange(T).expand(x.shape[0], -1), m.w), w=(9, D)
    ),
    "own index": formula(lambda m, x: x + m.w[torch.arange(x.shape[1])], w=(9, D)),
    "rows and columns": formula(
        lambda m, x: x + (m.r[:, None] + m.c[None]).flatten(0, 1), r=(2, D), c=(2, D)
    ),
    "interpolated": formula(
        lambda m, x: x + F.interpolate(m.w, T, mode="linear").transpose(1, 2), w=(1, D, 3)
    ),
    "relative distances": formula(toeplitz, w=(2 * T - 1, 2)),
    "relative buckets": formula(buckets, w=(3, 2)),
    "written into zeros": formula(into_zeros, w=(D,)),
    "copied into zeros": formula(into_buffer, w=(T, D)),
    "added into zeros": formula(add_into, w=(T, D)),
}


def with_token(repeat: Callable[[Tensor, Tensor], Tensor], rows: int = 1) -> Case:
    return formula(
        lambda m, x: through(torch.cat([repeat(m.w, x), x], 1), m.v), w=(1, rows, D), v=W
    )


def recurrence(m: Any, x: Tensor) -> Tensor:
    """A learned initial state."""
    state = m.w.expand(x.shape[0], -1)
    for step in x.unbind(1):
        state = torch.tanh(F.linear(state, m.v) + step)
    return state


TOKENS = {
    "expand, x.shape[0]": with_token(lambda w, x: w.expand(x.shape[0], -1, -1)),
    "expand, x.size(0)": with_token(lambda w, x: w.expand(x.size(0), 1, D)),
    "expand, len(x)": with_token(lambda w, x: w.expand(len(x), -1, -1)),
    "expand, x.size()": with_token(lambda w, x: w.expand(x.size()), T),
    "expand, unpacked": with_token(lambda w, x: w.expand((lambda b, t, d: b)(*x.shape), -1, -1)),
    "expand, a list": with_token(lambda w, x: w.expand([x.shape[0], 2, D]), 2),
    "expand_as": with_token(lambda w, x: w.expand_as(x), T),
    "repeat": with_token(lambda w, x: w.repeat(x.size(0), 1, 1), 2),
    "tile": with_token(lambda w, x: torch.tile(w, (len(x), 1, 1)), T),
    "repeat_interleave": with_token(lambda w, x: w.repeat_interleave(x.shape[0], 0), 2),
    "broadcast_to": with_token(lambda w, x: torch.broadcast_to(w, (x.shape[0], 2, D)), 2),
    "unsqueeze, repeat": with_token(lambda w, x: w[0].unsqueeze(0).repeat(len(x), 1, 1), T),
    "stacked copies": with_token(lambda w, x: torch.cat([w] * x.shape[0]), 2),
    "derived": with_token(lambda w, x: (2 * w).tanh().expand(x.shape[0], -1, -1)),
    "zeros plus": with_token(lambda w, x: torch.zeros_like(x[:, :1]) + w),
    "initial state": formula(recurrence, w=(D,), v=W),
    "queries as folded rows": formula(
        lambda m, x: through(m.w.repeat(x.shape[0], 1), m.v).view(x.shape[0], T, D) * x,
        w=(T, D),
        v=W,
    ),
    "masked by learned token": formula(
        lambda m, x: torch.where((x[..., :1] > 0), m.w.expand(x.shape[0], T, -1), x), w=(1, 1, D)
    ),
}


def converged(module: nn.Module) -> nn.Module:
    """Power iterations no longer move anything, so that the loop sees the same weight each time."""
    module.double()
    for _ in range(500):
        module(numbers(2, D))
    return module


class Mirrored(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return (weight + 2 * weight.flip(0)).tanh()


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrized(*parametrizations: nn.Module) -> nn.Module:
    module = nn.Linear(D, D)
    for parametrization in parametrizations:
        parametrize.register_parametrization(module, "weight", parametrization, unsafe=True)
    return module


def linear(out: int = 3) -> nn.Linear:
    return nn.Linear(D, out)


PARAMETRIZED = {
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "weight_norm, dim None": lambda: parametrizations.weight_norm(linear(), dim=None),
    "weight_norm of a convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), parametrizations.weight_norm(nn.Conv1d(2, 3, 2))
    ),
    "spectral_norm, eval": lambda: parametrizations.spectral_norm(linear()).eval(),
    "spectral_norm, train": lambda: converged(parametrizations.spectral_norm(linear())),
    "orthogonal, matrix_exp": lambda: parametrizations.orthogonal(
        linear(), orthogonal_map="matrix_exp"
    ),
    "orthogonal, cayley": lambda: parametrizations.orthogonal(linear(D), orthogonal_map="cayley"),
    "orthogonal, householder": lambda: parametrizations.orthogonal(
        linear(), orthogonal_map="householder"
    ),
    "old weight_norm": lambda: old_weight_norm(linear()),
    "old spectral_norm, train": lambda: converged(old_spectral_norm(linear())),
    "old spectral_norm, eval": lambda: converged(old_spectral_norm(linear())).eval(),
    "own": lambda: parametrized(Symmetric()),
    "two": lambda: parametrized(Symmetric(), Mirrored()),
    "bias": lambda: parametrize.register_parametrization(linear(), "bias", nn.Softmax(0)),
}


def tie(first: nn.Module, second: nn.Module) -> dict[str, nn.Module]:
    second.weight = first.weight
    return {"a": first, "b": second}


class Cached(nn.Module):
    """The weight is computed once a forward and used by several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.weight_norm(nn.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.inner(self.inner(x).tanh())


SHARED = {
    "one layer twice": with_parts(lambda m, x: m.a(m.a(x).tanh()), lambda: {"a": linear(D)}),
    "one layer over time": with_parts(
        lambda m, x: sum(m.a(x[:, t]) ** 2 for t in range(T)), lambda: {"a": linear()}
    ),
    "tied linears": with_parts(lambda m, x: m.b(m.a(x).tanh()), lambda: tie(linear(D), linear(D))),
    "tied embedding and head": with_parts(
        lambda m, i: m.b(m.a(i).tanh()),
        lambda: tie(nn.Embedding(7, D), nn.Linear(D, 7)),
        lambda size: (torch.randint(7, (size, T)),),
    ),
    "tied by transpose": with_parts(
        lambda m, x: F.linear(m.a(x).tanh(), m.a.weight.t()), lambda: {"a": linear()}
    ),
    "linear and convolution": formula(
        lambda m, x: F.conv1d(x, m.w.unsqueeze(-1)) + F.linear(x, m.w), w=W
    ),
    "whole and slice": formula(lambda m, x: through(x, m.w, m.w[:2]), w=W),
    "cached parametrization": Case(Cached, SEQUENCE),
    "ParameterList": with_parts(
        lambda m, x: through(x, *m.ws) * m.ws[0].sum(),
        lambda: {"ws": nn.ParameterList([numbers(D, D), numbers(3, D)])},
    ),
    "ParameterList in a loop": with_parts(
        lambda m, x: sum(x * w for w in m.ws),
        lambda: {"ws": nn.ParameterList(numbers(D) for _ in range(3))},
    ),
    "ParameterDict": with_parts(
        lambda m, x: F.linear(x, m.ws["w"], m.ws["b"]),
        lambda: {"ws": nn.ParameterDict({"w": numbers(3, D), "b": numbers(3)})},
    ),
    "functional_call": with_parts(
        lambda m, x: torch.func.functional_call(
            m.a, {"weight": m.a.weight * 2, "bias": m.a.bias}, x
        ),
        lambda: {"a": linear()},
    ),
}

GROUPS: dict[str, dict[str, Case]] = {
    "view": VIEWS,
    "computed": COMPUTED,
    "position": POSITIONS,
    "token": TOKENS,
    "parametrized": {name: Case(build, VECTOR) for name, build in PARAMETRIZED.items()},
    "shared": SHARED,
}
CASES = {f"{group}: {name}": case for group, own in GROUPS.items() for name, case in own.items()}


# torch 2.11 warns so once even where `check_invariants` is given.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("size", [T, 3, 1])
@pytest.mark.parametrize("name", CASES)
def test_per_sample_gradients_are_those_of_the_loop(name: str, size: int) -> None:
    assert_exact(CASES[name], size)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ w,
        lambda x, w: F.linear(x, w.t()),
        lambda x, w: F.linear(x, w.T),
        lambda x, w: F.linear(x, w.mT),
        lambda x, w: F.linear(x, w.transpose(-1, 0)),
        lambda x, w: F.linear(x, w.t().contiguous()),
    ],
)
def test_the_gradients_of_a_transposed_matrix_stay_outer_products(
    product: Callable[[Tensor, Tensor], Tensor],
) -> None:
    model = Formula(lambda m, x: product(x, m.w), w=numbers(D, 3))
    x = numbers(5, T, D)
    (row,) = pergrad.explain(model, lambda model, x: model(x).square().sum((1, 2)), x).rows
    assert row.factors == ("OuterProduct",)


REARRANGED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a view": lambda m, x: F.linear(x, m.w.view(2, 2, 4).reshape(4, 4)),
    "a permutation": lambda m, x: F.linear(
        x, m.w.view(4, 2, 2).permute(2, 0, 1).reshape(2, 8)[:, :4]
    ),
    "dimensions of one": lambda m, x: F.linear(x, m.w[None].squeeze(0).unsqueeze(-1).flatten(1)),
    "moved dimensions": lambda m, x: F.linear(x, m.w.movedim(0, 1)) * m.v.view(1, 4),
    "the same weight in two shapes": lambda m, x: x * m.v.view(4, 1)[:, 0] * m.v.view(1, 4)[0],
}
SCALED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a mask": lambda m, x: F.linear(x, m.w * torch.ones(4, 4, dtype=x.dtype).tril()),
    "a mask of booleans": lambda m, x: F.linear(x, torch.ones(4, 4).tril().bool() * m.w),
    "a number": lambda m, x: F.linear(x, m.w * 0.5, 2 * m.v),
    "a column, transposed": lambda m, x: x @ (m.w * torch.arange(1.0, 5).double()[:, None]),
    "a number without dimensions": lambda m, x: x * (torch.tensor(3.0).double() * m.v),
    "a larger constant": lambda m, x: F.linear(x, m.v * torch.ones(4, 4, dtype=x.dtype)),
    "another weight": lambda m, x: F.linear(x, m.w * m.v),
}


def _attended(m: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Adds a bias of relative positions, a row for each distance, to the scores of 9 positions."""
    distance = (torch.arange(9)[:, None] - torch.arange(9)[None]).abs()
    bias = F.embedding(distance.clamp(max=3), m.w).permute(2, 0, 1).unsqueeze(0)
    if mask is not None:
        bias = bias.masked_fill(mask.logical_not(), -torch.inf)
    scores = x[:, :, None, None] * torch.linspace(-1, 1, 81, dtype=x.dtype).view(9, 9)
    return (scores + bias).softmax(-1)[..., ::2].square().sum((2, 3))


TRIL = torch.ones(4, 4).tril().bool()
MASKED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "filled": lambda m, x: F.linear(x, m.w.masked_fill(TRIL, 2)),
    "filled with infinity": lambda m, x: (
        x @ torch.masked_fill(m.w, TRIL[:1], -torch.inf).softmax(1)
    ),
    "kept": lambda m, x: F.linear(x, torch.where(TRIL, m.w, 0.0)),
    "kept by its method": lambda m, x: F.linear(x, m.w.where(TRIL[0], 0)).relu() * m.v,
    "kept in another weight": lambda m, x: F.linear(x, torch.where(TRIL, m.w, m.v)),
    "kept, and larger": lambda m, x: F.linear(x, torch.where(TRIL, m.v, 0.5)),
    "a view, kept twice": lambda m, x: x @ m.w.t().where(TRIL, 0) + x * m.v.where(TRIL[1], 1),
}
LOOKED_UP: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "more look-ups than rows": lambda m, x: x + m.w[torch.tensor([0, 1, 1, 3, -1, -4, 1])].mean(0),
    "fewer look-ups than rows": lambda m, x: x * F.embedding(torch.tensor([[2]]), m.w)[0],
    "one row": lambda m, x: x * m.w[torch.tensor(2)],
    "entries of a vector": lambda m, x: x * torch.index_select(m.v, 0, torch.tensor([1, 1, 0, 3])),
    "a table of indices": lambda m, x: x + m.v[torch.tensor([[0, 1], [1, 3]])].flatten(),
    "a bias of positions, used twice": lambda m, x: _attended(m, _attended(m, x)),
    "a bias of positions, masked": lambda m, x: _attended(m, x, torch.ones(9, 9).tril().bool()),
    "rows of a tied table": lambda m, x: (
        F.linear(x, m.w) + F.embedding(torch.tensor([0, 2] * 9), m.w).mean(0)
    ),
    "many positions and few rows": lambda m, x: x * m.w[torch.arange(64) % 2].square().mean(0),
    "a row that is padding": lambda m, x: x + F.embedding(torch.tensor([1, 2, 1]), m.w, 1).sum(0),
}


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("name", [*REARRANGED, *LOOKED_UP, *MASKED, *SCALED])
def test_rearranged_masked_scaled_and_looked_up_weights_have_the_gradients_of_the_loop(
    name: str, size: int
) -> None:
    forward = {**REARRANGED, **LOOKED_UP, **MASKED, **SCALED}[name]
    make = lambda: Formula(forward, w=numbers(4, 4), v=numbers(4))  # noqa: E731
    assert_exact(Case(make, of((4,))), size)


def test_a_backward_under_autocast_sums_looked_up_rows_as_exactly_as_one_outside() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        bias = F.embedding(torch.arange(900).view(30, 30) % 3, m.w).permute(2, 0, 1)
        return (x[:, None] * bias.exp()).flatten(1).tanh().sum(1)

    model, x = Formula(forward, w=numbers(3, 4)).float(), numbers(5, 30, 30).float()
    with pergrad.record(model, pergrad.Grads()) as found, torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
    expected = loop_grads(model.double(), lambda model, x: model(x), x.double())
    torch.testing.assert_close(
        found.result["w"].double(), expected["w"], rtol=1e-4, atol=1e-4 * expected["w"].abs().max()
    )


def test_a_reshaped_weight_is_not_materialised_for_norms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any) -> Tensor:
        raise AssertionError("materialised")

    monkeypatch.setattr(pergrad.factors.Rearranged, "materialize", refused)
    model = Formula(REARRANGED["a view"], w=numbers(4, 4), v=numbers(4))
    with pergrad.record(model, pergrad.Norms(), pergrad.ClippedSum(1.0)):
        model(numbers(3, 4)).sum().backward()


@pytest.mark.parametrize("function", [Tensor.mul, lambda w, mask: w.masked_fill(mask, 0)])
def test_a_constant_that_changes_before_the_backward_is_refused(
    function: Callable[[Tensor, Tensor], Tensor],
) -> None:
    mask = torch.ones(4, 4).tril().bool()
    model = Formula(lambda m, x: F.linear(x, function(m.w, mask)), w=numbers(4, 4))

    def step() -> None:
        with pergrad.record(model, pergrad.Norms()):
            loss = model(numbers(3, 4)).sum()
            mask.zero_()
            loss.backward()

    with pytest.raises(pergrad.PergradError, match="changed in place"):
        step()


class Overlapping(torch.autograd.Function):
    """Returns views of a tensor that nobody else has; they share a row."""

    @staticmethod
    def forward(weight: Tensor) -> tuple[Tensor, Tensor]:
        doubled = weight * 2
        return doubled[:3], doubled[1:]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * (F.pad(grads[0], (0, 0, 0, 1)) + F.pad(grads[1], (0, 0, 1, 0)))


def test_masked_entries_get_nothing_from_gradients_that_are_not_finite() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return (x * m.v.where(torch.tensor([True, False, True, True]), 1)).sum(1)

    model, x = Formula(forward, v=numbers(4)), numbers(3, 4)
    x[1, 1] = torch.inf
    found = pergrad.grads(model, lambda m, x: m(x), x)["v"]
    assert torch.equal(found, x.where(torch.tensor([True, False, True, True]), 0))


def test_a_result_whose_memory_was_changed_through_another_is_refused() -> None:
    def forward(m: Any, x: Tensor, *, changes: bool) -> Tensor:
        first, last = Overlapping.apply(m.w)
        if changes:
            first.mul_(3)
        return x @ first.t() + x @ last.t()

    assert_exact(formula(partial(forward, changes=False), w=(4, D)), 3)
    model = Formula(partial(forward, changes=True), w=numbers(4, D))
    with pytest.raises(UnsupportedFunctionError, match="changes a view of it in place"):
        pergrad.grads(model, lambda m, x: m(x).sum(1), numbers(3, D))
