"""Functions of weights and samples that have no rule: each rung gives the loop's gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pergrad
from pergrad.engine.collecting.grad_samples import GradSampleSink
from pergrad.engine.collecting.journal import Journal, Rung
from pergrad.engine.collecting.ledger import UseCounter
from pergrad.engine.intercepting import recorder, weight_calls
from pergrad.engine.intercepting.ladder import (
    MixedCall,
    refused,
    run_under_autograd,
    same_values,
    valued,
    with_strides_of,
)
from pergrad.engine.intercepting.weights import Derived
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.running import run_recorded
from pergrad.engine.samples.layouts import Scope
from pergrad.quantities import Grads
from pergrad.runtime.tolerances import tolerance_of_rerun
from pergrad.testing import loop_grads
from tests.engine.exactness import Case, Formula, assert_all_near, assert_exact, numbers, of, total

# A batch of 4 has the size of every other dimension.
T = D = 4
Shape = tuple[int, ...]
Batch = Callable[[int], tuple[Tensor, ...]]


SEQUENCE, VECTOR = of((T, D)), of((D,))
WORDS: Batch = lambda size: (torch.randint(D, (size, T)),)  # noqa: E731


def formula(function: Callable[..., Any], batch: Batch = SEQUENCE, **shapes: Shape) -> Case:
    return Case(
        lambda: Formula(function, **{name: numbers(*shape) for name, shape in shapes.items()}),
        batch,
    )


# Every kind of elementwise function, with the weight second, first, and changed in place.
ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": lambda x, w: x + w,
    "-": lambda x, w: w - x,
    "*": lambda x, w: x * w,
    "/": lambda x, w: w / (2 + x.abs()),
    "/ weight": lambda x, w: x / (2 + w.abs()),
    "**": lambda x, w: (1 + x.abs()) ** w,
    "pow of weight": lambda x, w: torch.pow(1 + w.abs(), x),
    "mul_": lambda x, w: x.clone().mul_(w),
    "+=": lambda x, w: x.clone().__iadd__(w),
    "maximum": torch.maximum,
    "fmin": lambda x, w: torch.fmin(w, x),
    "atan2": torch.atan2,
    "hypot": lambda x, w: torch.hypot(w, x),
    "logaddexp": torch.logaddexp,
    "copysign": lambda x, w: torch.copysign(w, x),
    "remainder": lambda x, w: torch.remainder(x, 1 + w.abs()),
    "where": lambda x, w: torch.where(x > 0, x, w),
    "where of weight": lambda x, w: torch.where(w > 0, x * 2, w),
    "lerp": lambda x, w: torch.lerp(x, x.sin(), w),
    "lerp from weight": lambda x, w: torch.lerp(w, x, 0.3),
    "addcmul": lambda x, w: torch.addcmul(x, x.sin(), w, value=0.5),
    "addcdiv": lambda x, w: torch.addcdiv(x, w, 2 + x.abs()),
    "clamp": lambda x, w: torch.clamp(x, min=w),
    "xlogy": lambda x, w: torch.xlogy(x, 1 + w.abs()),
    "huber": lambda x, w: F.smooth_l1_loss(x, w.expand_as(x), reduction="none"),
    "squared difference": lambda x, w: F.mse_loss(x, w.expand_as(x), reduction="none"),
    "float_power": lambda x, w: torch.float_power(1 + x.abs(), w),
    "sub with alpha": lambda x, w: torch.sub(x, w, alpha=3),
    "rsub": lambda x, w: torch.rsub(w, x),
}
SHAPES: list[Shape] = [(), (1,), (D,), (T, D), (T, 1), (1, T, D), (1, 1, D), (2, 1, 1, D)]

ELEMENTWISE_CASES = {
    f"{name}, {shape}": formula(lambda m, x, f=f: f(x, m.w), w=shape)
    for name, f in ELEMENTWISE.items()
    for shape in ([(D,)] if name not in "+ * where lerp maximum".split() else SHAPES[:-1])
} | {
    "+, more dimensions than the input": formula(lambda m, x: x + m.w, w=SHAPES[-1]),
    "masked_fill": formula(lambda m, x: m.w.masked_fill(x > 0, 2.0), w=(T, D)),
    "masked_fill by a weight": formula(lambda m, x: x.masked_fill(x > 0, m.w), w=()),
    "unary of a mixture": formula(
        lambda m, x: F.gelu(torch.sigmoid(x * m.a) + m.b), a=(D,), b=(T, 1)
    ),
    "two weights": formula(lambda m, x: torch.addcmul(x, m.a, m.b), a=(D,), b=(T, 1)),
    "three weights": formula(lambda m, x: torch.lerp(m.a, m.b, m.c) * x, a=(D,), b=(D,), c=(1,)),
    "samples twice": formula(lambda m, x: torch.addcmul(x.sin(), x, m.a), a=(T, D)),
    "heaviside": formula(lambda m, x: x * (x > m.a) * m.a, a=(D,)),
    "snake": formula(lambda m, x: x + (m.a * x).sin() ** 2 / (m.a + 9), a=(D,)),
    "learned threshold": formula(lambda m, x: F.relu(x.abs() - m.a.exp()) * x.sign(), a=(D,)),
    "polynomial": formula(lambda m, x: sum(m.a[k] * x**k for k in range(3)), a=(3,)),
    "channels": formula(lambda m, x: x * m.a.view(1, -1, 1, 1), of((D, T, 3)), a=(D,)),
}

PRODUCTS = (
    {
        "matmul": formula(lambda m, x: x @ m.w, w=(D, 3)),
        "matmul of a vector": formula(lambda m, x: x @ m.w, w=(D,)),
        "matmul by a vector, 2-D": formula(lambda m, x: torch.mv(x, m.w), VECTOR, w=(D,)),
        "weight on the left": formula(lambda m, x: m.w @ x, w=(3, T)),
        "vector on the left": formula(lambda m, x: m.w @ x, w=(T,)),
        "weight on the left, 2-D": formula(lambda m, x: (m.w @ x.t()).t(), VECTOR, w=(3, D)),
        "bmm by an expanded weight": formula(
            lambda m, x: torch.bmm(x, m.w.expand(x.shape[0], -1, -1)), w=(1, D, 3)
        ),
        "a weight a head": formula(lambda m, x: x.unsqueeze(1) @ m.w, w=(3, D, 2)),
        "a weight a position": formula(
            lambda m, x: (x.unsqueeze(-2) @ m.w).squeeze(-2), w=(T, D, 3)
        ),
        "heads on the left": formula(lambda m, x: m.w @ x.unsqueeze(1), w=(3, 2, T)),
        "baddbmm": formula(lambda m, x: torch.baddbmm(m.b, x, x.mT, alpha=0.5), b=(1, T, T)),
        "addmm": formula(lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5), VECTOR, w=(D, 3), b=(3,)),
        "addmv": formula(lambda m, x: torch.addmv(m.b, x, m.w), VECTOR, w=(D,), b=()),
        "dot of each": formula(lambda m, x: torch.linalg.vecdot(x, m.w), w=(D,)),
        "inner": formula(lambda m, x: torch.inner(x, m.w), w=(3, D)),
        "tensordot": formula(lambda m, x: torch.tensordot(x, m.w, 2), w=(T, D, 3)),
        "tensordot from the left": formula(
            lambda m, x: torch.tensordot(m.w, x, ([1], [2])).movedim(1, 0), w=(3, D)
        ),
        "multi_dot": formula(
            lambda m, x: torch.linalg.multi_dot([x, m.a, m.b]), VECTOR, a=(D, 3), b=(3, 2)
        ),
        "bilinear form": formula(lambda m, x: (x @ m.w * x).sum(-1), w=(D, D)),
        "outer product of each": formula(lambda m, x: x.unsqueeze(-1) * m.w, w=(3,)),
        "kron": formula(
            lambda m, x: torch.kron(x.unsqueeze(1), m.w.unsqueeze(0)), VECTOR, w=(1, 3)
        ),
        "cross": formula(lambda m, x: torch.linalg.cross(x, m.w), of((T, 3)), w=(1, 1, 3)),
        "cross of rows": formula(
            lambda m, x: torch.cross(x, m.w.expand_as(x), dim=-1), of((3,)), w=(3,)
        ),
        "cdist": formula(lambda m, x: torch.cdist(x, m.w), w=(3, D)),
        "cdist of a batch": formula(lambda m, x: torch.cdist(x, m.w.unsqueeze(0), p=1.0), w=(3, D)),
        "cdist, prototypes": formula(lambda m, x: -(torch.cdist(x, m.w) ** 2), VECTOR, w=(5, D)),
        "cosine similarity": formula(
            lambda m, x: F.cosine_similarity(x.unsqueeze(-2), m.w, dim=-1), w=(3, D)
        ),
        "pairwise distance": formula(lambda m, x: F.pairwise_distance(x, m.w), VECTOR, w=(1, D)),
        "solve": formula(
            lambda m, x: torch.linalg.solve(m.w + 5 * torch.eye(T, dtype=x.dtype), x), w=(T, T)
        ),
        "triangular solve": formula(
            lambda m, x: torch.linalg.solve_triangular(
                m.w.tril(-1) + torch.eye(T, dtype=x.dtype), x, upper=False
            ),
            w=(T, T),
        ),
        "attention to learned keys": formula(
            lambda m, x: F.scaled_dot_product_attention(
                x, m.k.expand(x.shape[0], -1, -1), m.v.expand(x.shape[0], -1, -1)
            ),
            k=(1, 3, D),
            v=(1, 3, D),
        ),
        "attention of learned queries": formula(
            lambda m, x: (m.q @ x.mT).softmax(-1) @ x, q=(3, D)
        ),
        "attention bias": formula(
            lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=m.b), b=(T, T)
        ),
    }
    | {
        f"einsum {equation}": formula(lambda m, x, e=equation: torch.einsum(e, x, m.w), w=shape)
        for equation, shape in {
            "btd,do->bto": (D, 3),
            "btd,d->bt": (D,),
            "btd,td->b": (T, D),
            "btd,td->btd": (T, D),
            "btd,hdk->bthk": (2, D, 3),
            "btd,hdk->bhtk": (2, D, 3),
            "...d,do->...o": (D, 3),
            "btd,tdo->bo": (T, D, 3),
            "btd,bdo->bto": (1, D, 3),
        }.items()
    }
    | {
        "einsum, weight first": formula(lambda m, x: torch.einsum("od,btd->bto", m.w, x), w=(3, D)),
        "einsum, three": formula(
            lambda m, x: torch.einsum("btd,do,o->bto", x, m.w, m.v), w=(D, 3), v=(3,)
        ),
        "einsum, bilinear": formula(
            lambda m, x: torch.einsum("bi,oij,bj->bo", x, m.w, x), VECTOR, w=(3, D, D)
        ),
    }
)

LOOKUPS = {
    "embedding of a derived weight": formula(lambda m, i: F.embedding(i, m.w * 2), WORDS, w=(D, 3)),
    "embedding of a sum": formula(
        lambda m, i: F.embedding(i, m.a @ m.b), WORDS, a=(D, 2), b=(2, 3)
    ),
    "indexing": formula(lambda m, i: m.w[i], WORDS, w=(D, 3)),
    "indexing of columns": formula(lambda m, i: m.w[:, i].movedim(0, 1), WORDS, w=(3, D)),
    "indexing by two": formula(lambda m, i: m.w[i, i.flip(1)], WORDS, w=(D, D)),
    "indexing of a derived weight": formula(lambda m, i: m.w.exp()[i], WORDS, w=(D,)),
    "index_select": formula(
        lambda m, i: m.w.index_select(0, i.flatten()).view(*i.shape, -1), WORDS, w=(D, 3)
    ),
    "index_select of columns": formula(
        lambda m, i: m.w.index_select(1, i[:, 0]).t(), WORDS, w=(3, D)
    ),
    "take": formula(lambda m, i: m.w.take(i), WORDS, w=(2, D)),
    "take_along_dim": formula(
        lambda m, i: torch.take_along_dim(m.w.unsqueeze(0), i, 1), WORDS, w=(D,)
    ),
    "gather": formula(
        lambda m, i: m.w.expand(i.shape[0], -1, -1).gather(2, i.unsqueeze(1)), WORDS, w=(1, 1, D)
    ),
    "gather, rows folded": formula(
        lambda m, i: m.w.gather(0, i.flatten().unsqueeze(1).expand(-1, 3)), WORDS, w=(D, 3)
    ),
    "one hot": formula(lambda m, i: F.one_hot(i, D).double() @ m.w, WORDS, w=(D, 3)),
    "scatter_add of a weight": formula(
        lambda m, i: torch.zeros(i.shape[0], D, dtype=m.w.dtype).scatter_add(
            1, i, m.w.expand(i.shape[0], -1)
        ),
        WORDS,
        w=(T,),
    ),
    "scatter of a weight": formula(
        lambda m, x: x.scatter(1, x.argsort(1)[:, :2], m.w.expand(x.shape[0], -1)), VECTOR, w=(2,)
    ),
    "masked_scatter": formula(lambda m, x: torch.where(x > 0, m.w[0], m.w[1]), w=(2, D)),
    "written by mask": formula(
        lambda m, x: torch.where((x > 0).any(-1, keepdim=True), x, m.w), w=(D,)
    ),
    "written into a slice": formula(lambda m, x: put(x, (slice(None), 0), m.w), w=(D,)),
    "written by a mask": formula(lambda m, x: put(x, x[..., 0] > 0, m.w), w=(D,)),
    "index_add": formula(
        lambda m, x: x.index_add(1, torch.tensor([0, 2]), m.w.expand(x.shape[0], -1, -1)),
        w=(1, 2, D),
    ),
    "index_copy, weight": formula(
        lambda m, x: x.index_copy(1, torch.tensor([1]), m.w.expand(x.shape[0], -1, -1)), w=(1, 1, D)
    ),
}


def put(x: Tensor, index: Any, value: Tensor) -> Tensor:
    out = x.clone()
    out[index] = value
    return out


def modulated(m: Any, x: Tensor) -> Tensor:
    """As in StyleGAN2: a kernel for each sample, the samples as groups of one convolution."""
    style = x.mean(-1) @ m.s
    kernels = (m.w * style[:, None, :, None]).reshape(-1, D, 2)
    out = F.conv1d(x.reshape(1, -1, T), kernels, groups=x.shape[0])
    return out.view(x.shape[0], 3, -1)


LONG_TAIL = {
    "cumsum": formula(lambda m, x: (x * m.w).cumsum(1), w=(D,)),
    "cat": formula(lambda m, x: torch.cat([x, m.w.expand(x.shape[0], -1, -1)], 1), w=(1, 2, D)),
    "modulated convolution": formula(modulated, of((D, T)), w=(3, D, 2), s=(D, D)),
    "complex, two weights": formula(
        lambda m, x: torch.view_as_real(torch.addcmul(torch.fft.fft(x), m.a, m.b)),
        a=(D,),
        b=(T, 1),
    ),
    "complex matmul": formula(
        lambda m, x: torch.fft.fft(x).matmul(torch.complex(m.a, m.b)).abs(), a=(D, 3), b=(D, 3)
    ),
    "grid_sample of a weight": formula(
        lambda m, x: F.grid_sample(
            m.w.expand(x.shape[0], -1, -1, -1), x[..., :2].tanh().unsqueeze(1), align_corners=True
        ),
        w=(1, 2, 3, 3),
    ),
    "fft filter": formula(
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * m.w, n=T, dim=1), w=(3, D)
    ),
    "searchsorted": formula(
        lambda m, x: x * m.w[torch.searchsorted(m.w.detach().sort()[0], x).clamp(max=2)], w=(3,)
    ),
    "layer_norm by hand": formula(
        lambda m, x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * m.g + m.b,
        g=(D,),
        b=(D,),
    ),
    "rnn_tanh_cell": formula(
        lambda m, x: torch.rnn_tanh_cell(x, x, m.a, m.b), VECTOR, a=(D, D), b=(D, D)
    ),
    "native_layer_norm": formula(
        lambda m, x: torch.native_layer_norm(x, (D,), m.g, m.b, 1e-5)[0], g=(D,), b=(D,)
    ),
    "batch_norm, given statistics": formula(
        lambda m, x: F.batch_norm(x, torch.zeros(T).double(), torch.ones(T).double(), m.g), g=(T,)
    ),
    "fold": formula(lambda m, x: F.fold(x * m.w, 4, 2, stride=2), w=(T, D)),
    "pixel_shuffle": formula(lambda m, x: F.pixel_shuffle((x * m.w).unsqueeze(-1), 2), w=(T, D)),
}

# Where the samples are: second, folded with others, told by owners.
PLACES = {
    "second": lambda f: lambda m, x: f(m, x.transpose(0, 1)).transpose(0, 1),
    "folded behind": lambda f: lambda m, x: f(m, x.reshape(-1, D)),
    "folded in front": lambda f: lambda m, x: f(m, x.transpose(0, 1).reshape(-1, D)),
    "permuted": lambda f: lambda m, x: f(m, x[torch.arange(x.shape[0]).flip(0)]),
    "selected": lambda f: lambda m, x: f(m, x[x[..., 0] > -0.5]),
    "sorted": lambda f: lambda m, x: f(m, x.flatten(0, 1)[x[..., 0].flatten().argsort()]),
}
PLACED = {
    "mul": formula(lambda m, x: x * m.w, w=(D,)),
    "add, scalar": formula(lambda m, x: x + m.w, w=()),
    "where": formula(lambda m, x: torch.where(x > 0, x, m.w), w=(D,)),
    "matmul": formula(lambda m, x: x @ m.w, w=(D, 3)),
    "mv": formula(lambda m, x: x @ m.w, w=(D,)),
    "einsum": formula(lambda m, x: torch.einsum("...d,do->...o", x, m.w), w=(D, 3)),
    "cdist": formula(lambda m, x: torch.cdist(x, m.w), w=(3, D)),
    "lerp": formula(lambda m, x: torch.lerp(x, m.w, 0.3), w=(D,)),
    "layer_norm": formula(lambda m, x: F.layer_norm(x, (D,), m.w), w=(D,)),
    "linear": formula(lambda m, x: F.linear(x, m.w, m.b), w=(3, D), b=(3,)),
    "lookup": formula(lambda m, x: x * m.w[(x[..., 0] > 0).long()], w=(2, D)),
    "cumulative": formula(lambda m, x: (x * m.w).cumsum(-1), w=(D,)),
}


def placed(case: Case, place: Callable[..., Any]) -> Case:
    def build() -> Formula:
        model = case.build()
        model.function = place(model.function)
        return model

    return Case(build, case.batch)


GROUPS = {
    "elementwise": ELEMENTWISE_CASES,
    "product": PRODUCTS,
    "lookup": LOOKUPS,
    "long tail": LONG_TAIL,
    **{
        f"samples {name}": {own: placed(case, place) for own, case in PLACED.items()}
        for name, place in PLACES.items()
    },
}
CASES = {f"{group}: {name}": case for group, own in GROUPS.items() for name, case in own.items()}


@pytest.mark.parametrize("size", [T, 3, 1])
@pytest.mark.parametrize("name", CASES)
def test_per_sample_gradients_are_those_of_the_loop(name: str, size: int) -> None:
    assert_exact(CASES[name], size)


# Rows that are told by their owners are no axis to map over: they need the last rung.
BY_OWNER = ("samples permuted", "samples selected", "samples sorted", "lookup: written by a mask")
# A weight that the model expands to the batch itself has rows of its own from there on.
EXPANDED = frozenset(
    [
        "product: bmm by an expanded weight",
        "product: attention to learned keys",
        "lookup: gather",
        "lookup: scatter_add of a weight",
        "lookup: scatter of a weight",
        "lookup: index_add",
        "lookup: index_copy, weight",
        "long tail: cat",
        "long tail: grid_sample of a weight",
    ]
)


@pytest.fixture
def no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves weights that meet samples nothing above vmap; no plan is there, as all caches are empty."""
    for module in (recorder, weight_calls):
        monkeypatch.setattr(module, "RULES", {})
        monkeypatch.setattr(module, "DECLARED", {})  # functions of this package are seen through
    monkeypatch.setattr(weight_calls, "by_broadcast", lambda *_: None)


def total_loss(model: Formula, *batch: Tensor) -> Tensor:
    return total(model(*batch))


def grads_on(rung: Rung, model: Formula, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Per-sample gradients, computed on that rung for every parameter."""
    quantity, journal = Grads(), Journal()
    run_recorded(model, total_loss, batch, [quantity], Options(None, "sum", True), journal=journal)
    assert journal.uses.keys() == dict(model.named_parameters()).keys()
    for name, uses in journal.uses.items():
        assert journal.rung_of(name) == rung, name
        assert {own for _, own in uses} <= {"derived", rung}, name
    return quantity.result


@pytest.mark.usefixtures("no_rules")
@pytest.mark.parametrize("name", CASES)
def test_rungs_agree_with_each_other_and_the_loop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model, batch = case.build(), case.batch(3)
    lowest: Rung = "expanded" if name in EXPANDED else "masked VJP"
    expected = loop_grads(model, total_loss, *batch)
    mapped = grads_on("vmap" if is_mapped(name) else lowest, model, batch)
    monkeypatch.setattr(weight_calls, "by_vmap", lambda *_: None)
    masked = grads_on(lowest, model, batch)
    assert_all_near(mapped, expected)
    assert_all_near(masked, expected)
    assert_all_near(masked, mapped)


def is_mapped(name: str) -> bool:
    return name not in EXPANDED and not name.startswith(BY_OWNER)


# -- results are those of the plain function, in value and type

PROMOTING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "+": lambda x, w: x + w,
    "*": lambda x, w: w * x,
    "/": lambda x, w: x / w,
    "**": lambda x, w: x.abs() ** w,
    "where": lambda x, w: torch.where(x > w, x, w),
    "add_": lambda x, w: x.clone().add_(w),
    "scaled": lambda x, w: x + w * 0.1,
    "derived": lambda x, w: (x - w.exp()).log_softmax(-1),
    "integers": lambda x, w: torch.arange(D) * w + x,
    "a vector": lambda x, w: x[:, 0] * w,
}
LOW, HALF = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    "dtypes",
    [
        (LOW, torch.float32),
        (HALF, torch.float32),
        (torch.float32, LOW),
        (torch.float64, torch.float32),
        (torch.float32, torch.float64),
        (LOW, LOW),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_cast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", PROMOTING)
def test_a_number_among_the_weights_changes_no_result(
    name: str, is_cast: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    of_input, of_weight = dtypes
    layer = torch.nn.Linear(D, D, bias=False).to(of_input)
    model = Formula(
        lambda m, x: PROMOTING[name](F.linear(x, m.v), m.w),
        w=torch.tensor(0.7, dtype=of_weight),
        v=layer.weight.detach(),
    )
    x = torch.randn(3, D, dtype=of_input)
    with torch.autocast("cpu", LOW, enabled=is_cast):
        plain = model(x)
        with pergrad.record(model, Grads()):
            found = model(x)
            found.float().sum().backward()
    assert found.dtype == plain.dtype
    assert torch.equal(found, plain)


def test_gradients_by_a_number_of_another_type_are_the_loops() -> None:
    model = Formula(lambda m, x: x / m.w, w=torch.tensor(0.7, dtype=torch.float64))
    x = torch.randn(3, D)
    quantity = Grads()
    run_recorded(model, total_loss, (x,), [quantity], Options(None, "sum", True))
    expected = loop_grads(model, total_loss, x)
    torch.testing.assert_close(quantity.result["w"], expected["w"], rtol=1e-6, atol=0)


def test_vmap_gives_the_values_of_the_plain_function() -> None:
    plain, found = numbers(3, 2), numbers(3, 2).requires_grad_()
    (result,) = valued([found * (1 + 1e-12)], [plain], [Scope(3).samples(0)])
    assert torch.equal(result, plain)
    result.backward(plain)
    assert found.grad is not None


# -- whether vmap is believed


def test_values_are_the_same_up_to_rounding_and_not_beyond() -> None:
    x = numbers(3, 4)
    rounding = tolerance_of_rerun(x.dtype) * float(x.abs().max())
    assert same_values([x, x.long()], [x.clone(), x.long()])
    assert same_values([x + rounding / 2], [x])
    assert not same_values([x + rounding * 4], [x])
    assert not same_values([x, x + 1], [x, x])


def test_complex_values_may_differ_by_rounding() -> None:
    x = torch.complex(numbers(3, 4), numbers(3, 4))
    assert same_values([x * (1 + 1e-14)], [x])
    assert not same_values([x * (1 + 1e-3j)], [x])


def test_values_of_another_shape_or_type_are_others() -> None:
    x = numbers(3, 4)
    assert not same_values([x], [x.float()])
    assert not same_values([x[:1].expand(3, 4)], [x[:1]])


def test_integers_must_be_equal() -> None:
    x = torch.arange(4)
    assert same_values([x], [x.clone()])
    assert not same_values([x], [x + 1])
    assert not same_values([x > 1, numbers(2)], [x > 2, numbers(2)])


def test_values_that_are_no_numbers_are_the_same_where_both_are() -> None:
    x = torch.tensor([1.0, float("nan")])
    assert same_values([x], [x.clone()])
    assert not same_values([x], [torch.ones(2)])
    infinite = torch.tensor([1.0, float("inf")])
    assert same_values([infinite], [infinite.clone()])
    assert not same_values([infinite + torch.tensor([1.0, 0.0])], [infinite])


def test_what_is_refused_has_the_values_and_raises_in_the_backward() -> None:
    anchor = torch.zeros((), requires_grad=True)
    error = KeyError("refused")
    outputs = [numbers(2), numbers(3, 1)]
    found = refused(error, anchor, outputs)
    assert all(torch.equal(a, b) and a.requires_grad for a, b in zip(found, outputs, strict=True))
    with pytest.raises(KeyError, match="refused"):
        found[1].sum().backward()


# -- one run in a graph of its own


def mixed_call(func: Callable[..., Any], x: Tensor, w: Tensor) -> MixedCall:
    scope = Scope(len(x))
    weight = Derived(scope, ("w",), w, UseCounter(), GradSampleSink({}, 1), torch.zeros(()))
    return MixedCall(
        func,
        (x, w),
        {"scale": 2.0},
        lambda t: weight if t is w else None,
        lambda t: scope.samples(0),
    )


def scaled(x: Tensor, w: Tensor, *, scale: float) -> tuple[Tensor, int]:
    return x * w * scale, 7


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("flows", [True, False])
def test_a_run_has_a_graph_apart_from_the_models(keeps: bool, flows: bool) -> None:
    source, w = numbers(3, D).requires_grad_(flows), numbers(D).requires_grad_()
    x = source * 1
    call = mixed_call(scaled, x, w)
    with torch.no_grad():  # whatever surrounds it
        run = run_under_autograd(call, keeps_weights=keeps)
    assert isinstance(run.result, tuple)
    assert run.result[1] == 7
    assert run.arguments[1] == {"scale": 2.0}
    assert run.given == [x]
    (given,), (leaf,) = run.inputs, run.leaves
    assert given is not x
    assert given.grad_fn is None
    assert given.requires_grad is flows
    assert (leaf is w) is keeps
    assert leaf.requires_grad
    assert run.arguments[0] == (given, leaf)
    (found,) = torch.autograd.grad(run.result[0].sum(), [leaf])
    torch.testing.assert_close(found, 2 * x.detach().sum(0))
    assert source.grad is None


def test_a_run_keeps_the_hooks_of_a_checkpoint_out() -> None:
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    call = mixed_call(scaled, numbers(3, D), numbers(D))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run_under_autograd(call)
    assert not packed


# -- strides


@pytest.mark.parametrize(
    "plain",
    [
        torch.zeros(2, 3, 4),
        torch.zeros(4, 3, 2).permute(2, 1, 0),
        torch.zeros(3, 2, 4).transpose(0, 1),
        torch.zeros(2, 4, 3).mT,
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(0, 3).t(),
        torch.zeros(()),
    ],
    ids=lambda t: f"{tuple(t.shape)} {t.stride()}",
)
def test_a_result_gets_the_strides_of_the_plain_one(plain: Tensor) -> None:
    t = numbers(*plain.shape).requires_grad_()
    for own in (t, t.mT.contiguous().mT if t.dim() > 1 else t):
        found = with_strides_of(own, plain.stride())
        assert torch.equal(found, t)
        if plain.numel():
            assert found.stride() == plain.stride()
        found.sum().backward()


def test_a_result_with_the_right_strides_is_left_alone() -> None:
    t = numbers(2, 3)
    assert with_strides_of(t, torch.zeros(2, 3).stride()) is t
