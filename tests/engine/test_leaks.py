"""Steps leave nothing behind: no tensor, no class, no memory, although the garbage collector is off."""

import ast
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.errors import PergradError

STEPS = 12


class Model(nn.Module):
    """One weight, used in the way that a test asks for."""

    def __init__(self, use: Callable[["Model", Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.rand(3, 3)), nn.Parameter(torch.rand(3))
        self.linear, self.use = nn.Linear(3, 3), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return t * t

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class Exp(torch.autograd.Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        found = t.exp()
        ctx.save_for_backward(found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * grad


class Times(torch.autograd.Function):
    """Of samples and a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, grad * x


def local_function(m: Model, x: Tensor) -> Tensor:
    class Local(Square):
        pass

    return F.linear(x, Local.apply(m.w))


def written(m: Model, x: Tensor) -> Tensor:
    w = m.w.clone()
    w.mul_(2).add_(1)
    return F.linear(x, w)


def written_through_a_view(m: Model, x: Tensor) -> Tensor:
    w = m.w.clone()
    w[:, 1].mul_(3)
    return F.linear(x, w)


def written_samples(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x)
    h.mul_(m.v)
    h += 1
    return h


USES: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "exp": lambda m, x: F.linear(x, m.w.exp()),
    "tanh, sigmoid, softmax": lambda m, x: F.linear(
        x, (m.w.tanh() + m.w.sigmoid()).softmax(1), m.v.sqrt()
    ),
    "norm, inverse": lambda m, x: F.linear(
        x, torch.linalg.inv(m.w + 4 * torch.eye(3)) / m.w.norm()
    ),
    "max, cumprod": lambda m, x: F.linear(x, m.w.cumprod(1) * m.w.amax(1, keepdim=True)),
    "derived twice": lambda m, x: F.linear(F.linear(x, m.w.exp()), m.w.exp().T.contiguous().exp()),
    "transposed and cast": lambda m, x: x @ m.w.T.double().float(),
    "slices": lambda m, x: F.linear(x, m.w[:2]) @ m.w[1:] + m.v[0],
    "views": lambda m, x: F.linear(x, m.w.view(-1).reshape(3, 3)[:, [2, 0, 1]]),
    "stack, cat": lambda m, x: F.linear(x, torch.stack([m.v, m.v.exp(), m.w[0]])),
    "unused": lambda m, x: (m.w.exp(), m.linear(x))[1],
    "rule": lambda m, x: m.linear(x),
    "broadcast": lambda m, x: m.linear(x) * m.v,
    "without a rule": lambda m, x: torch.hypot(x, m.v) + torch.cdist(x, m.w),
    "expanded": lambda m, x: x + m.v.expand(x.shape[0], -1),
    "Function of a weight": lambda m, x: F.linear(x, Square.apply(m.w)),
    "Function that saves its output": lambda m, x: F.linear(x, Exp.apply(m.w)),
    "Function of samples": lambda m, x: Exp.apply(m.linear(x)),
    "Function of both": lambda m, x: Times.apply(x, m.v),
    "local Function": local_function,
    "written": written,
    "written through a view": written_through_a_view,
    "written samples": written_samples,
    "checkpoint": lambda m, x: checkpoint(m.linear, x, use_reentrant=False).exp(),
    "checkpoint of a derived weight": lambda m, x: checkpoint(
        lambda x: F.linear(x, m.w.exp()), x, use_reentrant=False
    ),
    "reentrant checkpoint": lambda m, x: checkpoint(m.linear, m.linear(x), use_reentrant=True),
}


def mixed(m: Model, x: Tensor) -> Tensor:
    h = m.linear(x) + F.linear(x, m.w.exp())
    return h - h.mean(0)


def fails(m: Model, x: Tensor) -> Tensor:
    h = F.linear(x, m.w.exp())
    raise ValueError("in the forward", h.shape)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("in the backward")


ERRORS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "refused": mixed,
    "in the forward": fails,
    "in the backward": lambda m, x: F.linear(FailsInBackward.apply(F.linear(x, m.w.exp())), m.w),
    "changed after its use": lambda m, x: _changed(m, m.linear(x).exp()),
}


def _changed(m: Model, h: Tensor) -> Tensor:
    out = F.linear(h, m.w)
    h.add_(1)
    return out


def quantities() -> list[pergrad.Quantity]:
    return [pergrad.Norms(), pergrad.ClippedSum(1.0), pergrad.Gram()]


def recorded(model: nn.Module, x: Tensor) -> None:
    with pergrad.record(model, *quantities()):
        model(x).square().sum().backward()


def twice(model: nn.Module, x: Tensor) -> None:
    with pergrad.record(model, pergrad.ClippedSum(1.0, memory="low")):
        model(x).square().sum().backward()


def contract(model: nn.Module, x: Tensor) -> None:
    pergrad.call_for_per_sample_grads(model)(x).square().sum().backward()
    for p in model.parameters():
        p.grad_sample = None  # type: ignore[attr-defined]


WAYS = {"recorded": recorded, "two passes": twice, "contract": contract}


@pytest.fixture(autouse=True, scope="module")
def _without_collector() -> Iterator[None]:
    gc.collect()
    are_frozen = gc.get_freeze_count() > 0
    gc.freeze()  # what is there already is neither counted nor collected, which takes long
    gc.disable()
    yield
    gc.enable()
    if not are_frozen:
        gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def tensors() -> int:
    """Counts the tensors that Python knows of, reachable or in a cycle."""
    return sum([issubclass(type(found), Tensor) for found in gc.get_objects()])


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def grown(step: Callable[[], None]) -> tuple[int, int]:
    """How many tensors are left after some steps: without a collection, and after one."""
    for _ in range(3):
        step()
    gc.collect()
    before = tensors()
    for _ in range(STEPS):
        step()
    uncollected = tensors() - before
    gc.collect()
    return uncollected, tensors() - before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", USES)
def test_steps_leave_no_tensor(name: str, way: str) -> None:
    model, x = Model(USES[name]), torch.rand(4, 3)
    if name == "reentrant checkpoint" and way == "two passes":
        pytest.skip("refused: a reentrant checkpoint runs once")
    assert grown(lambda: WAYS[way](model, x)) == (0, 0)


@pytest.mark.parametrize("name", ERRORS)
def test_steps_that_fail_leave_no_tensor(name: str) -> None:
    model, x = Model(ERRORS[name]), torch.rand(4, 3)

    def step() -> None:
        try:
            recorded(model, x)
        except (PergradError, ValueError):
            return
        raise AssertionError("there was no error")

    assert grown(step) == (0, 0)


# Torch's own checkpoint leaves a cycle, and a class is in one with itself.
NOT_OURS = {name for name in USES if "checkpoint" in name} | {"local Function"}


@pytest.mark.parametrize("name", [*(name for name in USES if name not in NOT_OURS), *ERRORS])
def test_steps_leave_no_object_of_any_kind(name: str) -> None:
    model, x = Model((USES | ERRORS)[name]), torch.rand(4, 3)

    def step() -> None:
        with suppress(PergradError, ValueError):
            recorded(model, x)

    for _ in range(3):
        step()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(STEPS):
        step()
    assert len(gc.get_objects()) - before < STEPS
    assert gc.collect() == 0


def test_no_nested_function_calls_itself() -> None:
    """Its closure would hold it, a cycle, with the tensors that the closure has, too."""
    found: list[str] = []
    source = Path(pergrad.__file__).parent
    for path in source.rglob("*.py"):
        for outer in ast.walk(ast.parse(path.read_text())):
            inner = [n for n in ast.walk(outer) if n is not outer] if is_function(outer) else []
            found += [
                f"{path.relative_to(source)}:{function.lineno}"
                for function in inner
                if isinstance(function, ast.FunctionDef)
                and any(
                    isinstance(n, ast.Name) and n.id == function.name for n in ast.walk(function)
                )
            ]
    assert not found


@pytest.mark.parametrize("make", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrized_modules_leave_no_tensor(make: Callable[[nn.Module], nn.Module]) -> None:
    model, x = make(nn.Linear(3, 3)), torch.rand(4, 3)
    assert grown(lambda: recorded(model, x)) == (0, 0)


def test_compiled_steps_leave_no_tensor() -> None:
    model, x = Model(USES["exp"]), torch.rand(4, 3)
    step = pergrad.compiled(
        model, lambda m, x: m(x).square().sum(1), *quantities(), backend="eager"
    )
    assert grown(lambda: (step(x), None)[1]) == (0, 0)


def test_explained_and_verified_steps_leave_no_tensor() -> None:
    model, x = Model(USES["exp"]), torch.rand(4, 3)

    def step() -> None:
        pergrad.explain(model, lambda m, x: m(x).square().sum(1), x)
        pergrad.verify(model, lambda m, x: m(x).square().sum(1), x)

    assert grown(step) == (0, 0)


def test_results_of_functions_that_save_them_are_freed_with_the_step() -> None:
    seen: list[weakref.ref[Any]] = []

    def use(m: Model, x: Tensor) -> Tensor:
        w = m.w.exp()
        seen.append(weakref.ref(w))
        h = F.linear(x, w)
        seen.append(weakref.ref(h))
        return h

    recorded(Model(use), torch.rand(4, 3))
    assert [reference() for reference in seen] == [None, None]


def test_classes_of_local_functions_are_collected() -> None:
    seen: list[weakref.ref[type]] = []

    def use(m: Model, x: Tensor) -> Tensor:
        class Local(Square):
            pass

        class OfSamples(Square):
            pass

        seen.extend([weakref.ref(Local), weakref.ref(OfSamples)])
        return OfSamples.apply(F.linear(x, Local.apply(m.w)))

    model, x = Model(use), torch.rand(4, 3)
    for _ in range(3):
        recorded(model, x)
    gc.collect()  # a class is in a cycle with itself
    assert [reference() for reference in seen] == [None] * 6


def _memory() -> float:
    """The resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_does_not_grow_over_ten_thousand_steps() -> None:
    names = ["exp", "slices", "Function of a weight", "Function of both", "written", "stack, cat"]
    models = [Model(USES[name]) for name in names] + [Model(use) for use in ERRORS.values()]
    x = torch.rand(4, 3)

    def steps(count: int) -> None:
        for k in range(count):
            with suppress(PergradError, ValueError):
                recorded(models[k % len(models)], x)

    steps(1000)
    before = _memory()
    steps(10_000)
    assert _memory() - before < 8  # 0.8 KB a step: less than one kept tensor
