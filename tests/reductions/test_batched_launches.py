"""Reductions that share launches, by the kernels themselves: on a CPU, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import pergrad
from pergrad.factors import (
    Dense,
    ElementProduct,
    NormalizedProduct,
    OuterProduct,
    PositionSum,
    RowSum,
)
from pergrad.reductions import (
    SampleGradients,
    SquaredNorms,
    batched_launches,
    choosing,
    norms,
    sums,
)
from pergrad.reductions.batched_launches import weighted_sums
from pergrad.runtime.queue import Queue
from pergrad.testing import loop_grads

launchers = pytest.importorskip("pergrad.kernels.launchers", reason="Triton is not installed")


class Model(nn.Module):
    """A table, layers of several widths, a norm, and convolutions: a factor of every kind with a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 48)  # most rows are unused: few ones are multiplied
        self.layers = nn.ModuleList([nn.Linear(48, 40), nn.Linear(40, 48), nn.Linear(48, 48)])
        self.norm = nn.LayerNorm(48)
        self.conv = nn.Conv1d(48, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # (n, t) -> (n, 3)
        h = self.table(x)
        for layer in self.layers:
            h = layer(h).tanh()
        h = self.conv(self.norm(h).mT)
        return self.head(h.mean(2))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched, in order, on whatever device the tensors are."""
    names: list[str] = []

    class Noted:
        def __getattr__(self, name: str) -> Any:
            names.append(name)
            return getattr(launchers, name)

    noted = Noted()

    def have_kernels(tensors: Sequence[Tensor]) -> bool:
        return all(t.dtype != torch.float64 and t.numel() for t in tensors)

    monkeypatch.setattr(choosing, "have_kernels", have_kernels)
    monkeypatch.setattr(choosing, "_WITH_KERNELS", {"cpu", "cuda"})
    for module in (norms, sums):
        monkeypatch.setattr(module, "all_launchers", lambda: noted)
    return names


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def test_norms_and_clipped_sums_by_kernels_are_those_of_the_loop(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, x = Model().to(_device()), torch.randint(7, (3, 9), device=_device())
    exact = loop_grads(model.double(), _loss, x)
    squares = torch.stack([g.flatten(1).square().sum(1) for g in exact.values()]).sum(0)
    bound = float(squares.sqrt().median())
    weights = (bound / squares.sqrt()).clamp(max=1)
    model.float()
    with pergrad.record(model, pergrad.Norms()) as found:
        _loss(model, x).sum().backward()
    with pergrad.record(model, pergrad.ClippedSum(bound)) as clipped:
        _loss(model, x).sum().backward()
    torch.testing.assert_close(found.result.double(), squares.sqrt(), rtol=1e-5, atol=0)
    for name, g in exact.items():
        total = torch.einsum("n,n...->...", weights, g)
        torch.testing.assert_close(clipped.result[name].double(), total, rtol=1e-4, atol=1e-6)
    kernels = {"gram_squared_norms", "column_squared_norms", "table_squared_norms"}
    assert {*kernels, "scaled_samples"} <= {*launched}


def test_parameters_share_a_launch(launched: list[str]) -> None:
    model = nn.Sequential(*[nn.Linear(48, 48) for _ in range(4)]).to(_device())
    x = torch.randn(2, 9, 48, device=_device())
    pergrad.norms(model, lambda m, x: m(x).square().sum((1, 2)), x)
    assert launched.count("gram_squared_norms") == 1
    assert launched.count("column_squared_norms") == 1


def test_what_waits_for_company_has_it_before_the_backward_returns(launched: list[str]) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(48, 48).to(_device()), torch.randn(2, 9, 48, device=_device())
    expected = loop_grads(model, lambda m, x: m(x).square().sum((1, 2)), x)["weight"]
    with pergrad.record(model, pergrad.Norms()) as found:
        model(x).square().sum().backward()
        assert launched.count("gram_squared_norms") == 1
        x.zero_()  # what the next batch is read into
    torch.testing.assert_close(found.per_param["weight"], expected.flatten(1).norm(dim=1))


def test_sums_come_with_what_reads_the_same_gradients(launched: list[str]) -> None:
    torch.manual_seed(0)
    g, h, x = torch.randn(3, 2, 5, 4, device=_device()).unbind()
    of_one = [ElementProduct(g, x), PositionSum(g), PositionSum(g)]  # the last by itself
    of_another = [ElementProduct(h, x), PositionSum(g), PositionSum(h.clone())]
    statistics = torch.randn(2, 2, 5, 1, device=_device()).unbind()
    of_a_third = [NormalizedProduct(x, h, *statistics), PositionSum(x)]
    factors = [*of_one, *of_another, *of_a_third]
    for bound, launches in ((10**6, 3), (1, 8)):
        launched.clear()
        together = SquaredNorms(Queue(bound))
        for k, factor in enumerate(factors):
            together.add(str(k), SampleGradients([factor], bound=bound))
        names, found = together.found()
        assert found is not None
        assert launched.count("column_squared_norms") == launches
        for k, factor in enumerate(factors):
            exact = factor.materialize(torch.float64).square().sum(1)
            torch.testing.assert_close(found[names.index(str(k))], exact, rtol=1e-5, atol=0)


def test_a_shift_is_no_problem_of_its_own_beside_its_scale(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[tuple[int, list[int]]] = []

    def watched(launch: Any, tensors: Any, summed: Any) -> Tensor:
        problems.append((len(tensors), list(summed)))
        return norms.squared_norms_in_one_launch(launch, tensors, summed)

    monkeypatch.setattr(batched_launches, "squared_norms_in_one_launch", watched)
    g, h, x = torch.randn(3, 2, 5, 4, device=_device()).unbind()
    together = SquaredNorms(Queue(10**6))
    for k, factor in enumerate(
        [ElementProduct(h, x), ElementProduct(g, x), PositionSum(g), PositionSum(g)]
    ):
        together.add(str(k), SampleGradients([factor], bound=10**6))
    names, _ = together.found()
    assert problems == [(2, [1]), (1, [])]
    assert names == ["0", "1", "2", "3"]
    together.add("later", SampleGradients([PositionSum(g)], bound=10**6))
    together.found()
    assert problems[2:] == [(1, [])]  # what was launched before takes nothing more


def test_nothing_added_has_no_norms() -> None:
    assert SquaredNorms(Queue(10**6)).found() == ([], None)


def test_a_launch_gives_back_the_memory_that_waited_for_it(launched: list[str]) -> None:
    queue = Queue(10**6)
    released: list[int] = []
    release = queue.release
    queue.release = lambda held: (released.append(held), release(held))[1]  # type: ignore[method-assign]
    together = SquaredNorms(queue)
    g = torch.randn(2, 5, 4, device=_device())
    for name in "ab":
        together.add(name, SampleGradients([PositionSum(g)], bound=10**6))
    together.found()
    assert released == [2 * g.nbytes]
    queue.drain()  # finds nothing left to launch
    assert sum(released) == 2 * g.nbytes
    assert launched.count("column_squared_norms") == 1


def test_sums_of_another_scale_come_by_themselves(launched: list[str]) -> None:
    g, x = torch.randn(2, 3, 5, 4, device=_device()).unbind()
    together = SquaredNorms(Queue(10**6))
    together.add("scale", SampleGradients([ElementProduct(g, x)], 2.0, bound=10**6))
    together.add("shift", SampleGradients([PositionSum(g)], 3.0, bound=10**6))
    names, found = together.found()
    assert found is not None
    exact = 9 * g.double().sum(1).square().sum(1)
    torch.testing.assert_close(found[names.index("shift")], exact, rtol=1e-5, atol=0)


def _outer(
    width: int, dtype: torch.dtype = torch.float32, bound: int = 2**30, scale: float = 1.0
) -> SampleGradients:
    g, x = (torch.randn(2, 40, w, device=_device()).to(dtype) for w in (width, 160))
    return SampleGradients([OuterProduct(g, x)], scale, bound=bound)


def test_nothing_waits_beyond_the_bound_of_memory(launched: list[str]) -> None:
    each = 2 * 40 * (160 + 160) * 4  # bytes
    found = SquaredNorms(Queue(2 * each))
    for k in range(4):
        found.add(str(k), _outer(160, bound=2 * each))
    assert launched.count("gram_squared_norms") == 2


def test_gradients_that_are_materialised_meanwhile_have_the_same_norms(launched: list[str]) -> None:
    found, one = SquaredNorms(Queue(2**30)), _outer(160, scale=3.0)
    found.add("one", one)
    gradients = one.materialize()
    exact = gradients.double().flatten(1).square().sum(1)
    names, squares = found.found()
    assert names == ["one"]
    assert squares is not None
    torch.testing.assert_close(squares[0], exact, rtol=1e-5, atol=0)


def test_gradients_of_one_launch_take_the_place_of_factors_that_are_kept(
    launched: list[str],
) -> None:
    torch.manual_seed(0)
    g, x = torch.randn(2, 3, 5, 7, device=_device()).unbind()
    factors = [
        PositionSum(torch.randn(3, 5, 4, device=_device())),
        ElementProduct(*torch.randn(2, 3, 5, 2, 3, device=_device())),
        PositionSum(torch.randn(3, 5, device=_device())),
        PositionSum(torch.randn(3, 5, 6, device=_device())),
        *(ElementProduct(g, x), PositionSum(g)),  # which come together
        NormalizedProduct(x, g, *torch.randn(2, 3, 5, 1, device=_device())),
        NormalizedProduct(g, x, *torch.randn(2, 3, 1, 7, device=_device())),
    ]
    exact = [f.materialize() for f in factors]
    many = [SampleGradients([f], 2.0, bound=10**6) for f in factors]
    together = SquaredNorms(Queue(10**6), keeps_factors=True)
    for k, gradients in enumerate(many):
        together.add(str(k), gradients)
    many[3].materialize()  # with its scale, which the launch does not know of
    names, found = together.found()
    assert found is not None
    assert set(launched) == {"column_sums"}
    for k, (gradients, wanted) in enumerate(zip(many, exact, strict=True)):
        (kept,) = gradients.factors
        assert isinstance(kept, Dense)
        torch.testing.assert_close(kept.gradients, wanted * (2 if k == 3 else 1))
        torch.testing.assert_close(gradients.materialize(), 2 * wanted)
        squares = (2 * wanted).double().view(3, -1).square().sum(1)
        torch.testing.assert_close(found[names.index(str(k))], squares, rtol=1e-5, atol=0)


def test_a_scale_multiplies_norms_that_were_found_together(launched: list[str]) -> None:
    g = torch.randn(2, 5, 3, device=_device())
    plain, scaled = SquaredNorms(Queue(2**30)), SquaredNorms(Queue(2**30))
    for name in "ab":
        plain.add(name, SampleGradients([PositionSum(g)], bound=2**30))
        scaled.add(name, SampleGradients([PositionSum(g)], 3.0, bound=2**30))
    (_, squares), (_, more) = plain.found(), scaled.found()
    assert squares is not None
    torch.testing.assert_close(more, 9 * squares)


def test_weighted_sums_of_halves_share_a_launch(launched: list[str]) -> None:
    many = {str(width): _outer(width, torch.bfloat16) for width in (8, 16, 24)}
    many["alone"] = _outer(8)  # in float32
    weights = torch.tensor([0.5, 2.0], device=_device(), dtype=torch.float64)
    exact = {name: g.weighted_sum(weights) for name, g in many.items()}
    launched.clear()
    found = dict(pergrad.reductions.weighted_sums(many, weights))
    assert found.keys() == exact.keys()
    assert not many
    assert launched.count("weighted_outer_products") == 1
    for name, total in exact.items():
        torch.testing.assert_close(found[name], total, rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("bound", [1, 2**30])
def test_traced_sums_leave_out_what_is_not_finite(launched: list[str], bound: int) -> None:
    weights = torch.tensor([0.0, 0.7], dtype=torch.float64, device=_device())
    many = {str(w): _outer(w, torch.bfloat16, bound) for w in (24, 320)}
    pairs = [(f.grad_output, f.input) for m in many.values() for f in m.factors]  # type: ignore[attr-defined]
    for g, x in pairs:
        g[0, 0], x[0, 1] = float("nan"), float("inf")

    def sums(weights: Tensor, *tensors: Tensor) -> list[Tensor]:
        factors = [OuterProduct(g, x) for g, x in zip(tensors[::2], tensors[1::2], strict=True)]
        given = {str(k): SampleGradients([f], bound=bound) for k, f in enumerate(factors)}
        return [t for _, t in sorted(weighted_sums(given, weights))]

    flat = [weights, *(t for pair in pairs for t in pair)]
    traced = make_fx(sums, tracing_mode="fake")(*flat)
    traced.graph.eliminate_dead_code()  # as a compiled step does: it is no dead code
    traced.recompile()
    assert str(traced.code).count("pergrad.mend_weighted_outer") == (2 if bound == 1 else 1)
    for (g, x), found in zip(pairs, traced(*flat), strict=True):
        exact = 0.7 * g[1].double().T @ x[1].double()
        assert (found - exact).norm() <= 1e-2 * exact.norm()


def _small(*shape: int, scale: float = 1.0) -> SampleGradients:
    return SampleGradients([Dense(torch.randn(3, *shape, device=_device()))], scale, bound=2**30)


def test_small_gradients_share_a_launch_with_those_of_their_scale(launched: list[str]) -> None:
    many = {"a": _small(4), "b": _small(2, 3), "c": _small(5, scale=3.0), "d": _small(200, 200)}
    exact = {name: g.materialize().double().flatten(1).square().sum(1) for name, g in many.items()}
    many["c"] = SampleGradients([Dense(many["c"].materialize() / 3)], 3.0, bound=2**30)
    found = SquaredNorms(Queue(2**30))
    for name, gradients in many.items():
        found.add(name, gradients)
    names, squares = found.found()
    assert squares is not None
    for name, row in zip(names, squares, strict=True):
        torch.testing.assert_close(row, exact[name], rtol=1e-5, atol=0)
    assert launched.count("column_squared_norms") == 2  # "d" is large


def test_small_gradients_are_summed_side_by_side(launched: list[str]) -> None:
    many = {"a": _small(4), "b": _small(2, 3), "c": _small(), "d": _small(5, scale=3.0)}
    gradients = {name: g.factors[0].materialize().clone() for name, g in many.items()}
    many["b"].factors[0].materialize()[1] = float("nan")
    weights = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64, device=_device())
    found = dict(weighted_sums(dict(many), weights))
    for name, g in gradients.items():
        exact = torch.einsum("n,n...->...", weights, g.double()) * (3 if name == "d" else 1)
        torch.testing.assert_close(found[name].double(), exact, rtol=1e-5, atol=1e-6)


# -- small gradients on a CPU


def _small_ones() -> dict[str, Any]:
    torch.manual_seed(0)
    g, h = torch.randn(2, 3, 5, 4)
    found: dict[str, Any] = {f"outer {k}": OuterProduct(g, torch.randn(3, 5, 6)) for k in range(4)}
    found |= {"another": OuterProduct(g, torch.randn(3, 5, 2)), "shift": PositionSum(g)}
    found |= {"scale": ElementProduct(g, h), "number": PositionSum(torch.randn(3, 5))}
    found["table"] = RowSum(torch.randint(7, (3, 5)), h, 7)
    return found


def _numbers_of_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parameters in each computation of small norms, in order."""
    together: list[int] = []

    def watched(each: list[Tensor]) -> Tensor:
        together.append(len(each))
        return norms.norms_of_small(each)

    monkeypatch.setattr(batched_launches, "norms_of_small", watched)
    return together


@pytest.mark.parametrize("scale", [1.0, 3.0, torch.tensor([1.0, 2.0, 5.0])])
def test_norms_of_small_gradients_of_one_shape_are_one_call(
    scale: Tensor | float, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = _numbers_of_calls(monkeypatch)
    squares, factors = SquaredNorms(Queue(10**6)), _small_ones()
    for name, factor in factors.items():
        squares.add(name, SampleGradients([factor], scale, bound=10**6))
    names, found = squares.found()
    assert found is not None
    assert sorted(names) == sorted(factors)
    assert found.dtype == torch.float64
    assert sorted(together) == [1, 1, 1, 2, 4]  # (4, 2), (7, 4) and one number; (4,); (4, 6)
    for name, factor in factors.items():
        each = factor.materialize().double().reshape(3, -1)
        exact = each.square().sum(1) * torch.as_tensor(scale).double() ** 2
        torch.testing.assert_close(found[names.index(name)], exact, rtol=1e-5, atol=0)


def test_small_gradients_of_other_scales_are_kept_apart() -> None:
    squares, factor = SquaredNorms(Queue(10**6)), _small_ones()["outer 0"]
    for scale in (1.0, 2.0):
        squares.add(str(scale), SampleGradients([factor], scale, bound=10**6))
    names, found = squares.found()
    assert found is not None
    each = dict(zip(names, found, strict=True))
    torch.testing.assert_close(each["2.0"], 4 * each["1.0"])


def test_few_small_gradients_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    together = _numbers_of_calls(monkeypatch)
    factor, bound = _small_ones()["outer 0"], 32 * 3 * 24 * 5  # five gradients of three samples
    squares = SquaredNorms(Queue(bound))
    for k in range(12):
        squares.add(str(k), SampleGradients([factor], bound=bound))
    squares.found()
    assert together == [6, 6]


def test_gradients_of_a_single_position_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    together = _numbers_of_calls(monkeypatch)
    squares, g = SquaredNorms(Queue(10**6)), torch.randn(3, 1, 4)
    for name, factor in {"shift": PositionSum(g), "dense": Dense(g[:, 0])}.items():
        squares.add(name, SampleGradients([factor], bound=10**6))
    g.zero_()  # as autograd may do: the gradients are a view of what it passes on
    _, found = squares.found()
    assert together == []
    assert found is not None
    assert (found > 0).all()
