"""Proofs on the autograd graph: what is apart, thin, mixed or unknown, and what counts as a sum."""

from collections.abc import Callable
from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.engine.samples.layouts import Lost, Owners, Samples, Scope
from pergrad.engine.samples.proving import (
    Source,
    candidates,
    is_total,
    keeps_apart,
    note,
    proved,
    sources_of,
    subsets,
)
from pergrad.errors import MixedSamplesError

N, D = 3, 4


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=random, dtype=dtype).requires_grad_()


def verdict(function: Callable[[Tensor], Tensor], x: Tensor | None = None, dim: int = 0) -> str:
    """The verdict on function(x), both with their samples in the given dimension."""
    scope, x = Scope(N), leaf(N, D) if x is None else x
    return keeps_apart(function(x), scope.samples(dim), [(x, scope.samples(dim))])


# -- subsets of the samples


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7, 10, 11, 35, 64, 257])
def test_some_subset_has_any_sample_without_any_other(count: int) -> None:
    masks = subsets(count)
    assert masks.shape[1] == count
    assert masks.dtype is torch.bool
    separated = (masks.unsqueeze(2) & ~masks.unsqueeze(1)).any(0)
    assert torch.equal(separated, ~torch.eye(count, dtype=torch.bool))


@pytest.mark.parametrize("count", [2, 3, 4, 6, 7, 10, 11, 35, 64, 257])
def test_no_smaller_family_of_subsets_could_separate_all_samples(count: int) -> None:
    # Sperner: k rows separate at most C(k, k // 2) samples.
    k = len(subsets(count))
    assert comb(k - 1, (k - 1) // 2) < count <= comb(k, k // 2)


def test_a_single_sample_needs_no_subset() -> None:
    assert subsets(1).shape == (0, 1)


# -- verdicts


def shifted(x: Tensor) -> Tensor:
    return x.roll(1, 0)


def only_of_last(x: Tensor) -> Tensor:
    """Sample 0 depends on the last sample, and only on it; no other two meet."""
    return torch.cat([x[:1] + x[-1:], x[1:]])


APART: dict[str, Callable[[Tensor], Tensor]] = {
    "elementwise": lambda x: x.sin() * x,
    "mapped": lambda x: x @ torch.ones(D, 2, dtype=x.dtype),
    "row by row": lambda x: torch.stack([row.cumsum(0) for row in x]),
    "by vmap": lambda x: torch.vmap(lambda row: row.softmax(0))(x),
}
THIN: dict[str, Callable[[Tensor], Tensor]] = {
    "one sample left out": lambda x: x * torch.tensor([1.0, 0, 1]).unsqueeze(1),
    "all left out": lambda x: x * 0,
    "behind a closed gate": lambda x: (x - 100).relu(),
}
MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax over the batch": lambda x: x.softmax(0),
    "centred": lambda x: x - x.mean(0),
    "cumulative": lambda x: x.cumsum(0),
    "reordered": shifted,
    "one sample in one other": only_of_last,
    "flipped": lambda x: x.flip(0),
}


@pytest.mark.parametrize("name", APART)
def test_rows_that_depend_on_their_own_sample_are_apart(name: str) -> None:
    assert verdict(APART[name]) == "apart"


@pytest.mark.parametrize("name", THIN)
def test_samples_that_no_gradient_reaches_make_the_proof_thin(name: str) -> None:
    assert verdict(THIN[name]) == "thin"


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_depend_on_another_sample_are_mixed(name: str) -> None:
    assert verdict(MIXED[name]) == "mixed"


@pytest.mark.parametrize("source", range(5))
@pytest.mark.parametrize("target", range(5))
def test_any_single_dependence_on_another_sample_is_found(source: int, target: int) -> None:
    x, scope = leaf(5), Scope(5)
    y = x.clone()
    y[target] = y[target] + 1e-300 * x[source]
    expected = "apart" if source == target else "mixed"
    assert keeps_apart(y, scope.samples(0), [(x, scope.samples(0))]) == expected


def test_a_dependence_that_only_a_random_direction_shows_is_found() -> None:
    # The sum of the rows' gradients is zero for a direction of ones.
    assert verdict(lambda x: x - (x - x.mean(1, keepdim=True)).flip(0)) == "mixed"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_proof_by_numbers_that_are_not_finite_is_thin(bad: float) -> None:
    x = leaf(N, D)
    factor = torch.full((N, N), bad, dtype=x.dtype)
    assert verdict(lambda x: factor @ x) == "thin"  # all gradients are as bad; none is kept
    factor[:, 1:] = 1  # the gradients of one sample only
    assert verdict(lambda x: factor @ x) == "mixed"
    # In the sample's own rows they hide nothing.
    own = torch.tensor([1, bad, 1], dtype=x.dtype).unsqueeze(1)
    assert verdict(lambda x: x * own, x) == "thin"
    assert verdict(lambda x: x * own - x.mean(0)) == "mixed"
    assert verdict(lambda x: (x * own).softmax(0)) == "thin"  # spoils every gradient


class Normalised(torch.autograd.Function):
    """Keeps rows of zeros, and is not linear: the gradient of each sample depends on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


def test_a_backward_that_is_not_linear_mixes_the_samples() -> None:
    assert verdict(Normalised.apply) == "mixed"
    x, scope = leaf(2, D), Scope(2)
    assert keeps_apart(Normalised.apply(x), scope.samples(0), [(x, scope.samples(0))]) == "mixed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_a_backward_that_is_not_linear(dtype: torch.dtype) -> None:
    for count in (2, 7, 33):
        scope, x = Scope(count), leaf(count, 50, dtype=dtype)
        w = torch.randn(50, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
        y = (x @ w).tanh() @ w
        assert keeps_apart(y, scope.samples(0), [(x, scope.samples(0))]) == "apart"


def test_without_a_source_nothing_is_shown() -> None:
    assert keeps_apart(leaf(N, D) * 1, Scope(N).samples(0), []) == "thin"


def test_a_layout_without_samples_is_not_judged() -> None:
    scope, x = Scope(N), leaf(N, D)
    sources: Any = [(x, scope.samples(0))]
    assert keeps_apart(x * 2, scope.constant(), sources) == "unknown"
    assert keeps_apart(x * 2, scope.lost("any"), sources) == "unknown"


def test_complex_results_are_judged_in_both_parts() -> None:
    z = leaf(N, D, dtype=torch.complex128)
    assert verdict(lambda z: z * z.conj(), z) == "apart"
    assert verdict(torch.fft.fft, z) == "apart"
    assert verdict(lambda z: torch.fft.fft(z, dim=0), z) == "mixed"
    # The other sample is in the imaginary part only.
    assert verdict(lambda x: torch.complex(x, x.flip(0))) == "mixed"
    assert verdict(lambda x: torch.complex(x, x.sin())) == "apart"


def test_the_dimension_of_the_samples_may_be_any() -> None:
    x = leaf(D, N)
    assert verdict(lambda x: x.cumsum(0), x, dim=1) == "apart"
    assert verdict(lambda x: x.cumsum(1), x, dim=1) == "mixed"


def test_one_dimensional_and_folded_layouts_are_judged_by_owner() -> None:
    scope, x = Scope(N), leaf(N * 2)
    behind, before = scope.samples(0, 1, 2), scope.samples(0, 2, 1)
    pairs = x.view(N, 2).cumsum(1).view(-1)  # index i belongs to sample i // 2
    assert keeps_apart(pairs, behind, [(x, behind)]) == "apart"
    assert keeps_apart(pairs, before, [(x, before)]) == "mixed"
    halves = x.view(2, N).cumsum(0).view(-1)  # index i belongs to sample i % N
    assert keeps_apart(halves, before, [(x, before)]) == "apart"
    assert keeps_apart(halves, behind, [(x, behind)]) == "mixed"


def test_owners_are_judged_as_they_say() -> None:
    scope, x = Scope(N), leaf(4, D)
    own = Owners(scope, 0, torch.tensor([2, 0, 2, 1]))
    other = Owners(scope, 0, torch.tensor([0, 2, 2, 1]))
    within = x + x[[2, 1, 0, 3]]  # both rows of sample 2
    assert keeps_apart(within, own, [(x, own)]) == "apart"
    assert keeps_apart(within, own, [(x, other)]) == "mixed"
    # Owners of the result and rows of the batch behind it.
    rows = leaf(N, D)
    picked = rows[[2, 0, 2, 1]].exp()
    assert keeps_apart(picked, own, [(rows, scope.samples(0))]) == "apart"
    assert keeps_apart(picked, other, [(rows, scope.samples(0))]) == "mixed"


def test_every_source_is_judged() -> None:
    scope, x, w = Scope(N), leaf(N, D), leaf(N, D)
    rows = scope.samples(0)
    y = x * w.detach() + w.flip(0)
    assert keeps_apart(y, rows, [(x, rows)]) == "apart"
    assert keeps_apart(y, rows, [(x, rows), (w, rows)]) == "mixed"
    unused = leaf(N, D)
    assert keeps_apart(x * 2, rows, [(x, rows), (unused, rows)]) == "thin"


def test_a_proof_leaves_the_graph_the_gradients_and_the_random_state_alone() -> None:
    x, seen = leaf(N, D), []
    y = x.exp()
    scope = Scope(N)
    state = torch.get_rng_state()

    class Sees(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Sees():
        assert keeps_apart(y, scope.samples(0), [(x, scope.samples(0))]) == "apart"
    assert torch.autograd.grad not in seen
    assert not scope.is_pulling_back
    assert not [f for f in seen if "rand" in f.__name__]
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, y.detach())


def test_hooks_can_tell_a_proof_from_the_models_own_backward() -> None:
    x, scope, seen = leaf(N, D), Scope(N), []
    y = x * 1
    y.register_hook(lambda _: seen.append(scope.is_pulling_back))
    z = y.square()
    assert keeps_apart(z, scope.samples(0), [(x, scope.samples(0))]) == "apart"
    assert is_total(z.sum(), [(x, scope.samples(0))])
    assert seen
    assert all(seen)
    seen.clear()
    z.sum().backward()
    assert seen == [False]


# -- layouts that a shape allows, and the one that is proved


def test_candidates_have_the_size_of_the_batch_and_those_behind_come_first() -> None:
    scope = Scope(N)
    second, owners = scope.samples(1), Owners(scope, 0, torch.tensor([0, 1, 1, 2]))
    found = candidates(torch.zeros(N, N, 2 * N, 5), [second], scope)
    assert found[0] == second
    assert found == [
        second,
        scope.samples(0),
        scope.samples(2, 1, 2),
        scope.samples(2, 2, 1),
    ]
    found = candidates(torch.zeros(4, 5), [owners], scope)
    assert found == [owners]
    assert candidates(torch.zeros(4, 0), [second], scope) == []


def prove(
    function: Callable[[Tensor], Tensor], x: Tensor, hint: Any = None
) -> tuple[Any, str, Scope]:
    scope = Scope(N)
    layout, said = proved(function(x), [(x, scope.samples(0))], scope, hint and hint(scope))
    return layout, said, scope


def test_the_one_layout_that_holds_is_proved() -> None:
    layout, said, scope = prove(lambda x: x.t(), leaf(N, 4))
    assert (layout, said) == (scope.samples(1), "apart")
    layout, said, scope = prove(lambda x: x.reshape(-1), leaf(N, 4))
    assert (layout, said) == (scope.samples(0, 1, 4), "apart")
    layout, said, scope = prove(lambda x: x.t().reshape(-1), leaf(N, 4))
    assert (layout, said) == (scope.samples(0, 4, 1), "apart")
    layout, said, scope = prove(lambda x: x.t(), leaf(N, N))  # both dimensions have the size
    assert (layout, said) == (scope.samples(1), "apart")


def test_of_several_layouts_that_hold_none_is_proved_without_a_hint() -> None:
    def diagonal(x: Tensor) -> Tensor:
        return torch.diag_embed(x[:, 0])  # element (n, n) needs sample n, by both dimensions

    layout, said, _ = prove(diagonal, leaf(N, D))
    assert layout is None
    assert said == "unknown"
    for dim in (0, 1):
        layout, said, scope = prove(diagonal, leaf(N, D), lambda s, dim=dim: s.samples(dim))
        assert (layout, said) == (scope.samples(dim), "apart")


def test_a_hint_that_does_not_hold_is_not_taken() -> None:
    layout, said, scope = prove(lambda x: x.t(), leaf(N, N), lambda s: s.samples(0))
    assert (layout, said) == (scope.samples(1), "apart")
    layout, said, _ = prove(lambda x: x.softmax(0), leaf(N, D), lambda s: s.samples(0))
    assert (layout, said) == (None, "mixed")
    layout, said, scope = prove(lambda x: x * 2, leaf(N, D), lambda s: s.constant())
    assert (layout, said) == (scope.samples(0), "apart")


def test_a_thin_proof_says_so() -> None:
    layout, said, scope = prove(lambda x: (x - 100).relu(), leaf(N, D))
    assert (layout, said) == (scope.samples(0), "thin")


def test_mixed_samples_have_no_layout() -> None:
    assert prove(lambda x: x.softmax(0), leaf(N, D))[:2] == (None, "mixed")
    hidden = torch.ones(N, N, dtype=torch.float64)
    hidden[:, 0] = torch.nan
    assert prove(lambda x: hidden @ x, leaf(N, D))[:2] == (None, "mixed")


def test_without_elements_any_layout_is_right() -> None:
    layout, said, scope = prove(lambda x: x[:, :0] * 1, leaf(N, N))
    assert layout == scope.samples(0)
    assert said == "thin"


def test_without_a_candidate_the_samples_are_unknown_and_not_mixed() -> None:
    assert prove(lambda x: torch.cat([x, x[:1]]), leaf(N, D))[:2] == (None, "unknown")


def test_a_result_without_a_place_for_samples_has_no_layout() -> None:
    layout, _, _ = prove(lambda x: x.sum(), leaf(N, D))
    assert layout is None


# -- sums over samples

TOTALS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "mean of functions": lambda x: x.exp().mean(),
    "sum of products within samples": lambda x: (x[:, 0] * x[:, 1]).sum(),
    "one row less": lambda x: x[1:].square().sum(0),
    "weighted": lambda x: torch.arange(N).double() @ x.sin(),
}
NO_TOTALS: dict[str, Callable[[Tensor], Tensor]] = {
    "log-sum-exp": lambda x: x.logsumexp(0),
    "product": lambda x: x.prod(),
    "square of the sum": lambda x: x.sum() ** 2,
    "norm": lambda x: x.norm(),
    "variance": lambda x: x.var(0),
    "product of two samples": lambda x: x[0] @ x[1],
}


@pytest.mark.parametrize("name", TOTALS)
def test_sums_over_samples_are_totals(name: str) -> None:
    x, scope = leaf(N, D), Scope(N)
    assert is_total(TOTALS[name](x), [(x, scope.samples(0))])


@pytest.mark.parametrize("name", NO_TOTALS)
def test_what_combines_samples_in_another_way_is_no_total(name: str) -> None:
    x, scope = leaf(N, D), Scope(N)
    assert not is_total(NO_TOTALS[name](x), [(x, scope.samples(0))])


def test_two_sources_that_meet_are_no_total() -> None:
    scope, x, w = Scope(N), leaf(N, D), leaf(N, D)
    sources: Any = [(x, scope.samples(0)), (w, scope.samples(0))]
    assert is_total((x * w).sum(), sources)
    assert not is_total((x * w.flip(0)).sum(), sources)


class KeepsNumbers(torch.autograd.Function):
    """log Σ exp over the batch; its backward has no graph to the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.softmax(0))
        return x.logsumexp(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class OnceDifferentiable(KeepsNumbers):
    backward = staticmethod(once_differentiable(KeepsNumbers.backward))


@pytest.mark.parametrize("function", [KeepsNumbers, OnceDifferentiable])
def test_a_function_of_python_has_no_second_derivative_to_believe(function: Any) -> None:
    x, scope = leaf(N, D), Scope(N)
    assert not is_total(function.apply(x).sum(), [(x, scope.samples(0))])
    # Behind the sources it does not matter.
    use = function.apply(x).expand(N, D) * 1
    note(use, scope.samples(0))
    found = found_behind(use.square().sum(), scope)
    assert found is not None
    assert is_total(use.square().sum(), found)


def test_without_a_source_nothing_is_a_total() -> None:
    assert not is_total(leaf(N).sum(), [])


# -- notes on the graph


def noted(scope: Scope, x: Tensor | None = None) -> Tensor:
    """A use of a weight, as a rule makes it."""
    use = (leaf(N, D) if x is None else x) * 1
    note(use, scope.samples(0))
    return use


def found_behind(t: Tensor, scope: Scope) -> list[Source] | None:
    """The uses behind a tensor, none of which is packed."""
    found, is_packed = sources_of(t, scope)
    assert not is_packed
    return found


def places(t: Tensor, scope: Scope) -> list[Samples | Owners]:
    found = found_behind(t, scope)
    assert found is not None
    return [layout for _, layout in found]


def test_uses_are_found_behind_any_functions_once_each() -> None:
    scope = Scope(N)
    a, b = noted(scope), noted(scope)
    assert places((a.exp() @ b.t()).sum() + a.sum(), scope) == [scope.samples(0)] * 2
    assert places(a, scope) == [scope.samples(0)]
    assert found_behind(leaf(N, D).exp(), scope) == []
    assert found_behind(torch.zeros(2), scope) == []


def test_sources_are_places_to_differentiate_by() -> None:
    scope = Scope(N)
    a = noted(scope)
    y = a.sin().t().reshape(-1)
    found = found_behind(y, scope)
    assert found is not None
    layout, said = proved(y, found, scope)
    assert (layout, said) == (scope.samples(0, D, 1), "apart")
    ((edge, _),) = found
    (grad,) = torch.autograd.grad(y.sum(), [edge], retain_graph=True)  # type: ignore[list-item]
    torch.testing.assert_close(grad, a.detach().cos())


def test_what_is_behind_a_use_is_not_looked_at() -> None:
    scope = Scope(N)
    assert len(places(noted(scope, noted(scope).exp()), scope)) == 1


def test_a_use_with_packed_tensors_says_so() -> None:
    scope = Scope(N)
    use = leaf(N, D) * 1
    note(use, scope.samples(0), is_packed=True)
    found, is_packed = sources_of(use.exp() + noted(scope), scope)
    assert is_packed
    assert found is not None
    assert [layout for _, layout in found] == [scope.samples(0)] * 2
    assert sources_of(use.exp(), Scope(N)) == ([], False)


def test_notes_of_another_scope_mean_nothing() -> None:
    scope = Scope(N)
    assert found_behind(noted(Scope(N)).exp(), scope) == []
    # ... and do not hide what is behind them.
    inner = noted(scope)
    outer = inner * 1
    note(outer, Scope(N).samples(0))
    assert len(places(outer, scope)) == 1


def test_outputs_of_one_node_have_notes_of_their_own() -> None:
    scope = Scope(N)
    first, second = leaf(2, N, D).unbind(0)
    note(first, scope.samples(0))
    note(second, scope.samples(1, 1, 1))
    assert places(first.exp(), scope) == [scope.samples(0)]
    assert places(second.exp(), scope) == [scope.samples(1)]


def test_a_use_that_has_lost_its_samples_leaves_nothing_to_prove() -> None:
    scope = Scope(N)
    use = leaf(N, D).exp()
    note(use, scope.lost("any reason"))
    assert found_behind(use.sin() + noted(scope), scope) is None


def test_uses_are_found_through_views_and_writes_in_place() -> None:
    scope = Scope(N)
    use = noted(scope)
    buffer = torch.zeros(2, N, D, dtype=torch.float64)
    view = buffer[1]
    view.copy_(use)
    assert len(places(buffer, scope)) == 1
    assert len(places(buffer[0], scope)) == 1  # by the graph: none of its numbers is of the use
    assert len(places(view, scope)) == 1
    other = noted(scope)
    buffer[0] += other
    assert len(places(buffer, scope)) == 2
    layout, said = proved(buffer, found_behind(buffer, scope) or [], scope)
    assert (layout, said) == (scope.samples(1), "apart")
    buffer[1] = buffer[1].flip(0)
    assert proved(buffer, found_behind(buffer, scope) or [], scope) == (None, "mixed")


def test_a_note_on_a_base_speaks_of_its_result() -> None:
    scope = Scope(N)
    base = leaf(N * 2, D).exp()  # as of `F.linear`, whose result (N, 2, D) is a view of it
    note(base, scope.samples(0), torch.Size([N, 2, D]))
    assert places(base.view(N, 2, D), scope) == [scope.samples(0, 1, 2)]
    lost = leaf(5, D).exp()
    note(lost, scope.samples(1), torch.Size([2, N, 5, D]))
    assert found_behind(lost.sin(), scope) is None


def test_a_note_on_a_leaf_is_none() -> None:
    scope, x = Scope(N), leaf(N, D)
    note(x, scope.samples(0))
    assert found_behind(x * 2, scope) == []


def test_a_lost_layout_is_no_layout_for_a_source() -> None:
    scope = Scope(N)
    assert isinstance(scope.lost("any"), Lost)
    assert candidates(torch.zeros(4, 5), [], scope) == []


def test_rows_out_of_order_behind_a_reentrant_checkpoint_are_refused_with_the_way_out() -> None:
    class Flipping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            call = super().forward
            return checkpoint(lambda h: call(h.flip(0)), call(x), use_reentrant=True)

    with pytest.raises(MixedSamplesError, match="use_reentrant=False"):
        pergrad.norms(Flipping(3, 3), lambda model, x: model(x).sum(1), torch.randn(4, 3))
