"""Functions of weights: every rung gives the gradients of the loop, and refusals say why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.engine.collecting.journal import Journal
from pergrad.engine.intercepting import weight_calls as module
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.recording import recorded
from pergrad.errors import PergradError, UnsupportedFunctionError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Case, Formula, assert_exact, numbers, of
from tests.engine.intercepting.formulas import (
    D,
    assert_all_near,
    linear,
    model_of,
    reshapes_by_size,
    squares,
)

# -- which rung


def rows_by_index(m: Any, x: Tensor) -> Tensor:
    return m.v[x.argmax(1)].unsqueeze(1) * x


def repeated(m: Any, x: Tensor) -> Tensor:
    token = m.v.view(1, 1, D)
    b = x.shape[0]
    parts = [
        token.expand(b, 2, D),
        token.repeat(b, 2, 1),
        token.tile((b, 1, 1)),
        token.broadcast_to(b, 1, D),
        torch.broadcast_to(token, (b, 1, D)),
        token.expand(size=(b, 1, -1)),
        m.w.unsqueeze(0).expand_as(x.unsqueeze(1).expand(-1, D, -1)),
    ]
    return torch.cat(parts, 1) * x.unsqueeze(1)


def repeated_several_times(m: Any, x: Tensor) -> Tensor:
    b = x.size(0)
    return m.v.unsqueeze(0).repeat(3 * b, 1).view(b, 3, D) * x.unsqueeze(1)


def repeated_by_untagged_sizes(m: Any, x: Tensor) -> Tensor:
    """As einops does, whose cached sizes are plain."""
    b, row = int(x.shape[0]), m.w.unbind(0)[1]
    joined = torch.cat([row.expand(b, 2, D), x.unsqueeze(1)], dim=1)
    stacked = torch.stack([m.v.unsqueeze(1).expand(D, b).t(), x], 1)
    windows = torch.cat([m.v.expand(2 * b, 1, D), x.repeat_interleave(2, 0).unsqueeze(1)], 1)
    return torch.cat([joined, stacked, windows.reshape(b, 4, D)], 1) ** 3


def several_results(m: Any, x: Tensor) -> Tensor:
    values, _ = torch.max(x.unsqueeze(1) * m.w, dim=-1)
    q, _ = torch.sort(x + m.v, dim=-1)
    return values + q


def weights_only(m: Any, x: Tensor) -> Tensor:
    w = torch.linalg.qr(m.w)[0] + m.w.unbind(0)[1].outer(m.v)
    return x @ w + torch.stack([m.v, m.v]).sum(0)


def casts(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.w.to(x), m.v.type_as(x)) + x.to(m.v) * m.w.to(x.dtype)[0]


def no_rung_but_vmap(m: Any, x: Tensor) -> Tensor:
    return torch.linalg.cross(x[:, :3], m.v[:3].unsqueeze(0), dim=-1) * m.w[0, 0]


def with_a_constant(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.w * torch.arange(D, dtype=x.dtype)) + torch.ones(D, dtype=x.dtype) * m.v


def without_gradients_first(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = F.linear(x, m.w).abs().sum(1, keepdim=True)
        rows = m.w.sum()
    return F.linear(x, m.w) * scale * rows


def the_weight_as_it_was(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        same = m.w.double()
    assert same is m.w
    return F.linear(x, same)


def helpers_that_ask_for_overrides(m: Any, x: Tensor) -> Tensor:
    samples, weights = torch.meshgrid(x[:, 0], m.v, indexing="ij")
    return samples * weights


WAYS = [
    linear,
    helpers_that_ask_for_overrides,
    rows_by_index,
    repeated,
    repeated_several_times,
    repeated_by_untagged_sizes,
    several_results,
    weights_only,
    casts,
    no_rung_but_vmap,
    with_a_constant,
    reshapes_by_size,
    without_gradients_first,
    the_weight_as_it_was,
]


@pytest.mark.parametrize("size", [1, 3, D])
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__.replace("_", " "))
def test_gradients_are_those_of_the_loop(way: Callable[..., Tensor], size: int) -> None:
    if way is reshapes_by_size:  # not where the loop or the contract calls it

        def way(m: Any, x: Tensor) -> Tensor:
            return F.linear(x.view(x.size(0), 2, -1), m.w[:, :2]).reshape(x.size(dim=0), -1)

    assert_exact(Case(lambda: model_of(way), of((D,))), size)


@pytest.mark.parametrize(
    ("function", "rung"),
    [
        (linear, "rule"),
        (lambda m, x: F.linear(x, m.w.exp()), "derived"),
        (lambda m, x: m.v.expand(x.shape[0], D) * x, "expanded"),
        (lambda m, x: torch.hypot(x, m.v), "broadcast"),
        (no_rung_but_vmap, "vmap"),
    ],
    ids=["rule", "derived", "expanded", "broadcast", "vmap"],
)
def test_every_use_is_noted_on_its_rung_in_the_first_step_and_the_next(
    function: Callable[..., Tensor], rung: str
) -> None:
    for _ in range(2):
        model, journal = model_of(function), Journal()
        with recorded(model, [pergrad.Norms()], Options(), journal=journal):
            model(numbers(3, D)).sum().backward()
        assert rung in {r for uses in journal.uses.values() for _, r in uses}


def test_vmap_that_gives_other_values_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    vmap = module.by_vmap

    def wrong(*args: Any) -> Any:
        found = vmap(*args)
        return None if found is None else [t * 2 for t in found]

    monkeypatch.setattr(module, "by_vmap", wrong)
    model, x, journal = model_of(no_rung_but_vmap), numbers(3, D), Journal()
    grads = pergrad.Grads()
    with recorded(model, [grads], Options(), journal=journal):
        squares(model, x).sum().backward()
    assert_all_near(grads.result, loop_grads(model, squares, x))
    assert "masked VJP" in {rung for uses in journal.uses.values() for _, rung in uses}


# -- refusals


def refuses(forward: Callable[..., Any], match: str, loss: Any = None) -> None:
    model, x = model_of(forward), numbers(3, D)
    total = loss or (lambda _, y: y.sum())
    with pytest.raises(PergradError, match=match), pergrad.record(model, pergrad.Norms()):
        total(model, model(x)).backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_weight_penalty_belongs_to_no_sample() -> None:
    refuses(
        linear,
        "depends only on parameter w",
        loss=lambda m, y: y.square().sum() + (y.sum() * 0 + m.w.square().sum()),
    )


def test_samples_that_meet_a_weight_after_they_were_mixed_are_refused() -> None:
    refuses(lambda m, x: (x * m.v).cumsum(0) * m.v, "samples")
    refuses(lambda m, x: torch.hypot((x * m.v).cumsum(0), m.v), "samples")


def test_what_is_refused_may_be_looked_at() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        seen.append(torch.hypot((x * m.v).cumsum(0), m.v).sum().item())
        return F.linear(x, m.w, m.v)

    seen: list[float] = []
    model, x = model_of(forward), numbers(3, D)
    found = pergrad.grads(model, squares, x)
    expected = torch.hypot((x * model.v).cumsum(0), model.v).sum().item()
    assert seen[0] == pytest.approx(expected)
    assert_all_near(found, loop_grads(model_of(linear), squares, x))


def test_a_reentrant_checkpoint_that_takes_a_weight_is_refused() -> None:
    refuses(
        lambda m, x: checkpoint(F.linear, x.requires_grad_(), m.w, use_reentrant=True),
        "pass use_reentrant=False",
    )


def test_a_derived_weight_used_out_of_sight_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.w * 2
        with torch._C.DisableTorchFunction():
            hidden = F.linear(x, w)
        return hidden + F.linear(x, m.w)

    refuses(forward, "an ordinary gradient, .*reached parameter 'w'")


def test_integers_made_of_a_weight_and_samples_need_no_gradient() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        picked = torch.bucketize(x, m.v.detach().sort().values)
        signs = (x.unsqueeze(1) * m.w).argmax(-1)
        larger = torch.gt(x, m.v)
        return F.linear(x, m.w) * (picked + signs + larger)

    assert_exact(Case(lambda: model_of(forward), of((D,))), 3)


def test_refusals_name_the_function_and_all_parameters() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.hypot(x.new_ones(3, D).cumsum(0) * (x * m.v).cumsum(0), m.v)

    model = model_of(forward)
    with pytest.raises(PergradError) as caught, pergrad.record(model, pergrad.Norms()):
        model(numbers(3, D)).sum().backward()
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, PergradError | UnsupportedFunctionError)
    assert "cumsum" in str(caught.value)


def test_a_penalty_names_its_parameter_and_says_what_to_do() -> None:
    refuses(
        linear,
        "depends only on parameter v, .* leave it out of this loss and add its gradient yourself",
        loss=lambda m, y: y.square().sum() + (y.sum() * 0 + m.v.exp().sum()),
    )


def test_a_refused_result_keeps_its_structure_and_values() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        values, index = torch.sort((x * m.v).cumsum(0) * m.v, dim=0)
        seen.append((values, index))
        return F.linear(x, m.w)

    seen: list[tuple[Tensor, Tensor]] = []
    model, x = model_of(forward), numbers(3, D)
    found = pergrad.grads(model, squares, x)
    expected = torch.sort((x * model.v).cumsum(0) * model.v, dim=0)
    assert_near(seen[0][0].detach(), expected.values)
    assert torch.equal(seen[0][1], expected.indices)
    assert_near(found["w"], loop_grads(model_of(lambda m, x: F.linear(x, m.w)), squares, x)["w"])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_weight_repeated_along_a_later_dimension_has_the_gradients_of_the_loop(size: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        b = x.shape[0]
        wide = (
            m.v.view(D, 1).expand(D, b).t()
            + m.v.view(D, 1).repeat(1, 2 * b).t().view(b, 2, D)[:, 0]
        )
        return wide * x + m.v.unsqueeze(0).expand_as(x) * m.w[0]

    assert_exact(Case(lambda: model_of(forward), of((D,))), size)


def test_a_view_of_a_derived_weight_may_be_changed() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.w * 2
        w[0].mul_(m.v)
        return F.linear(x, w)

    assert_exact(Case(lambda: model_of(forward), of((D,))), 3)


def test_a_buffer_filled_with_a_weight_becomes_that_weight() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        buffer = torch.zeros(D, D, dtype=x.dtype)
        buffer.copy_(m.w)
        assert buffer.tolist() == m.w.tolist()  # for code that torch does not show us
        buffer.mul_(2)
        y = torch.zeros_like(x)
        y.add_(m.v)
        y.mul_(x)
        return F.linear(x, buffer) * y

    assert_exact(Case(lambda: model_of(forward), of((D,))), 3)
    model, x = model_of(forward), numbers(3, D)
    with pergrad.record(model, pergrad.Norms()):
        y = model(x)
        y.sum().backward()
    assert_near(y.detach(), forward(model, x).detach())


def test_graphs_that_saw_a_derived_weight_before_it_was_changed_keep_its_value() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.w * 1
        before = F.linear(x, w)
        w.mul_(3)
        return before * F.linear(x, w)

    def pure(m: Any, x: Tensor) -> Tensor:
        return F.linear(x, m.w) * F.linear(x, m.w * 3)

    x = numbers(3, D)
    assert_all_near(
        pergrad.grads(model_of(forward), squares, x), loop_grads(model_of(pure), squares, x)
    )


def test_a_weight_repeated_for_the_batch_and_joined_needs_no_pass_for_each_sample() -> None:
    model = model_of(repeated_by_untagged_sizes)
    report = pergrad.explain(model, lambda m, x: m(x).flatten(1).sum(1), numbers(3, D))
    assert {row.rung for row in report.rows if row.rung} == {"expanded"}


def test_rows_of_a_parameter_that_share_their_memory_keep_their_own_gradients() -> None:
    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Parameter(torch.ones(1, 2, dtype=torch.float64).expand(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.rows, x], 1)

    x = numbers(3, 2)
    found = pergrad.grads(Shared(), lambda m, x: (m(x) ** 2).sum(1), x)["rows"]
    assert_near(found, 2 * torch.eye(3, dtype=x.dtype).unsqueeze(2).expand(3, 3, 2))


def test_a_module_that_runs_one_sample_after_the_other_is_told_to_give_the_batch_size() -> None:
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    with (
        pytest.raises(
            UnsupportedFunctionError, match="one sample after the other, pass batch_size="
        ),
        pergrad.record(model, pergrad.Norms()),
    ):
        sum(model(x[n : n + 1]).sum() for n in range(4)).backward()
    norms = pergrad.Norms()
    with pergrad.record(model, norms, batch_size=4):
        sum(model(x[n : n + 1]).sum() for n in range(4)).backward()
    assert norms.result.shape == (4,)


OUT_OF_SIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "a list": lambda x: torch.tensor(x.tolist(), dtype=x.dtype),
    "numpy": lambda x: torch.from_numpy(x.numpy() * 2),
    "unique": lambda x: x.unique(dim=0),
}


@pytest.mark.parametrize("way", OUT_OF_SIGHT)
def test_data_made_out_of_sight_is_refused_by_the_function_that_got_it(way: str) -> None:
    layer = torch.nn.Linear(3, 2).double()
    model = Formula(lambda m, x: m.layer(OUT_OF_SIGHT[way](x)).exp(), layer=layer)
    says = (
        r"linear` got a tensor of shape \(4, 3\) beside parameters 'layer.weight' and 'layer.bias', "
        r".*samples are unknown.*pass this tensor"
    )
    with pytest.raises(PergradError, match=says), pergrad.record(model, pergrad.Norms()):
        model(numbers(4, 3)).sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_differentiation_is_refused() -> None:
    model, x = model_of(linear), numbers(3, D)
    with (
        forward_ad.dual_level(),
        pytest.raises(UnsupportedFunctionError, match="forward-mode differentiation"),
        pergrad.record(model, pergrad.Norms()),
    ):
        model(forward_ad.make_dual(x, torch.ones_like(x))).sum().backward()


def test_strides_of_a_call_are_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    strides_of = module.WeightCalls._strides_of

    def counted(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        found.append(func)
        return strides_of(self, func, args, kwargs)

    monkeypatch.setattr(module.WeightCalls, "_strides_of", counted)
    model, x = Formula(lambda m, x: m.w @ x.mT, w=numbers(D, D)), numbers(3, D, D)
    for _ in range(3):
        pergrad.norms(model, lambda m, x: m(x).flatten(1).sum(1), x)
    assert len(found) == 1
