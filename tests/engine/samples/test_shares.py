"""A mean that is written by hand, `(losses / B).sum()`, is never taken for a sum: it is a clear error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.testing import assert_close

import pergrad
from pergrad.errors import UntoldLossError
from pergrad.testing import assert_near, loop_grads

B, T, C = 7, 5, 3
MASK = torch.ones(B, T, dtype=torch.float64)
UNEVEN = MASK.tril()  # of valid positions
Loss = Callable[[Any, Tensor, Tensor], Tensor]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, C)).double()


def rows(size: int = B) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(size, 4, generator=random, dtype=torch.float64)
    return x, torch.randint(C, (size,), generator=random)


def texts(size: int = B) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(2)
    x = torch.randn(size, T, 4, generator=random, dtype=torch.float64)
    return x, torch.randint(C, (size, T), generator=random)


def each(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def tokens(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")


def one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, C).double()


def in_place(*a: Any) -> Tensor:
    losses = each(*a)
    losses /= B
    return losses.sum()


def in_a_loop(model: Any, x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for out, target in zip(model(x), y, strict=True):
        total = total + F.cross_entropy(out, target) / B
    return total


def penalty(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return model(x).abs().sum(1)


def full(number: float, *shape: int) -> Tensor:
    return torch.full(shape, number, dtype=torch.float64)


def weighted_bce(model: Any, x: Tensor, y: Tensor, reduction: str) -> Tensor:
    weight = full(1 / B, B, 1)
    return F.binary_cross_entropy_with_logits(
        model(x), one_hot(y), weight=weight, reduction=reduction
    )


# B is a plain number in all of them.
OF_ROWS: dict[str, Loss] = {
    "divided": lambda *a: (each(*a) / B).sum(),
    "times one over B": lambda *a: (each(*a) * (1 / B)).sum(),
    "times it, reversed": lambda *a: ((1 / B) * each(*a)).sum(),
    "torch.div": lambda *a: torch.div(each(*a), B).sum(),
    "torch.true_divide": lambda *a: torch.true_divide(each(*a), B).sum(),
    "torch.mul": lambda *a: torch.sum(torch.mul(each(*a), 1 / B)),
    "div_": lambda *a: each(*a).div_(B).sum(),
    "in place": in_place,
    "tensor": lambda *a: (each(*a) / torch.tensor(B)).sum(),
    "tensor of one element": lambda *a: (each(*a) / torch.tensor([B])).sum(),
    "float32": lambda *a: (each(*a) * torch.tensor(1 / B, dtype=torch.float32)).sum(),
    "bfloat16": lambda *a: (each(*a) * torch.tensor(1 / B, dtype=torch.bfloat16)).sum(),
    "alpha": lambda *a: torch.add(full(0.0, B), each(*a), alpha=1 / B).sum(),
    "len": lambda m, x, y: (each(m, x, y) / len(x)).sum(),
    "one over the size": lambda m, x, y: (each(m, x, y) * (1 / x.shape[0])).sum(),
    "negated": lambda m, x, y: (-(m(x).log_softmax(1).gather(1, y[:, None]) / B)).sum(),
    "cast": lambda *a: (each(*a) / B).float().sum(),
    "reshaped": lambda *a: (each(*a) / B).view(1, -1).sum(),
    "over dimension 0": lambda *a: (each(*a) / B).sum(0),
    "nansum": lambda *a: (each(*a) / B).nansum(),
    "in two steps": lambda *a: (each(*a) / 2 / (B / 2)).sum(),
    "and another factor": lambda *a: (2 * each(*a) / B).sum(),
    "two terms": lambda *a: (each(*a) / B + 0.3 * penalty(*a) / B).sum(),
    "sum of two terms": lambda *a: ((each(*a) + 0.3 * penalty(*a)) / B).sum(),
    "two sums": lambda *a: (each(*a) / B).sum() + 0.3 * (penalty(*a) / B).sum(),
    "two sums, divided after": lambda *a: each(*a).sum() / B + 0.3 * penalty(*a).sum() / B,
    "Python's sum": lambda *a: sum(loss / B for loss in each(*a)),  # type: ignore[misc]
    "loop": in_a_loop,
    "slices": lambda m, x, y: sum(
        F.cross_entropy(out, target) / B
        for out, target in zip(m(x).split(1), y.split(1), strict=True)
    ),
    "stacked slices": lambda m, x, y: torch.stack(
        [
            F.cross_entropy(out, target)
            for out, target in zip(m(x).split(1), y.split(1), strict=True)
        ]
    ).mean(),
    "stacked": lambda *a: torch.stack([loss / B for loss in each(*a)]).sum(),
    "dot": lambda *a: torch.dot(each(*a), full(1 / B, B)),
    "dot of ones": lambda *a: (each(*a) / B) @ full(1.0, B),
    "vdot": lambda *a: torch.vdot(each(*a), full(1 / B, B)),
    "inner": lambda *a: torch.inner(each(*a), full(1 / B, B)),
    "einsum": lambda *a: torch.einsum("b,b->", each(*a), full(1 / B, B)),
    "einsum of rows": lambda m, x, y: torch.einsum("bc,bc->", m(x) / B, one_hot(y)),
    "weights": lambda *a: (each(*a) * full(1 / B, B)).sum(),
    "weights of a loss": lambda *a: weighted_bce(*a, reduction="sum"),
    "weights of losses": lambda *a: weighted_bce(*a, reduction="none").sum(),
    "divided after": lambda *a: each(*a).sum() / B,
    "weighted mean": lambda m, x, y: (each(m, x, y) * x[:, 0].abs() / x[:, 0].abs().sum()).sum(),
}
OF_TEXTS: dict[str, Loss] = {
    "divided": lambda *a: (tokens(*a) / B).sum(),
    "divided by all": lambda *a: (tokens(*a) / (B * T)).sum(),
    "means": lambda *a: (tokens(*a).mean(1) / B).sum(),
    "sums": lambda *a: (tokens(*a).sum(1) / B).sum(),
    "sums, by all": lambda *a: (tokens(*a).sum(1) / (B * T)).sum(),
    "before the sums": lambda *a: (tokens(*a) / B).sum(1).sum(),
    "valid": lambda *a: (tokens(*a) * UNEVEN / int(UNEVEN.sum())).sum(),
    "valid, counted there": lambda *a: (tokens(*a) * UNEVEN / UNEVEN.sum()).sum(),
    "valid, picked": lambda *a: (tokens(*a)[UNEVEN > 0] / int(UNEVEN.sum())).sum(),
    "weights": lambda *a: (tokens(*a) * full(1 / B, B, T)).sum(),
    "weights, by all": lambda *a: (tokens(*a) * full(1 / B / T, B, T)).sum(),
}


@pytest.mark.parametrize(
    ("of_texts", "name"),
    [(False, name) for name in OF_ROWS] + [(True, name) for name in OF_TEXTS],
)
def test_terms_divided_by_the_number_of_samples_are_refused(of_texts: bool, name: str) -> None:
    loss = OF_TEXTS[name] if of_texts else OF_ROWS[name]
    model, batch = net(), texts() if of_texts else rows()
    for _ in range(2):  # nothing is remembered
        with pytest.raises(UntoldLossError), pergrad.record(model, pergrad.Norms()):
            loss(model, *batch).backward()
    assert all(p.grad is None for p in model.parameters())
    with pergrad.record(model, pergrad.Norms(), loss_reduction="sum"):
        loss(model, *batch).backward()


def test_message_says_what_to_write() -> None:
    message = (
        r"\(write `losses\.mean\(\)` for a mean\), because `sum` adds up terms that are each div"
    )
    with pytest.raises(UntoldLossError, match=message):
        pergrad.norms(net(), OF_ROWS["divided"], *rows())


def test_factor_of_the_terms_can_be_named() -> None:
    model, batch = net(), rows()
    for options in ({"loss_scale": 1 / B}, {"loss_reduction": "mean"}):
        assert_near(
            pergrad.norms(model, OF_ROWS["divided"], *batch, **options),  # type: ignore[arg-type]
            pergrad.norms(model, each, *batch),
        )


@pytest.mark.parametrize("name", ["divided", "two sums", "in place", "loop"])
def test_one_sample_is_never_refused(name: str) -> None:
    model, (x, y) = net(), rows(1)
    expected = loop_grads(model, OF_ROWS[name], x, y)
    assert_close(pergrad.grads(model, OF_ROWS[name], x, y), expected)


def test_fallback_does_not_answer_what_cannot_be_told() -> None:
    with pytest.raises(UntoldLossError):
        pergrad.norms(net(), OF_ROWS["divided"], *rows(), fallback="loop")


def test_compiled_step_refuses_too() -> None:
    step = pergrad.compiled(net(), OF_ROWS["divided"], pergrad.Norms(), backend="eager")
    with pytest.raises(UntoldLossError):
        step(*rows())


def test_hooks_that_move_saved_tensors_hide_nothing() -> None:
    with save_on_cpu(), pytest.raises(UntoldLossError):
        pergrad.norms(net(), OF_ROWS["divided"], *rows())


WEIGHTS: dict[str, tuple[Loss, float]] = {
    "weights of one over B": (each, 1 / B),
    "losses divided before": (lambda *a: each(*a) / B, 1.0),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_backward_gets_may_not_make_a_mean(name: str) -> None:
    model, batch = net(), rows()
    losses, number = WEIGHTS[name]
    with pytest.raises(UntoldLossError), pergrad.record(model, pergrad.Norms()):
        losses(model, *batch).backward(full(number, B))
    with pergrad.record(model, pergrad.Norms()) as norms:
        each(model, *batch).backward(full(2.0, B))
    assert_near(norms.result, 2 * pergrad.norms(model, each, *batch))


# -- factors that are part of each sample's loss

PART: dict[str, tuple[Loss, Callable[..., tuple[Tensor, Tensor]]]] = {
    "losses, (B,)": (lambda *a: each(*a) / B, rows),
    "one term of them": (lambda *a: (each(*a) + penalty(*a) / B).sum(), rows),
    "one sum": (lambda *a: each(*a).sum() + (penalty(*a) / B).sum(), rows),
    "another number": (lambda *a: (each(*a) / 2).sum(), rows),
    "positions": (lambda *a: (tokens(*a) / T).sum(), texts),
    "positions, summed": (lambda *a: (tokens(*a).sum(1) / T).sum(), texts),
    "before a function": (lambda m, x, y: (m(x) / B).tanh().sum(), rows),
    "slices": (
        lambda m, x, y: sum(
            F.cross_entropy(out, target)  # type: ignore[misc]
            for out, target in zip(m(x).split(1), y.split(1), strict=True)
        ),
        rows,
    ),
    "slices of texts": (
        lambda m, x, y: sum(
            F.cross_entropy(m(x)[n : n + 1].flatten(0, 1), y[n : n + 1].flatten())  # type: ignore[misc]
            for n in range(len(x))
        ),
        texts,
    ),
    "sums of features": (lambda m, x, y: m(x).sum(0).mean(), rows),
    "factor on what is subtracted": (
        lambda *a: (torch.rsub(each(*a), 1, alpha=2) + torch.sub(each(*a), 1, alpha=3)).sum(),
        rows,
    ),
    "temperature": (lambda m, x, y: F.cross_entropy(m(x) / B, y, reduction="sum"), rows),
    "cubes": (lambda m, x, y: (m(x) ** 3 / 3).sum(), lambda: rows(3)),
    "half of squares": (lambda m, x, y: (0.5 * m(x).square()).sum(), lambda: rows(2)),
    "half of sums of squares": (
        lambda m, x, y: (0.5 * (m(x) - 1).square().sum(1)).sum(),
        lambda: rows(2),
    ),
    "half of mse": (
        lambda m, x, y: (0.5 * F.mse_loss(m(x), one_hot(y), reduction="none")).sum(),
        lambda: rows(2),
    ),
    "as many positions": (lambda *a: (tokens(*a).sum(1) / T).sum(), lambda: texts(T)),
    "weights of one": (lambda m, x, y: (tokens(m, x, y) * torch.ones_like(y)).sum(), texts),
    "einsum": (lambda m, x, y: torch.einsum("bc,bc->", m(x), one_hot(y)), rows),
    "einsum of products": (lambda m, x, y: torch.einsum("bc,bc->", m(x), m(x).tanh()), rows),
    "einsum of positions": (lambda m, x, y: torch.einsum("btc,btc->", m(x), one_hot(y)), texts),
    "einsum with classes": (
        lambda m, x, y: torch.einsum("bc,bc,c->", m(x), one_hot(y), full(2.0, C)),
        rows,
    ),
    "einsum to a vector": (lambda m, x, y: torch.einsum("bc->c", m(x)).sum(), rows),
    "vdot": (lambda m, x, y: torch.vdot(m(x).flatten(), one_hot(y).flatten()), rows),
    "inner": (lambda m, x, y: torch.inner(m(x).flatten(), one_hot(y).flatten()), rows),
    "tensordot": (lambda m, x, y: torch.tensordot(m(x), one_hot(y)), rows),
    "tensordot, lists": (
        lambda m, x, y: torch.tensordot(m(x), one_hot(y), ([-1, 0], [1, 0])),
        rows,
    ),
}


@pytest.mark.parametrize("name", PART)
def test_other_factors_are_part_of_each_loss(name: str) -> None:
    loss, batch = PART[name]
    x, y = batch()
    model = net()
    expected = loop_grads(model, lambda *a: loss(*a).sum(), x, y)
    assert_close(pergrad.grads(model, loss, x, y), expected)


def test_mean_over_even_masks_is_undone() -> None:
    model, batch = net(), texts()
    found = pergrad.norms(model, lambda *a: (tokens(*a) * MASK / MASK.sum()).sum(), *batch)
    assert_near(found, pergrad.norms(model, lambda *a: tokens(*a).mean(1), *batch))


def test_mean_times_the_number_of_samples_is_a_sum() -> None:
    model, batch = net(), rows()
    found = pergrad.norms(model, lambda m, x, y: each(m, x, y).mean() * x.shape[0], *batch)
    assert_near(found, pergrad.norms(model, each, *batch))


class Dividing(nn.Module):
    """A model that divides its output by a number of its own, which is that of the samples."""

    def __init__(self, divided: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.divided = nn.Linear(4, C).double(), divided

    def forward(self, x: Tensor) -> Tensor:
        return self.divided(self.layer(x))


@pytest.mark.parametrize(
    "divided",
    [lambda h: h / B, lambda h: h * (1 / B), lambda h: h.sum(1) / B, lambda h: -(h / B).view(-1)],
)
@pytest.mark.parametrize("loss", [Tensor.sum, lambda h: h.flatten().sum(), lambda h: -h.sum()])
def test_what_a_model_divides_by_is_its_own_matter(
    divided: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor]
) -> None:
    model, (x, _) = Dividing(divided), rows()
    expected = loop_grads(model, lambda m, x: loss(m(x)), x)
    assert_close(pergrad.grads(model, lambda m, x: loss(m(x)), x), expected)
