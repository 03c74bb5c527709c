"""A compiled step with certify=True: its graph is certified once for each signature, or raises."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.checking import certification
from pergrad.engine.checking.attribution import Judge
from pergrad.engine.compiling import step as step_module
from pergrad.engine.compiling.certified_graphs import _differences, check_graph, copies_of
from pergrad.errors import PergradError
from tests.engine.exactness import Formula, numbers
from tests.engine.wrong_rule import Scaled, doubled_rule

SIZE, D, OUT = 5, 4, 3


def loss(model: Any, x: Tensor) -> Tensor:
    return (model(x) + 0.5).pow(2).sum(1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Dropout(), nn.Linear(D, OUT)).double()


def every_quantity() -> list[Any]:
    return [
        *(pergrad.Norms(), pergrad.Grads(), pergrad.Gram(), pergrad.Projection(8)),
        *(
            pergrad.ClippedSum(0.5),
            pergrad.SecondMoment(),
            pergrad.Variance(),
            pergrad.NoiseScale(),
        ),
    ]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each certified run tried to find mixed samples."""
    runs: list[bool] = []

    def count(*args: Any, mixing: bool = True, **options: Any) -> Any:
        runs.append(mixing)
        return certification.certified_run(*args, mixing=mixing, **options)

    monkeypatch.setattr(step_module, "certified_run", count)
    return runs


def test_each_signature_is_certified_once_uncompiled_and_once_as_a_graph(
    counted: list[bool],
) -> None:
    model, quantities = network(), every_quantity()
    step = pergrad.compiled(model, loss, *quantities, backend="eager", certify=True)
    for size in (SIZE, 3):
        counted.clear()
        for _ in range(4):
            step(numbers(size, D))
        assert counted == [True, False]
    assert step.graphs == 2


def test_a_step_that_is_not_traced_is_certified_once(counted: list[bool]) -> None:
    def branching(m: Any, x: Tensor) -> Tensor:
        return m.a(x) if m.a.bias.sum().item() < 100 else m.a(2 * x)

    step = pergrad.compiled(
        Formula(branching, a=nn.Linear(D, OUT)).double(),
        loss,
        pergrad.Norms(),
        backend="eager",
        certify=True,
    )
    step(numbers(SIZE, D))
    with pytest.warns(UserWarning, match="cannot be traced"):
        step(numbers(SIZE, D))
    step(numbers(SIZE, D))
    assert counted == [True]


def test_a_wrong_rule_raises_in_the_first_call() -> None:
    step = pergrad.compiled(Scaled(), loss, pergrad.Norms(), backend="eager", certify=True)
    with doubled_rule(), pytest.raises(PergradError, match=r"scale .* wrong"):
        step(numbers(SIZE, D))


def test_a_graph_that_keeps_an_old_value_is_found_though_the_uncompiled_step_is_right() -> None:
    """Tracing keeps the value of a global: the first call is right, the graph is not."""
    calls = []

    def counting(m: Any, x: Tensor) -> Tensor:
        calls.append(1)
        return m.a(x) * (1.0 if torch.compiler.is_compiling() or is_traced(x) else 2.0)

    def is_traced(x: Tensor) -> bool:
        return type(x) is not Tensor

    model = Formula(counting, a=nn.Linear(D, OUT)).double()
    step = pergrad.compiled(model, loss, pergrad.Norms(), backend="eager", certify=True)
    x = numbers(SIZE, D)
    step(x)
    with pytest.raises(PergradError, match=r"the compiled step is wrong.*losses"):
        step(x)
    assert step.graphs == 0
    with pytest.raises(PergradError, match="the compiled step is wrong"):  # it does not pass later
        step(x)


def test_random_state_is_what_the_graph_alone_leaves() -> None:
    x, left = numbers(SIZE, D), []
    for certify in (False, True):
        step = pergrad.compiled(network(), loss, pergrad.Norms(), backend="eager", certify=certify)
        torch.manual_seed(1)
        step(x)
        step(x)
        left.append(torch.get_rng_state())
    assert torch.equal(*left)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_inductor_draws_and_computes_as_the_certified_run(dtype: torch.dtype) -> None:
    model, norms, clipped = network().to(dtype), pergrad.Norms(), pergrad.ClippedSum(0.5)
    step = pergrad.compiled(model, loss, norms, clipped, certify=True)
    for _ in range(3):
        step(numbers(SIZE, D).to(dtype))
    assert step.graphs == 1


def filled(x: Tensor, model: nn.Module) -> list[Any]:
    found = [pergrad.Norms(), pergrad.ClippedSum(1.0)]
    with pergrad.record(model, *found):
        loss(model, x).sum().backward()
    return found


ATTRIBUTES = [{"_result": 0, "_of_each": 0}, {"_result": 0}]


def test_each_sample_is_compared_by_itself() -> None:
    model, x = nn.Linear(D, OUT).double(), numbers(SIZE, D)
    x[3] /= 100  # its norm is small
    right, found, losses = filled(x, model), filled(x, model), loss(model, x)
    check_graph((losses, losses), found, right, ATTRIBUTES, torch.float64)
    found[0]._result[3] *= 1.001
    with pytest.raises(PergradError, match=r"Norms differ by 1\.0e-03"):
        check_graph((losses, losses), found, right, ATTRIBUTES, torch.float64)
    check_graph((losses, losses), found, right, ATTRIBUTES, torch.float32)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_results_that_are_not_finite_must_be_so_in_both(value: float) -> None:
    model, x = nn.Linear(D, OUT).double(), numbers(SIZE, D)
    right, found, losses = filled(x, model), filled(x, model), loss(model, x)
    found[0]._result[1] = value
    with pytest.raises(PergradError, match="Norms differ"):
        check_graph((losses, losses), found, right, ATTRIBUTES, torch.bfloat16)
    right[0]._result[1] = value
    check_graph((losses, losses), found, right, ATTRIBUTES, torch.bfloat16)


def test_copies_are_filled_without_touching_the_originals() -> None:
    norms = pergrad.Norms()
    (other,) = copies_of([norms])
    with pergrad.record(model := nn.Linear(D, OUT), other):
        model(torch.ones(SIZE, D)).sum().backward()
    assert other.has_ended
    assert not norms.has_ended


def differences(found: list[Any], wanted: list[Any]) -> list[str]:
    return _differences("Results", found, wanted, SIZE, Judge(torch.float64))


def test_results_of_another_number_shape_or_of_other_integers_differ() -> None:
    t, k = numbers(SIZE), torch.arange(SIZE)
    assert differences([t, k], [t, k.clone()]) == []
    assert differences([t], [t, k]) == ["Results: 1 tensors, not 2"]
    assert differences([t, k + 1], [t, k]) == ["Results differ by inf"]
    assert differences([t[:2]], [t]) == ["Results differ by inf"]
    assert differences([t.expand(1, SIZE)], [t]) == ["Results differ by inf"]
