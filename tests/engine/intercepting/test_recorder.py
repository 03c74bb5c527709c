"""The recorder: every rung gives the gradients of the loop, backwards are told apart, refusals say why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.engine.collecting import ledger
from pergrad.engine.intercepting import recorder as module
from pergrad.engine.intercepting.journal import Journal
from pergrad.engine.intercepting.recorder import Recorder
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.recording import recorded
from pergrad.engine.samples.sizes import BatchSize
from pergrad.errors import PergradError, UnsupportedFunctionError
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import Case, Formula, assert_exact, numbers, of

D = 4


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)  # type: ignore[no-any-return]


def model_of(function: Callable[..., Any]) -> Any:
    torch.manual_seed(0)
    return Formula(function, w=numbers(D, D), v=numbers(D))


def linear(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.w, m.v)


def assert_all_near(
    found: dict[str, Tensor], expected: dict[str, Tensor], times: float = 1
) -> None:
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        assert_near(found[name], times * rows, name)


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


def reshapes_by_size(m: Any, x: Tensor) -> Tensor:
    assert isinstance(x.size(0), BatchSize)
    assert isinstance(x.size(dim=-2), BatchSize)
    assert isinstance(x.size()[0], BatchSize)
    assert not isinstance(x.size(1), BatchSize)
    assert isinstance(len(x), int)
    return F.linear(x.view(x.size(0), 2, -1), m.w[:, :2]).reshape(x.size(dim=0), -1)


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


WAYS = [
    linear,
    rows_by_index,
    repeated,
    repeated_several_times,
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


def test_sizes_read_off_the_samples_remember_what_they_count() -> None:
    model = model_of(reshapes_by_size)
    with pergrad.record(model, pergrad.Norms()):
        model(numbers(D, D)).sum().backward()


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


# -- before the beginning, and what is no use


def test_functions_pass_by_until_the_recording_begins() -> None:
    w = nn.Parameter(numbers(D, D))
    recorder = Recorder({"w": w})
    assert not recorder.wants_function((w,), {})
    with recorder:
        y = F.linear(x := numbers(3, D), w)
        assert type(y.shape[0]) is int
        y.sum().backward()
    assert torch.equal(w.grad, x.sum(0).expand(D, D))  # type: ignore[arg-type]


def test_an_autograd_function_is_wanted_if_it_uses_a_weight_and_gradients_are_enabled() -> None:
    asked: list[bool] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(numbers(D))

        def forward(self, x: Tensor) -> Tensor:
            asked.append(current[0].wants_function((x, [self.w]), {}))
            asked.append(current[0].wants_function((x,), {"w": self.w}))
            asked.append(current[0].wants_function((x,), {}))
            with torch.no_grad():
                asked.append(current[0].wants_function((x, self.w), {}))
            return x * self.w

    current: list[Any] = []
    begin = Recorder.begin

    def watched(self: Recorder, *args: Any) -> None:
        current.append(self)
        begin(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "begin", watched)
        pergrad.grads(Model(), squares, numbers(3, D))
    assert asked == [True, True, False, False]


# -- backwards


def test_all_ways_to_run_a_backward_give_the_gradients_of_the_loop() -> None:
    x = numbers(D, D)
    cotangent = numbers(D, D)
    for way in (
        lambda y: y.backward(cotangent),
        lambda y: y.backward(gradient=cotangent),
        lambda y: torch.autograd.backward(y, cotangent),
        lambda y: torch.autograd.backward([y], grad_tensors=[cotangent]),
        lambda y: (y * cotangent).sum().backward(),
        lambda y: torch.autograd.backward(tensors=(y * cotangent).sum()),
        lambda y: y.backward(cotangent, inputs=None),
    ):
        for quantity in (pergrad.Grads(), pergrad.ClippedSum(max_norm=1e9, memory="low")):
            model = model_of(linear)
            try:
                with pergrad.record(model, quantity):
                    way(model(x))
            except TypeError:
                assert isinstance(quantity, pergrad.ClippedSum)  # `tensors` by name
                continue
            expected = loop_grads(model, lambda m, x, c: (m(x) * c).sum(), x, cotangent)
            if isinstance(quantity, pergrad.ClippedSum):
                expected = {name: rows.sum(0) for name, rows in expected.items()}
            assert_all_near(quantity.result, expected)


@pytest.mark.parametrize("memory", ["low", "kept"])
def test_gradients_of_some_tensors_leave_ours_and_our_passes_alone(memory: Any) -> None:
    model, x = model_of(linear), numbers(D, D).requires_grad_()
    clipped = pergrad.ClippedSum(max_norm=0.5, memory=memory)
    with pergrad.record(model, clipped):
        total = squares(model, x).sum()
        (of_input,) = torch.autograd.grad(total, [x], retain_graph=True)
        total.backward(inputs=[x], retain_graph=True)
        torch.autograd.backward(total, inputs=[x], retain_graph=True)
        total.backward()
    (expected_of_input,) = torch.autograd.grad(squares(model, x).sum(), x)
    assert_near(of_input, expected_of_input)
    assert_near(x.grad, 3 * expected_of_input)
    rows = loop_grads(model, squares, x.detach())
    norms = torch.cat([g.flatten(1) for g in rows.values()], 1).norm(dim=1)
    weights = (0.5 / norms).clamp(max=1)
    assert_all_near(
        clipped.result, {n: torch.einsum("n,n...->...", weights, g) for n, g in rows.items()}
    )


def test_an_error_in_a_backward_for_others_does_not_leave_the_ledger_paused() -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("stop")

    model, x = model_of(linear), numbers(D, D).requires_grad_()
    with pergrad.record(model, pergrad.Grads()) as grads:
        total = squares(model, x).sum()
        handle = x.register_hook(fail)
        with pytest.raises(KeyError):
            torch.autograd.grad(total, x, retain_graph=True)
        handle.remove()
        total.backward()
    assert_all_near(grads.result, loop_grads(model, squares, x.detach()))


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_a_step_of_two_passes(reentrant: bool, is_first: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        if not m.training:
            return F.linear(F.linear(x if is_first else F.linear(x, m.w), m.w).tanh(), m.w)
        h = x if is_first else F.linear(x, m.w)  # then no earlier pass runs the checkpoint
        h = checkpoint(lambda h: F.linear(h, m.w), h, use_reentrant=reentrant)
        return F.linear(h.tanh(), m.w)

    model, x = model_of(forward), numbers(D, D).requires_grad_()
    clipped = pergrad.ClippedSum(max_norm=0.5, memory="low")

    def step() -> None:
        with pergrad.record(model, clipped):
            squares(model, x).sum().backward()

    if reentrant:
        with pytest.raises(PergradError, match='or use memory="kept"'):
            step()
        return
    step()
    rows = loop_grads(model.eval(), squares, x.detach())
    norms = torch.cat([g.flatten(1) for g in rows.values()], 1).norm(dim=1)
    weights = (0.5 / norms).clamp(max=1)
    assert_near(clipped.result["w"], torch.einsum("n,n...->...", weights, rows["w"]))


def test_a_reentrant_checkpoint_without_a_weight_is_allowed_in_a_step_of_two_passes() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.linear(checkpoint(torch.tanh, x, use_reentrant=True), m.w)

    model, x = model_of(forward), numbers(D, D).requires_grad_()
    with pergrad.record(model, pergrad.ClippedSum(max_norm=1e9, memory="low")) as total:
        squares(model, x).sum().backward()
    expected = loop_grads(model_of(lambda m, x: F.linear(x.tanh(), m.w)), squares, x.detach())
    assert_near(total.result["w"], expected["w"].sum(0))


def test_an_error_in_an_earlier_pass_is_the_callers_own() -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("stop")

    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.linear(x, m.w)
        h.register_hook(fail)
        return F.linear(h, m.w)

    model = model_of(forward)
    with (
        pytest.raises(KeyError, match="stop"),
        pergrad.record(model, pergrad.ClippedSum(max_norm=1.0, memory="low")),
    ):
        squares(model, numbers(3, D)).sum().backward()


def test_other_leaves_get_their_gradient_once_in_a_step_of_two_passes() -> None:
    model, x = model_of(linear), numbers(D, D).requires_grad_()
    with pergrad.record(model, pergrad.ClippedSum(max_norm=1.0, memory="low")):
        squares(model, x).sum().backward()
    (expected,) = torch.autograd.grad(squares(model, x).sum(), x)
    assert_near(x.grad, expected)


def test_nothing_waits_longer_than_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_is_bound_by_python", lambda _: True)
    model, x = model_of(linear), numbers(D, D)
    expected = loop_grads(model, squares, x)
    with pergrad.record(model, pergrad.Grads()) as grads:
        squares(model, x).sum().backward()
        x.zero_()  # the next batch is read into the same memory
    assert_all_near(grads.result, expected)


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
