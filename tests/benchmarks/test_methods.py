from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.measure import Entry, Setting, check
from benchmarks.methods import METHODS, TITLES, clear
from benchmarks.models import MODELS

TINY = Setting("tiny", "float32", torch.device("cpu"), seed=0)

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


EAGER = [name for name, method in METHODS.items() if not method.compiled]
COMPILED = [name for name, method in METHODS.items() if method.compiled]

# what a peer fails on is shown by the table; a method that learns to do it must leave this list
FAILING = {
    (
        "lstm",
        name,
    ): "doesn't match the broadcast shape"  # their LSTM writes a sample's gates in place
    for name in EAGER
    if name.startswith(("vmap", "opacus"))
}
for name in EAGER:
    if name.startswith("backpack"):
        FAILING |= {
            ("transformer", name): "does not have an extension for Module.*LayerNorm",
            ("vit", name): "does not have an extension for Module.*LayerNorm",
            ("resnet", name): "does not have an extension for Module.*GroupNorm",
            ("lstm", name): "only num_layers = 1 is supported",
        }


def pairs() -> Iterator[tuple[str, str]]:
    """All of them but those that take long and differ from others in their last line only."""
    for model in MODELS:
        for name in EAGER:
            if model == "mlp" or not (name.startswith("jax") and name != "jax"):
                yield model, name


def marked(model: str, method: str) -> Any:
    """`make test` leaves out what takes seconds: JAX compiling large models, and traces of the ResNet."""
    takes_long = (method.startswith("jax") and model != "mlp") or (
        method.endswith("-traced") and model == "resnet" and method != "pergrad-traced"
    )
    return pytest.param(model, method, marks=pytest.mark.slow if takes_long else ())


def need(method: str) -> None:
    missing = METHODS[method].missing(TINY.device)
    if missing is not None:
        pytest.skip(missing)


@pytest.mark.parametrize(("model", "method"), [marked(*pair) for pair in pairs()])
def test_method_agrees_with_a_loop_over_the_samples(model: str, method: str) -> None:
    need(method)
    entry = Entry(model, METHODS[method])
    if (model, method) in FAILING:
        with pytest.raises((RuntimeError, UserWarning), match=FAILING[model, method]):
            check(entry, TINY)
    else:
        assert check(entry, TINY) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's import
@pytest.mark.parametrize("method", COMPILED)
@pytest.mark.parametrize("model", ["transformer", "mlp"])
def test_method_to_compile_agrees_with_a_loop_over_the_samples(
    model: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **options: graph
    )
    need(method)
    assert check(Entry(model, METHODS[method]), TINY) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("method", COMPILED)
def test_compiled_method_agrees_with_a_loop_over_the_samples(method: str) -> None:
    need(method)
    assert check(Entry("mlp", METHODS[method]), TINY) is None


@pytest.mark.parametrize("method", EAGER)
def test_second_step_after_clear_gives_what_the_first_gave(method: str) -> None:
    need(method)
    task = TINY.task("mlp")
    step = METHODS[method].prepare(task)
    first = {name: result.clone() for name, result in step().items()}
    clear(task.model)
    torch.testing.assert_close(step(), first)


def test_input_gradients_compute_no_gradient_of_a_weight() -> None:
    task = TINY.task("transformer")
    METHODS["inputs"].prepare(task)()
    assert all(parameter.grad is None for parameter in task.model.parameters())


@pytest.mark.parametrize("quantity", TITLES)
def test_every_quantity_has_pergrad_and_peers(quantity: str) -> None:
    found = [method for method in METHODS.values() if method.quantity == quantity]
    assert any(method.requires == "pergrad" for method in found)
    assert any(method.requires is None for method in found)
    assert any(method.compiled for method in found)


def test_clear_leaves_no_gradient_on_any_parameter() -> None:
    task = TINY.task("mlp")
    for name in ("plain", "expanded-weights"):
        METHODS[name].prepare(task)()
        clear(task.model)
        for parameter in task.model.parameters():
            assert parameter.grad is None
            assert getattr(parameter, "grad_sample", None) is None
