"""Programs that break what an engine may assume are exact or refused: one test for each class of them.

A case that is exact must stay so: a refusal fails it too. More of classes 11 and 12 is in
`compiling/test_surroundings.py` and `test_compiled_callables.py`; leaks (class 14) in `test_leaks.py`, and
bounds in `tests/quantities/test_bounds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad
from pergrad.testing import assert_near, loop_grads
from tests.engine.soundness import (
    arguments,
    contractions,
    indices,
    names,
    opaque,
    out_of_sight,
    parameters,
    rerunning,
    sizes,
    views,
    views_of_weights,
)
from tests.engine.soundness.judge import (
    Case,
    Cases,
    exact_or_refused,
    rows_of_losses,
    squares,
)


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def each(*groups: Cases) -> Any:
    cases = [(name, case) for group in groups for name, case in group.items()]
    return pytest.mark.parametrize(
        "case", [case for _, case in cases], ids=[name for name, _ in cases]
    )


def check(case: Case) -> None:
    assert exact_or_refused(case.made, case.loss_fn) == case.verdict


@each(out_of_sight.CASES)
def test_class_1_made_out_of_sight_is_exact_or_refused(case: Case) -> None:
    check(case)
    out_of_sight.OUTSIDE.grad = None


def test_class_1_a_parameter_of_no_module_gets_its_ordinary_gradient() -> None:
    model, (x,) = out_of_sight.CASES["parameter_of_no_module"].made()
    outside = out_of_sight.OUTSIDE
    (expected,) = torch.autograd.grad(squares(model, x).sum(), outside)
    pergrad.grads(model, squares, x)
    assert_near(outside.grad, expected)
    outside.grad = None


@each(opaque.CASES)
def test_class_2_opaque_functions_that_mix_are_exact_or_refused(case: Case) -> None:
    check(case)


@each(contractions.CASES)
def test_class_3_contractions_over_the_batch_are_exact_or_refused(case: Case) -> None:
    check(case)


@each(indices.CASES)
def test_class_4_indices_are_exact_or_refused(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "move",
    [lambda h: h.flip(0), lambda h: h[[1, 0, 2, 3]], lambda h: torch.cat(h.chunk(2)[::-1])],
    ids=["reversed", "two exchanged", "halves exchanged"],
)
def test_class_4_moved_rows_beside_data_of_other_samples_are_refused_in_a_block(move: Any) -> None:
    """A block has no losses, (B,), whose order would tell."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(4, 3)
    for combined in (lambda h: x + h, lambda h: torch.cat([x, h], 1), lambda h: F.mse_loss(h, x)):
        with pytest.raises(pergrad.PergradError), pergrad.record(model, pergrad.Norms()):
            combined(move(model(x))).square().sum().backward()
    before = move(x)  # a block cannot know whose rows these are
    with pergrad.record(model, pergrad.Norms()) as norms:
        (before + move(model(x))).square().sum().backward()
    assert_near(norms.result, pergrad.norms(model, lambda m, x: (x + m(x)).square().sum(1), x))


@each(arguments.CASES)
def test_class_5_unseen_arguments_are_exact_or_refused(case: Case) -> None:
    check(case)


@each(views.CASES, views_of_weights.CASES)
def test_class_6_views_are_exact_or_refused(case: Case) -> None:
    check(case)


# Writes of samples into data of as many rows.
WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda t, s: t.copy_(s),
    "copy_ to a view": lambda t, s: t.view(-1).copy_(s.reshape(-1)),
    "copy_ row by row": lambda t, s: [t[n].copy_(s[n]) for n in range(len(s))],
    "setitem": lambda t, s: t.__setitem__(..., s),
    "setitem in a view": lambda t, s: t.T.__setitem__(slice(None), s.T),
    "out": lambda t, s: torch.sin(s, out=t),
    "out in a view": lambda t, s: torch.mul(s, 2, out=t[:, :]),
    "data": lambda t, s: setattr(t, "data", s.clone()),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("fill", [torch.empty_like, torch.clone, lambda x: torch.zeros(x.shape)])
@pytest.mark.parametrize("move", [lambda s: s.flip(0), lambda s: s * 1])
def test_class_6_data_written_in_another_order_keeps_its_samples_in_a_block(
    name: str, grad: bool, fill: Callable[[Tensor], Tensor], move: Callable[[Tensor], Tensor]
) -> None:
    def moved(m: Any, x: Tensor) -> Tensor:
        target = fill(x)
        with torch.set_grad_enabled(grad):
            WRITES[name](target, move(x))
        return m.b(m.a(target).sin())

    model, (x,) = Case(moved, "exact").made()
    with pergrad.record(model, pergrad.Grads()) as grads:
        squares(model, x).sum().backward()
    for parameter, rows in loop_grads(model, squares, x).items():
        assert_near(grads.result[parameter], rows, parameter)


@each(names.CASES)
def test_class_7_names_of_torch_are_exact_or_refused(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(("change", "verdict"), [(2.0, "exact"), (None, "refused")])
def test_class_7_attention_patched_after_a_recording_is_exact_or_refused(
    monkeypatch: pytest.MonkeyPatch, change: float | None, verdict: str
) -> None:
    def attend(m: Any, x: Tensor) -> Tensor:
        return m.layer(x, x, x, need_weights=False)[0]

    case = Case(
        attend,
        "exact",
        batch=lambda size: (torch.randn(size, 2, 3),),
        parts=lambda: {"layer": nn.MultiheadAttention(3, 1, batch_first=True)},
    )
    check(case)
    plain = F.scaled_dot_product_attention

    def patched(*args: Any, **kwargs: Any) -> Tensor:
        found = plain(*args, **kwargs)
        return found - found.mean(0) if change is None else change * found

    monkeypatch.setattr(F, "scaled_dot_product_attention", patched)
    assert exact_or_refused(case.made, case.loss_fn) == verdict


def test_class_8_cached_answers_hold_for_other_indices() -> None:
    def picks(m: Any, x: Tensor) -> Tensor:
        return x + m.b(m.a(x)[(torch.arange(4) * m.step) % 4])

    for step, verdict in [(1, "exact"), (3, "refused"), (5, "exact"), (2, "refused")]:
        case = Case(picks, "exact", parts=lambda step=step: {"step": step})
        assert exact_or_refused(case.made) == verdict, step


@pytest.mark.parametrize(
    "combine",
    [
        torch.linalg.solve,
        lambda c, h: torch.linalg.solve_triangular(c.tril(), h, upper=False),
        lambda c, h: torch.cholesky_solve(h, c.tril()),
        lambda c, h: torch.linalg.multi_dot([c, h]),
        lambda c, h: torch.inner(h.T, c).T,
        lambda c, h: F.bilinear(h.T.contiguous(), torch.ones(3, 1), c[..., None]).T,
        torch.ops.aten.mm.default,
    ],
    ids=["solve", "solve_triangular", "cholesky_solve", "multi_dot", "inner", "bilinear", "mm"],
)
def test_class_8_an_answer_for_a_diagonal_matrix_is_none_for_others(combine: Any) -> None:
    def combines(m: Any, x: Tensor) -> Tensor:
        return x + m.b(combine(m.c, m.a(x)))

    diagonal = 2 * torch.eye(4)
    pergrad.runtime.caches.clear_caches()
    for c, verdict in [(diagonal, "exact"), (diagonal + 1, "refused"), (diagonal, "exact")]:
        assert exact_or_refused(Case(combines, "exact", parts=lambda c=c: {"c": c}).made) == verdict


def test_class_8_a_nan_in_the_first_batch_does_not_spoil_the_next() -> None:
    def smooth(m: Any, x: Tensor) -> Tensor:
        return x + m.b(torch.special.expit(torch.special.erfcx(m.a(x))))

    case = Case(smooth, "exact")
    pergrad.runtime.caches.clear_caches()
    model, (x,) = case.made()
    x[0, 0] = torch.nan
    rows = pergrad.grads(model, squares, x)
    _, expected = rows_of_losses(model, squares, x[1:])
    for name, grad in expected.items():
        assert_near(rows[name][1:], grad, name)
    check(case)


@each(parameters.CASES)
def test_class_9_parameters_are_exact_or_refused(case: Case) -> None:
    check(case)


@each(rerunning.CASES)
def test_class_10_functions_that_rerun_are_exact_or_refused(case: Case) -> None:
    check(case)


class Twice(nn.Module):
    """Registers one layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def test_class_11_a_compiled_module_registered_twice_is_exact_and_stays_real() -> None:
    model, grads, norms = Twice(), pergrad.Grads(), pergrad.Norms()
    kinds = [type(p) for p in model.parameters()]
    step = pergrad.compiled(model, squares, grads, norms, backend="eager")
    for _ in range(4):
        x = torch.randn(4, 3)
        step(x)
        _, expected = rows_of_losses(model, squares, x)
        for name, rows in expected.items():
            assert_near(grads.result[name], rows, name)
        assert type(norms.result) is Tensor
        assert [type(p) for p in model.parameters()] == kinds


@pytest.mark.parametrize("whole", [True, False], ids=["loss", "module"])
def test_class_12_compiled_callables_inside_of_a_block_are_exact(whole: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    run: Callable[..., Tensor] = torch.compile(squares if whole else inner, backend="eager")

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return run(model, x) if whole else run(x).square().sum(1)

    x = torch.randn(4, 3)
    _, expected = rows_of_losses(inner, squares, x)
    rows = pergrad.grads(inner, loss_fn, x)
    for name, grad in expected.items():
        assert_near(rows[name], grad, name)
    torch.compiler.reset()


@each(sizes.CASES)
def test_class_13_sizes_are_exact_or_refused(case: Case) -> None:
    check(case)


# Scalar losses of a module that gets other rows than the loss function.
ROWS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "two samples at a time": lambda m, x: torch.stack(
        [m(part).square().sum() for part in x.split(2)]
    ).sum(),
    "rows of several": lambda m, x: m(x.repeat_interleave(2, 0)).square().sum(),
    "two views": lambda m, x: m(torch.cat([x, 2 * x])).square().sum(),
    "one by one": lambda m, x: torch.stack([m(row[None]).square().sum() for row in x]).sum(),
}


@pytest.mark.parametrize("name", ROWS)
def test_class_13_a_scalar_loss_of_other_rows_than_the_batch_needs_its_size(name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3), torch.randn(4, 3)
    with pytest.raises(
        pergrad.PergradError, match="arguments of loss_fn have 4: pass batch_size=4"
    ):
        pergrad.norms(model, ROWS[name], x)
    for parameter, rows in pergrad.grads(model, ROWS[name], x, batch_size=4).items():
        assert_near(rows, loop_grads(model, ROWS[name], x)[parameter], parameter)


STRIDES = Cases()


@STRIDES.exact()
def product_viewed(m: Any, x: Tensor) -> Tensor:
    return (m.w @ x.unsqueeze(-1)).view(4, -1)


@STRIDES.exact()
def product_viewed_and_transposed(m: Any, x: Tensor) -> Tensor:
    return (m.w @ x.T).view(3, 4).T + 0


@each(STRIDES)
def test_class_14_strides_are_those_of_torch(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("samples", [4, 1024])
def test_class_14_a_clipped_sum_in_bfloat16_keeps_its_bound(samples: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 5).bfloat16()
    x = torch.randn(1, 3).bfloat16().expand(samples, 3)  # rounding errors add up
    clipped = pergrad.ClippedSum(0.7)
    with pergrad.record(model, clipped):
        (model(x) * torch.arange(1, 6).bfloat16()).sum().backward()
    parts = [t.double().flatten() for t in clipped.result.values()]
    assert torch.cat(parts).norm() <= 0.7 * samples * (1 + 1e-5)


def test_class_14_a_refused_batch_norm_has_counted_nothing() -> None:
    case = Case(lambda m, x: m.norm(m.a(x)), "refused", parts=lambda: {"norm": nn.BatchNorm1d(3)})
    check(case)
