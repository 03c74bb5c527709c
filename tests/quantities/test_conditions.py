"""Properties of every quantity: options, training conditions, and errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.errors import BatchSizeError, PergradError, ScopeError
from pergrad.testing import loop_grads
from tests.engine.exactness import Formula, numbers, state_of
from tests.quantities.oracle import (
    LINEAR,
    NAMES,
    assert_is_quantity_of,
    check_all,
    losses,
    quantity,
)

B, T, D = 3, 4, 5
each = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def net() -> nn.Module:
    """A tied embedding and head, layers over positions, one that is not reached."""
    model = Formula(
        lambda m, i: m.head(m.norm(m.body(m.table(i)).tanh())),
        table=nn.Embedding(7, D),
        body=nn.Linear(D, D),
        norm=nn.LayerNorm(D),
        head=nn.Linear(D, 7, bias=False),
        idle=nn.Linear(2, 2),
    )
    model.head.weight = model.table.weight
    return model.double()


def tokens(size: int = B) -> Tensor:
    return torch.randint(7, (size, T))


def asked_for(name: str, model: nn.Module) -> Any:
    return quantity(name, dict(model.named_parameters()))


def failing_step(model: nn.Module, found: Any, x: Tensor, **options: Any) -> None:
    with pergrad.record(model, found, **options):
        losses(model, x).sum().backward()
        raise KeyError


# Options


@pytest.mark.parametrize("size", [B, 1])
@pytest.mark.parametrize(
    "options", [{}, {"max_bytes": 1}, {"max_bytes": 500}, {"offload": True}], ids=str
)
def test_options_of_memory_change_no_number(options: dict[str, Any], size: int) -> None:
    check_all(net(), losses, tokens(size), **options)


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_sample_weights_multiply_the_gradients(loss_reduction: Any, dtype: torch.dtype) -> None:
    model, x = net(), tokens()
    weights = torch.tensor([0.5, 0.0, -1.5], dtype=dtype)
    plain = loop_grads(model, losses, x)
    expected = {
        name: rows * weights.double().view(-1, *[1] * (rows.dim() - 1))
        for name, rows in plain.items()
    }
    reduce = torch.mean if loss_reduction == "mean" else torch.sum
    check_all(
        model,
        losses,
        x,
        expected=expected,
        reduce=reduce,
        loss_reduction=loss_reduction,
        sample_weights=weights,
    )


def test_sample_weights_in_float64_are_not_rounded() -> None:
    model, x = net(), tokens()
    weights = numbers(B) / 3
    expected = {
        name: rows * weights.view(-1, *[1] * (rows.dim() - 1))
        for name, rows in loop_grads(model, losses, x).items()
    }
    check_all(model, losses, x, expected=expected, sample_weights=weights)


def test_samples_in_the_second_dimension() -> None:
    model, x = net(), tokens().T

    def loss(model: Callable[..., Any], x: Tensor) -> Tensor:
        return ((model(x) + 0.5) ** 3 / 3).sum((0, 2))

    expected = loop_grads(model, loss, x, batch_dim=1)
    check_all(model, loss, x, expected=expected, batch_first=False)


def test_losses_of_the_samples_may_be_backed_up_with_ones() -> None:
    model, x = net(), tokens()
    expected = loop_grads(model, losses, x)
    for name in NAMES:
        with pergrad.record(model, asked_for(name, model)) as found:
            losses(model, x).backward(gradient=torch.ones(B).double())
        assert_is_quantity_of(found, expected, name)


CHOICES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "pattern": (lambda m: "body.*", ["body.weight", "body.bias"]),
    "patterns": (lambda m: ["body.w*", "norm.*"], ["body.weight", "norm.weight", "norm.bias"]),
    "parameter": (lambda m: m.norm.bias, ["norm.bias"]),
    "parameters": (lambda m: m.norm.parameters(), ["norm.weight", "norm.bias"]),
    "both": (lambda m: [m.body.bias, "idle.bias"], ["body.bias", "idle.bias"]),
    "alias of a tied weight": (lambda m: "head.weight", ["table.weight"]),
    "overlapping": (
        lambda m: ["*.bias", "norm.*"],
        ["body.bias", "norm.weight", "norm.bias", "idle.bias"],
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_some_parameters_only(choice: str) -> None:
    model, x = net(), tokens()
    choose, names = CHOICES[choice]
    before = state_of(model)
    expected = {name: rows for name, rows in loop_grads(model, losses, x).items() if name in names}
    assert list(expected) == names
    for together in (NAMES[1:], NAMES):
        asked = [quantity(name, {k: v[0] for k, v in expected.items()}) for name in together]
        with pergrad.record(model, *asked, params=choose(model)):
            losses(model, x).sum().backward()
        for name, found in zip(together, asked, strict=True):
            assert_is_quantity_of(found, expected, name)
    assert state_of(model) == before
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("boddy.*", "pattern 'boddy.*'"),
        (["body.*", "nothing"], "pattern 'nothing'"),
        (nn.Parameter(torch.zeros(2)), "the tensor"),
        ("norm.weight", "pattern 'norm.weight'"),  # frozen
        ([], "params is empty"),
    ],
    ids=["pattern", "one of several", "stranger", "frozen", "none"],
)
def test_parameters_that_are_not_there_are_named(params: Any, message: str) -> None:
    model = net()
    model.norm.weight.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    with (
        pytest.raises(PergradError, match=message.replace("*", r"\*")),
        pergrad.record(model, pergrad.Norms(), params=params),
    ):
        pass
    assert [p.requires_grad for p in model.parameters()] == before


def test_left_out_parameters_are_trainable_again_after_an_error() -> None:
    model = net()
    model.norm.bias.requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    with pytest.raises(KeyError):
        failing_step(model, pergrad.Norms(), tokens(), params="body.*")
    assert [p.requires_grad for p in model.parameters()] == before


def test_frozen_parameters_are_left_out() -> None:
    model, x = net(), tokens()
    model.body.requires_grad_(False)
    check_all(model, losses, x)


@pytest.mark.parametrize("weights", [torch.ones(B + 1), torch.ones(B, 1)], ids=["more", "matrix"])
def test_sample_weights_of_the_wrong_shape_are_refused(weights: Tensor) -> None:
    model = net()
    with (
        pytest.raises(BatchSizeError, match="one weight for each of 3 samples"),
        pergrad.record(model, pergrad.Norms(), sample_weights=weights),
    ):
        losses(model, tokens()).sum().backward()


# Several forwards and backwards


@each
def test_forwards_before_one_backward_add_up(name: str) -> None:
    model, x, y = net(), tokens(), tokens()

    def both(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
        return losses(model, x) + 2 * losses(model, y)

    check_all(model, both, x, y, names=[name])


@each
def test_backwards_of_a_graph_kept_open_add_up_or_are_refused(name: str) -> None:
    """A parameter that was reduced after the first backward gets more in the second."""
    model, x, y = net(), tokens(), tokens()
    expected = loop_grads(model, lambda m, x, y: losses(m, x) + losses(m, y), x, y)
    found = asked_for(name, model)

    def step(**options: Any) -> None:
        with pergrad.record(model, found, **options):
            losses(model, x).sum().backward()
            losses(model, y).sum().backward()

    if found.is_linear:
        step(calls="same")
        assert_is_quantity_of(found, expected, name)
        return
    with pytest.raises(ScopeError, match="add the losses up and call backward"):
        step()
    with pergrad.record(model, found):  # and the same one may be used again
        (losses(model, x) + losses(model, y)).sum().backward()
    assert_is_quantity_of(found, expected, name)


def test_only_what_is_not_linear_refuses_a_second_backward() -> None:
    model = net()
    assert {name for name in NAMES if asked_for(name, model).is_linear} == set(LINEAR)


@each
def test_losses_of_separate_parts_each_with_its_backward(name: str) -> None:
    """No parameter gets gradients twice; only those that need two passes cannot do it."""
    model = Formula(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(D, 2), b=nn.Linear(D, 3)).double()
    x = numbers(B, D)
    expected = loop_grads(model, lambda m, x: sum((t**3).sum(1) for t in m(x)), x)
    found = asked_for(name, model)

    def step() -> None:
        with pergrad.record(model, found):
            first, second = model(x)
            (first**3).sum().backward()
            (second**3).sum().backward()

    if found.passes == 1:
        step()
        assert_is_quantity_of(found, expected, name)
    else:
        with pytest.raises(ScopeError, match="second backward"):
            step()


# Checkpointing


def segments(reentrant: bool) -> nn.Module:
    """One layer in both of two checkpointed segments, one in one of them, one in none."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = m.first(x)
        x = checkpoint(lambda x: m.shared(x).tanh(), x, use_reentrant=reentrant)
        x = checkpoint(lambda x: m.own(m.shared(x)).tanh(), x, use_reentrant=reentrant)
        return x @ m.first.weight

    return Formula(run, first=nn.Linear(D, D), shared=nn.Linear(D, D), own=nn.Linear(D, D)).double()


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_weights_shared_by_checkpointed_segments(reentrant: bool) -> None:
    model, x = segments(reentrant), numbers(B, T, D)
    plain = segments(False)
    plain.load_state_dict(model.state_dict())
    expected = loop_grads(plain, losses, x)
    names = [name for name in NAMES if not (reentrant and name == "clipped, low memory")]
    check_all(model, losses, x, expected=expected, names=names)
    for name in names:
        check_all(model, losses, x, expected=expected, names=[name])


def test_low_memory_refuses_reentrant_checkpoints() -> None:
    model = segments(True)
    with (
        pytest.raises(PergradError, match=r'use_reentrant=False.*memory="kept"'),
        pergrad.record(model, pergrad.ClippedSum(1.0, memory="low")),
    ):
        losses(model, numbers(B, T, D)).sum().backward()


# Precision


@each
def test_autocast_gives_what_the_gradients_under_autocast_give(name: str) -> None:
    model, x = net().float(), tokens()

    def under_autocast(model: Callable[..., Any], x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        return losses(lambda: output.float())

    exact = {k: g.double() for k, g in loop_grads(model, under_autocast, x).items()}
    found = asked_for(name, model)
    with pergrad.record(model, found):
        under_autocast(model, x).sum().backward()
    if isinstance(found, pergrad.Norms):
        norms = torch.cat([g.flatten(1) for g in exact.values()], 1).norm(dim=1)
        torch.testing.assert_close(found.result.double(), norms, rtol=1e-2, atol=0)
    results = found.result
    tensors = results.values() if isinstance(results, dict) else [torch.as_tensor(results)]
    assert all(t.isfinite().all() and t.dtype == torch.float32 for t in tensors)


# Errors


@each
def test_an_error_leaves_nothing_behind_and_the_quantity_usable(name: str) -> None:
    model, x = net(), tokens()
    before = state_of(model)
    found = asked_for(name, model)
    with pytest.raises(KeyError):
        failing_step(model, found, x)
    with pytest.raises(ScopeError, match="no result yet"):
        _ = found.result
    assert state_of(model) == before
    with pergrad.record(model, found):
        losses(model, x).sum().backward()
    assert_is_quantity_of(found, loop_grads(model, losses, x), name)


@each
def test_an_error_lets_go_of_what_was_computed(name: str) -> None:
    """Nothing of the size of a parameter is held; the largest here has 35 entries."""
    model = net()
    found = asked_for(name, model)
    with pytest.raises(KeyError):
        failing_step(model, found, tokens())
    given = ("_parameters", "_direction", "_against", "_sketches")
    held = {key: value for key, value in vars(found).items() if key not in given}
    tensors = [t for t in pytree.tree_leaves(held) if isinstance(t, Tensor)]
    assert sum(t.numel() for t in tensors) <= B * 12


def test_an_error_at_the_end_lets_go_of_what_was_computed() -> None:
    model = net()
    kept = pergrad.Grads()
    wrong = pergrad.ClippedSum(weighting=lambda n: n[:1])
    with (
        pytest.raises(PergradError, match="one weight for each"),
        pergrad.record(model, kept, wrong),
    ):
        losses(model, tokens()).sum().backward()
    with pytest.raises(ScopeError, match="no result yet"):
        _ = wrong.result
    assert not wrong._groups
    assert not kept._sums


@each
def test_a_quantity_that_is_reset_forgets_the_earlier_batch(name: str) -> None:
    model, x, y = net(), tokens(), tokens(2)
    found = asked_for(name, model)
    for batch in (x, y):
        found.reset()
        with pergrad.record(model, found):
            losses(model, batch).sum().backward()
        assert_is_quantity_of(found, loop_grads(model, losses, batch), name)


@each
def test_one_bad_sample_leaves_what_belongs_to_the_others(name: str) -> None:
    model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = numbers(4, T, D)
    bad = torch.tensor([1.0, float("nan"), 1.0, float("inf")]).double()
    plain, found = asked_for(name, model), asked_for(name, model)
    with pergrad.record(model, plain):
        (losses(model, x) * bad.isfinite()).sum().backward()
    with pergrad.record(model, found):
        (losses(model, x) * bad).sum().backward()
    others = torch.tensor([0, 2])
    if isinstance(found, pergrad.ClippedSum):
        for key, total in plain.result.items():
            torch.testing.assert_close(found.result[key], total, rtol=1e-12, atol=1e-14)
        assert torch.equal(found.norms.isfinite(), bad.isfinite())
    elif isinstance(found.result, Tensor):
        if name == "gram":
            assert torch.equal(found.result[others][:, others], plain.result[others][:, others])
        else:
            assert torch.equal(found.result[others], plain.result[others])
    elif isinstance(found, pergrad.Grads):
        for key, rows in plain.result.items():
            assert torch.equal(found.result[key][others], rows[others])
    else:  # over all samples: not finite, and not silently so
        results = found.result
        values = results.values() if isinstance(results, dict) else [torch.tensor(results)]
        assert not all(t.isfinite().all() for t in values)
