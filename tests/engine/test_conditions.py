"""The conditions that people train under: precision, checkpointing, dropout, several losses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import pergrad
from pergrad.testing import assert_near, loop_grads
from tests.engine.exactness import (
    Case,
    Formula,
    assert_all_near,
    assert_exact,
    numbers,
    state_of,
    total,
)

# A batch of 4 has the size of every other dimension.
T = D = 4
SIZES = [T, 3, 1]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def loss(model: Callable[..., Any], *batch: Tensor) -> Tensor:
    return total(model(*batch))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv1d(T, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), mlp())


def attending(dropout: float = 0.0) -> nn.Module:
    return nn.TransformerEncoderLayer(D, 2, 8, dropout=dropout, batch_first=True)


def low_rank() -> nn.Module:
    parts = {"w": torch.randn(D, D), "a": torch.randn(2, D), "b": torch.randn(D, 2)}
    return Formula(
        lambda m, x: m.out(F.linear(x, m.w + m.b @ m.a).tanh()), **parts, out=nn.Linear(D, 3)
    )


def scaled() -> nn.Module:
    """Functions without a rule."""
    return Formula(
        lambda m, x: torch.einsum("btd,hdo->bhto", x * m.s, m.w) + m.b[: x.shape[1]],
        s=torch.randn(D),
        w=torch.randn(2, D, 3),
        b=torch.randn(9, 3),
    )


def normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(D, 5)), nn.SiLU(), nn.Linear(5, 3))


def recurrent() -> nn.Module:
    return Formula(lambda m, x: m.rnn(x)[0], rnn=nn.GRU(D, 5, batch_first=True))


MODELS: dict[str, Callable[[], nn.Module]] = {
    f.__name__: f for f in (mlp, convolutional, attending, low_rank, scaled, normed, recurrent)
}


# Precision


def assert_near_in(
    dtype: torch.dtype, rows: dict[str, Tensor], expected: dict[str, Tensor]
) -> None:
    """Near, as gradients computed in `dtype` can be."""
    assert rows.keys() == expected.keys()
    for name in rows:
        assert rows[name].dtype == expected[name].dtype
        assert_near(rows[name].to(dtype), expected[name].to(dtype), name)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_autocast_gives_what_the_loop_gives_under_autocast(
    name: str, dtype: torch.dtype, size: int
) -> None:
    model, x = MODELS[name](), torch.randn(size, T, D)

    def under_autocast(model: Callable[..., Any], x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            output = model(x)
        return total(output.float())

    expected = loop_grads(model, under_autocast, x)
    assert_near_in(dtype, pergrad.grads(model, under_autocast, x), expected)
    under_autocast(pergrad.call_for_per_sample_grads(model), x).backward()
    rows = {name: p.grad_sample for name, p in model.named_parameters()}
    assert_near_in(dtype, rows, expected)


def with_statistics(norm: nn.Module) -> nn.Module:
    """After a layer that autocast runs in bfloat16; with statistics and weights that change something."""
    for t in (*norm.parameters(), *norm.buffers()):
        if t.is_floating_point():
            nn.init.uniform_(t, 0.5, 2)
    return nn.Sequential(nn.Linear(D, D), norm.eval(), nn.Linear(D, 3))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMSNorm's own
@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm1d(T),
        lambda: nn.InstanceNorm1d(T, affine=True),
        lambda: nn.InstanceNorm1d(T, affine=True, track_running_stats=True),
        lambda: nn.GroupNorm(2, T),
        lambda: nn.LayerNorm(D),
        lambda: nn.RMSNorm(D),
        lambda: nn.PReLU(T),
    ],
)
def test_autocast_gives_the_dtypes_of_the_plain_model(norm: Callable[[], nn.Module]) -> None:
    model, x = with_statistics(norm()), torch.randn(3, T, D)
    seen: list[torch.dtype] = []
    model[1].register_forward_hook(lambda m, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        recorded = pergrad.call_for_per_sample_grads(model)(x)
    assert seen[0] == seen[1]
    assert_near(recorded, plain)


@pytest.mark.parametrize("name", MODELS)
def test_models_in_bfloat16_get_gradients_in_bfloat16(name: str) -> None:
    model, x = MODELS[name]().bfloat16(), torch.randn(3, T, D).bfloat16()
    rows = pergrad.grads(model, loss, x)
    assert_near_in(torch.bfloat16, rows, loop_grads(model, loss, x))
    assert {t.dtype for t in rows.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["mlp", "low_rank", "normed"])
def test_layers_of_different_precision(name: str) -> None:
    model = Formula(
        lambda m, x: m.head(m.body(x).float()), body=MODELS[name](), head=nn.Linear(3, 2)
    )
    model.body.double()
    x = numbers(T, T, D)
    assert_near_in(torch.float32, pergrad.grads(model, loss, x), loop_grads(model, loss, x))


# Checkpointing


def checkpointed(name: str) -> nn.Module:
    """A layer, then a checkpointed model: reentrant checkpoints need an input that requires grad."""
    return Formula(
        lambda m, x: checkpoint(m.body, m.first(x), use_reentrant=m.reentrant) ** 2,
        first=nn.Linear(D, D),
        body=MODELS[name](),
    )


def checkpointed_weight() -> nn.Module:
    """A derived weight is computed outside of the checkpoint, another one inside."""
    return Formula(
        lambda m, x: checkpoint(
            lambda x, w: F.linear(F.linear(x, w).tanh(), 2 * m.v),
            x * m.s,
            m.w.tanh(),
            use_reentrant=m.reentrant,
        ),
        s=numbers(D),
        w=numbers(3, D),
        v=numbers(2, 3),
    )


def checkpointed_expansion() -> nn.Module:
    """Inside of the checkpoint the weight becomes one for each sample."""
    return Formula(
        lambda m, x: checkpoint(
            lambda x: torch.cat([m.w.expand(x.shape[0], -1, -1), x], 1) * m.s,
            x * m.s,
            use_reentrant=m.reentrant,
        ),
        s=numbers(D),
        w=numbers(1, 2, D),
    )


def checkpointed_cast() -> nn.Module:
    """Inside of the checkpoint the weight is cast to the type that it has: it is itself."""
    return Formula(
        lambda m, x: checkpoint(
            lambda x: (x * (1 + m.w.double())) @ m.v.contiguous(),
            x * m.w,
            use_reentrant=m.reentrant,
        ),
        w=numbers(D),
        v=numbers(D, 3),
    )


_POSITIONS = torch.arange(T * T).view(T, T) % 3


def checkpointed_table() -> nn.Module:
    """Positions that a library keeps, as many as there are samples: the same for all of them."""
    return Formula(
        lambda m, x: checkpoint(
            lambda x: x * m.w[_POSITIONS].sum(1), x * m.w[0], use_reentrant=m.reentrant
        ),
        w=numbers(3, D),
    )


def nested() -> nn.Module:
    def inner(m: Any, x: Tensor) -> Tensor:
        return checkpoint(m.b, m.a(x).tanh(), use_reentrant=m.reentrant)

    return Formula(
        lambda m, x: checkpoint(partial(inner, m), m.a(x), use_reentrant=m.reentrant),
        a=nn.Linear(D, D),
        b=nn.Linear(D, 3),
    )


def sequence_of_checkpoints() -> nn.Module:
    return Formula(
        lambda m, x: checkpoint_sequential(m.body, 2, m.first(x), use_reentrant=m.reentrant),
        first=nn.Linear(D, D),
        body=nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh()),
    )


CHECKPOINTED: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(checkpointed, name) for name in MODELS},
    "derived weight": checkpointed_weight,
    "expansion": checkpointed_expansion,
    "cast": checkpointed_cast,
    "table": checkpointed_table,
    "nested": nested,
    "sequential": sequence_of_checkpoints,
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # nested, reentrant
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointing_changes_no_gradient(name: str, reentrant: bool, size: int) -> None:
    model, x = CHECKPOINTED[name]().double(), numbers(size, T, D)
    model.reentrant = False  # the loop asks for gradients of inputs, which the other kind refuses
    expected = loop_grads(model, loss, x)
    model.reentrant = reentrant
    if reentrant and name == "derived weight":  # torch cuts the weight off its parameter there
        with pytest.raises(pergrad.PergradError, match="use_reentrant=False"):
            pergrad.grads(model, loss, x)
        return
    assert_all_near(pergrad.grads(model, loss, x), expected)
    loss(pergrad.call_for_per_sample_grads(model), x).backward()
    rows = {name: p.__dict__.pop("grad_sample") for name, p in model.named_parameters()}
    assert_all_near(rows, expected)


@pytest.mark.parametrize(
    "inside",
    [
        lambda m, x: x.sum(0) * m.w,
        lambda m, x: x.cumsum(0) @ m.v,
        lambda m, x: (
            x * m.w,
            m.w.tanh(),
        ),  # a weight leaves it, which torch cuts off its parameter
    ],
    ids=["sum", "scan", "weight"],
)
def test_what_leaves_a_reentrant_checkpoint_without_samples_is_refused(
    inside: Callable[..., Any],
) -> None:
    """Without gradients, as it runs its forward, samples may mix: that must not look like a constant."""

    def forward(m: Any, x: Tensor) -> Tensor:
        left = checkpoint(partial(inside, m), x * m.w, use_reentrant=True)
        return F.linear(x, m.v) * (left if isinstance(left, Tensor) else sum(left))

    model = Formula(forward, w=numbers(D), v=numbers(D, D))
    with pytest.raises(pergrad.PergradError, match=r"reentrant|mixes"):
        pergrad.grads(model, loss, numbers(3, D))


# Randomness

RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Dropout(), nn.Linear(D, D), nn.Dropout(0.2)),
    "in place": lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(inplace=True)),
    "feature dropout": lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout1d(), nn.AlphaDropout()),
    "attention": lambda: attending(0.5),
    "attention without weights": lambda: Formula(
        lambda m, x: m.mha(x, x, x, need_weights=False)[0],
        mha=nn.MultiheadAttention(D, 2, dropout=0.5, batch_first=True),
    ),
    "attention with weights": lambda: Formula(
        lambda m, x: m.mha(x, x, x)[0],
        mha=nn.MultiheadAttention(D, 2, dropout=0.5, batch_first=True),
    ),
    "LSTM": lambda: Formula(
        lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(D, 3, 3, dropout=0.5, batch_first=True)
    ),
    "GRU, bidirectional": lambda: Formula(
        lambda m, x: m.rnn(x)[0],
        rnn=nn.GRU(D, 3, 2, dropout=0.5, bidirectional=True, batch_first=True),
    ),
    "rrelu": lambda: nn.Sequential(nn.Linear(D, D), nn.RReLU()),
    "noise": lambda: Formula(lambda m, x: (x + torch.randn_like(x)) * m.w, w=numbers(D)),
    "noise on a weight": lambda: Formula(
        lambda m, x: F.linear(x, m.w + torch.randn_like(m.w) * m.s.exp()),
        w=numbers(3, D),
        s=numbers(1),
    ),
    "dropout of a weight": lambda: Formula(
        lambda m, x: F.linear(x, F.dropout(m.w)), w=numbers(3, D)
    ),
    "token dropout": lambda: Formula(
        lambda m, x: F.dropout(torch.cat([m.w.expand(len(x), -1, -1), x], 1)), w=numbers(1, 1, D)
    ),
    "checkpoint": lambda: Formula(
        lambda m, x: checkpoint(m.body, m.first(x), use_reentrant=False),
        first=nn.Linear(D, D),
        body=nn.Sequential(nn.Dropout(), nn.Linear(D, 3)),
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_same_seed_same_output_and_gradients_that_sum_to_the_ordinary_one(name: str) -> None:
    model, x = RANDOM[name]().double(), numbers(T, T, D)
    torch.manual_seed(1)
    plain = model(x)
    ordinary = torch.autograd.grad(total(plain), list(model.parameters()))
    with pergrad.record(model, pergrad.Grads()) as grads:
        torch.manual_seed(1)
        recorded = model(x)
        total(recorded).backward()
    assert_close(recorded, plain, rtol=0, atol=1e-12)
    summed = {name: rows.sum(0) for name, rows in grads.result.items()}
    assert_all_near(summed, dict(zip(summed, ordinary, strict=True)))
    torch.manual_seed(1)
    assert_close(pergrad.call_for_per_sample_grads(model)(x), plain, rtol=0, atol=1e-12)


# Several forwards, losses and scopes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_forwards_before_one_backward_add_up(name: str, size: int) -> None:
    model, x, y = MODELS[name]().double(), numbers(size, T, D), numbers(size, T, D)

    def both(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
        return total(model(x)) + total(model(y) * 2)

    assert_all_near(pergrad.grads(model, both, x, y), loop_grads(model, both, x, y))


@pytest.mark.parametrize("name", MODELS)
def test_forwards_each_with_its_own_backward_add_up(name: str) -> None:
    model, x, y = MODELS[name]().double(), numbers(3, T, D), numbers(3, T, D)
    with pergrad.record(model, pergrad.Grads(), calls="same") as grads:
        loss(model, x).backward()
        loss(model, y).backward()
    first, second = loop_grads(model, loss, x), loop_grads(model, loss, y)
    assert_all_near(grads.result, {name: first[name] + second[name] for name in first})


@pytest.mark.parametrize("size", SIZES)
def test_two_networks_each_with_a_scope_of_its_own(size: int) -> None:
    """As a GAN is trained: first the judge, the maker's samples cut off, then the maker through it."""
    maker = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, D)).double()
    judge = nn.Sequential(nn.Linear(D, 6), nn.LeakyReLU(), nn.Linear(6, 1)).double()
    noise, real = numbers(size, D), numbers(size, D)

    def judged(judge: nn.Module, real: Tensor, made: Tensor) -> Tensor:
        return F.softplus(-judge(real)).sum() + F.softplus(judge(made)).sum()

    def fooled(maker: nn.Module, noise: Tensor) -> Tensor:
        return F.softplus(-judge(maker(noise))).sum()

    before = state_of(maker)
    of_judge = loop_grads(judge, judged, real, maker(noise).detach())
    of_maker = loop_grads(maker, fooled, noise)
    ordinary = torch.autograd.grad(fooled(maker, noise), list(judge.parameters()))
    with pergrad.record(judge, pergrad.Grads()) as grads:
        judged(judge, real, maker(noise).detach()).backward()
    assert_all_near(grads.result, of_judge)
    assert all(p.grad is None for p in [*maker.parameters(), *judge.parameters()])
    with pergrad.record(maker, pergrad.Grads()) as grads:
        fooled(maker, noise).backward()
    assert_all_near(grads.result, of_maker)
    for p, grad in zip(judge.parameters(), ordinary, strict=True):
        assert_close(p.grad, grad)  # not recorded there: what it would have got anyway
    assert state_of(maker) == before


def teacher_and_student(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.body(m.head(x))
    return (m.head(x) - target) ** 2


def frozen_body(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = m.body(x)
    return m.head(x)


def gradient_switched_on_again(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = m.body(x)
        with torch.enable_grad():
            return m.head(x)


def weight_looked_at(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.head.weight.abs().max()
        assert float(m.body.weight.norm()) > 0
    return m.head(m.body(x)) / scale


def weight_itself_looked_at(m: Any, x: Tensor) -> Tensor:
    """Casts that change nothing give the parameter itself."""
    doubled = 2 * m.head.weight
    with torch.no_grad():
        scale = m.head.weight.double().abs().max() + doubled.contiguous().abs().max()
        assert m.body.weight.requires_grad_() is m.body.weight
    return F.linear(m.head(m.body(x)), doubled.double()) / scale


def detached_weight(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.body(x), m.head.weight.detach(), m.head.bias)


def statistics_kept(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.seen.mul_(0.9).add_(m.body(x).mean() * 0.1)
    return m.head(m.body(x))


def with_buffer(model: Formula) -> Formula:
    model.register_buffer("seen", torch.zeros(()))
    return model


PARTLY = {
    f.__name__: lambda f=f: with_buffer(Formula(f, body=nn.Linear(D, D), head=nn.Linear(D, D)))
    for f in (
        teacher_and_student,
        frozen_body,
        gradient_switched_on_again,
        weight_looked_at,
        weight_itself_looked_at,
        detached_weight,
        statistics_kept,
    )
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PARTLY)
def test_parts_without_gradient_have_none(name: str, size: int) -> None:
    assert_exact(Case(PARTLY[name], lambda size: (numbers(size, T, D),)), size)


def test_evaluation_inside_a_scope_is_not_recorded() -> None:
    model, x = mlp().double(), numbers(3, D)
    with pergrad.record(model, pergrad.Grads()) as grads:
        with torch.no_grad():
            model(numbers(3, D))
        loss(model, x).backward()
        with torch.inference_mode():
            model(numbers(3, D))
    assert_all_near(grads.result, loop_grads(model, loss, x))
