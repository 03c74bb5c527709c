"""Caches filled by one step are right for the next, however the two differ."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.engine.intercepting import rule_calls, tracker
from pergrad.engine.samples.layouts import Scope
from pergrad.engine.samples.signatures import describe
from pergrad.engine.samples.sizes import BatchSize
from pergrad.errors import PergradError
from pergrad.rules import RULES
from pergrad.runtime.caches import Cache
from pergrad.testing import assert_near as _assert_near
from pergrad.testing import loop_grads


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, g in found.items():
        _assert_near(g, expected[name], name)


def data(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


class Model(nn.Module):
    """A call site of every kind: with rules, without, reshapes by the batch size, an in-place write."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, 6)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.rand(6))
        self.second = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.first(x)), inplace=True) * self.scale
        h = h.reshape(x.shape[0], -1, 6).flatten(0, 1)
        return self.second(h).view(x.shape[0], -1)


def squares(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (model(x) ** 2).flatten(1).sum(1)


def agrees(model: nn.Module, x: Tensor, loss: Callable[..., Tensor] = squares) -> None:
    found = pergrad.grads(model, loss, x)
    assert_near(found, loop_grads(model, loss, x))


def forget() -> None:
    for memory in (tracker._LAYOUTS, tracker._TAGGED, rule_calls._PLANS):
        memory.clear()


SHAPES = [(5, 4), (5, 3, 4), (3, 5, 4), (4, 4), (4, 4, 4), (1, 4), (1, 3, 4), (2, 2, 2, 4)]


@pytest.mark.parametrize("second", SHAPES, ids=str)
@pytest.mark.parametrize("first", SHAPES, ids=str)
def test_other_shapes_and_batch_sizes(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    forget()
    model = Model().double()
    for shape in (first, second, first):
        agrees(model, data(*shape))


def test_samples_elsewhere() -> None:
    """The same tensors, the samples now in the second dimension."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = data(5, 5, 4)
    for batch_first in (True, False, True):
        found = pergrad.grads(
            model, lambda m, x: (m(x) ** 2).sum(), x, batch_first=batch_first, batch_size=5
        )
        rows = x if batch_first else x.transpose(0, 1)
        assert_near(found, loop_grads(model, squares, rows))


def test_other_dtype() -> None:
    model = Model()
    for dtype in (torch.float64, torch.float32, torch.float64):
        model.to(dtype)
        found = pergrad.grads(model, squares, data(5, 3, 4, dtype=dtype))
        assert all(g.dtype == dtype for g in found.values())
    agrees(model, data(5, 3, 4))


def test_real_rule_is_not_used_for_complex_numbers() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).abs().square().sum(1)

    model, x = nn.Linear(4, 3, bias=False).double(), data(5, 4)
    agrees(model, x, loss)
    model.weight = nn.Parameter(model.weight.detach().to(torch.complex128))
    x = torch.complex(x, data(5, 4))
    found, expected = pergrad.grads(model, loss, x), loop_grads(model, loss, x)
    torch.testing.assert_close(found["weight"], expected["weight"])


def test_size_counts_the_samples_of_its_own_step() -> None:
    """Six rows are those of six samples, or two of each of three."""
    for count, post in ((6, 1), (3, 2), (6, 1)):
        follower = tracker.Tracker(Scope(count), 0)
        made, size = torch.zeros(6, 4), BatchSize(6)
        follower.propagate(torch.zeros, (size, 4), {}, made)
        assert follower.layout(made) == follower.scope.samples(0, 1, post)


def test_autocast_is_looked_at_for_each_call() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), data(5, 3, 4, dtype=torch.float32)
    seen: list[torch.dtype] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        seen.append(y.dtype)
        return y.float().square().flatten(1).sum(1)

    expected = loop_grads(model, squares, x)
    for casts in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16) if casts else nullcontext():
            found = pergrad.grads(model, loss, x)
        assert seen.pop() is (torch.bfloat16 if casts else torch.float32)
        tolerance = 0.1 if casts else 1e-5
        for name, g in found.items():
            torch.testing.assert_close(g, expected[name], atol=tolerance, rtol=tolerance)


def test_input_that_begins_or_ceases_to_require_a_gradient() -> None:
    model, x = Model().double(), data(5, 3, 4)
    for needs_grad in (False, True, False):
        agrees(model, x.detach().requires_grad_(needs_grad))


def test_parameter_frozen_and_unfrozen() -> None:
    model, x = Model().double(), data(5, 3, 4)
    for frozen in ("", "first.weight", "second.weight", "norm.bias", ""):
        for name, p in model.named_parameters():
            p.requires_grad_(name != frozen)
        found = pergrad.grads(model, squares, x)
        assert (frozen in found) is False
        assert_near(found, loop_grads(model, squares, x))


def test_parameter_module_and_shape_replaced() -> None:
    model, x = Model().double(), data(5, 3, 4)
    agrees(model, x)
    model.scale = nn.Parameter(data(6))
    agrees(model, x)
    model.second = nn.Linear(6, 7).double()
    agrees(model, x)
    model.first = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.0)).double()
    agrees(model, x)
    model.added = nn.Linear(2, 2).double()
    assert "added.weight" in pergrad.grads(model, squares, x)


def test_plain_arguments_are_part_of_a_signature() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(data(4))
            self.eps = 1e-5
            self.shape: Any = (4,)

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, self.shape, self.weight, eps=self.eps).sum(self.dims, True)

        dims = 1

    model, x = Norm(), data(5, 4, 4)
    for eps, shape, dims in ((1e-5, (4,), 1), (10.0, [4], 1), (1e-5, (4,), 2), (1e-5, [4], 1)):
        model.eps, model.shape, model.dims = eps, shape, dims
        agrees(model, x)


def test_truth_values_and_sizes_of_samples_are_not_numbers() -> None:
    def parts(value: Any) -> list[Any]:
        found: list[Any] = []
        assert describe(value, found)
        return found

    kinds = [parts(value) for value in (1, True, BatchSize(1), slice(1), None, ...)]
    assert all(a != b for k, a in enumerate(kinds) for b in kinds[:k])


@pytest.mark.parametrize("value", [slice(torch.tensor(1), None), torch.Generator(), object()])
def test_what_cannot_be_compared_has_no_signature(value: Any) -> None:
    assert not describe(value, [])


def test_output_of_an_earlier_step_is_no_sample_of_this_one() -> None:
    """Kept as a constant (a target network, a memory), it has B rows but belongs to nobody."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, bias=False)
            self.kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y if self.kept is None else y @ self.kept.t()

    model, x = Remembers().double(), data(4, 4)
    kept: list[Tensor] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        kept.append(y.detach())
        return y.square().sum(1)

    for _ in range(3):
        found = pergrad.grads(model, loss, x)
        assert_near(found, loop_grads(model, squares, x))
        model.kept = kept[0]


def test_rule_registered_anew_is_the_one_that_is_used() -> None:
    model, x = nn.Linear(4, 3, bias=False).double(), data(5, 4)
    before = RULES[F.linear]
    expected = pergrad.grads(model, squares, x)["weight"]
    try:

        @pergrad.implements_per_sample_grads(F.linear)
        def twice(grad_output: Tensor, input: Tensor, weight: Tensor, bias: Any = None) -> Any:
            return {"weight": 2 * torch.einsum("nro,nri->noi", grad_output, input)}

        torch.testing.assert_close(pergrad.grads(model, squares, x)["weight"], 2 * expected)
    finally:
        RULES[F.linear] = before
    torch.testing.assert_close(pergrad.grads(model, squares, x)["weight"], expected)


def test_check_of_a_rule_is_asked_for_each_call() -> None:
    model, x = nn.Linear(4, 3, bias=False).double(), data(5, 4)
    before, asked = RULES[F.linear], []
    try:
        pergrad.implements_per_sample_grads(
            F.linear, weights={"weight": ("input",)}, check=lambda *_: asked.append(1)
        )(before.gradients)
        for _ in range(3):
            agrees(model, x)
    finally:
        RULES[F.linear] = before
    assert len(asked) == 3


def test_memory_is_bounded() -> None:
    memory: Cache[int] = Cache(__name__, "numbers", most=10)
    for k in range(100):
        memory.put((k,), k)
        assert memory.get((k,)) == k
        assert len(memory) <= 10


# -- taps that are hooks


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False)).double()


def test_second_backward_without_retained_graph_is_an_error() -> None:
    model, x = two_layers(), data(5, 4).requires_grad_()
    with pytest.raises(RuntimeError, match="second time"), _recorded(model):
        _backward_twice(model(x).sum())


def _backward_twice(loss: Tensor, **options: Any) -> None:
    loss.backward(**options)
    loss.backward()


def test_second_backward_through_a_retained_graph_adds_up() -> None:
    model, x = two_layers(), data(5, 4).requires_grad_()
    with pergrad.record(model, pergrad.Grads()) as grads:
        _backward_twice(model(x).square().sum(), retain_graph=True)
    expected = {name: 2 * g for name, g in loop_grads(model, squares, x).items()}
    assert_near(grads.result, expected)


def test_argument_changed_in_place_after_the_call_is_an_error() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = two_layers()

        def forward(self, x: Tensor) -> Tensor:
            h = self.layers[0](x)
            y = self.layers[1](h)
            h.detach().mul_(2)
            return y

    with pytest.raises(PergradError, match="changed in place"), _recorded(Changes()) as model:
        model(data(5, 4).requires_grad_()).sum().backward()


def test_output_changed_in_place_still_has_its_gradient() -> None:
    class Writes(nn.Module):
        def __init__(self, bias: bool) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4, bias=bias) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).mul_(2).relu_()
            return x

    for bias in (True, False):  # with one, the output for (n, t, i) is a view
        for shape in ((5, 4), (5, 3, 4)):
            agrees(Writes(bias).double(), data(*shape))


def test_output_written_to_in_part_or_given_a_hook_still_has_its_gradient() -> None:
    def write(y: Tensor) -> None:
        y[..., 0] = 0
        y[..., 1:3].mul_(3)

    def hook(y: Tensor) -> None:
        y.register_hook(lambda g: g * g.cos())

    class Changes(nn.Module):
        def __init__(self, change: Callable[[Tensor], None]) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.change = change

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                y = layer(x)
                self.change(y)
                x = y.tanh()
            return x

    for change in (write, hook):
        for shape in ((5, 4), (5, 3, 4), (5, 2, 3, 4)):
            agrees(Changes(change).double(), data(*shape))


def test_list_among_the_arguments_that_changes_later_changes_no_earlier_plan() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(data(3, 2, 3))
            self.padding = [1]

        def forward(self, x: Tensor) -> Tensor:
            return F.conv1d(x, self.weight, padding=self.padding)

    model, x = Padded(), data(5, 2, 6)
    agrees(model, x)
    earlier = model.padding
    model.padding = [1]
    earlier[0] = 0
    agrees(model, x)


def test_function_that_returns_what_it_made_before() -> None:
    """Its two results are one tensor, and yet two uses of the weight."""
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def remembered(x: Tensor, weight: Tensor) -> Tensor:
        if has_torch_function((x, weight)):
            found: Tensor = handle_torch_function(remembered, (x, weight), x, weight)
            return found
        if id(x) not in made:
            made[id(x)] = x, x * weight
        return made[id(x)][1]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(data(4))

        def forward(self, x: Tensor) -> Tensor:
            made.clear()
            return remembered(x, self.weight) + 3 * remembered(x, self.weight)

    @pergrad.implements_per_sample_grads(remembered)
    def rule(grad_output: Tensor, x: Tensor, weight: Tensor) -> Any:
        return {"weight": (grad_output * x).sum(1)}

    try:
        model, x = Twice(), data(5, 4)
        agrees(model, x)
        agrees(model, x.requires_grad_())
    finally:
        del RULES[remembered]


def test_checkpoint_between_plain_steps_frees_what_it_promises() -> None:
    model, x = two_layers(), data(5, 4).requires_grad_()
    saved: list[int] = []

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False).square().sum(1)

    def pack(t: Tensor) -> Tensor:
        saved.append(t.numel())
        return t

    agrees(model, x)
    agrees(model, x, loss)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        agrees(model, x)
    assert 5 * 6 in saved, "the input of the second layer goes the way of all saved tensors"
    agrees(model, x)


def _recorded(model: nn.Module) -> Any:
    return _Recorded(model)


class _Recorded:
    """`record`, with the module as the block's value."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model.double()
        self._block = pergrad.record(model, pergrad.Grads())

    def __enter__(self) -> nn.Module:
        self._block.__enter__()
        return self._model

    def __exit__(self, *error: Any) -> Any:
        return self._block.__exit__(*error)


def test_a_function_without_a_module_may_have_a_rule() -> None:
    made: dict[str, Any] = {
        "has_torch_function": has_torch_function,
        "handle_torch_function": handle_torch_function,
        "__name__": None,
    }
    exec(
        "def scale(x, weight):\n"
        "    if has_torch_function((x, weight)):\n"
        "        return handle_torch_function(scale, (x, weight), x, weight)\n"
        "    return x * weight\n",
        made,
    )
    scale = made["scale"]
    assert scale.__module__ is None

    @pergrad.implements_per_sample_grads(scale)
    def rule(grad_output: Tensor, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
        return {"weight": (grad_output * x).sum(1)}

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return scale(x, self.weight)

    x = torch.randn(4, 3, dtype=torch.float64)
    found = pergrad.grads(Scale(), lambda model, x: model(x).sum(1), x)
    _assert_near(found["weight"], x)
