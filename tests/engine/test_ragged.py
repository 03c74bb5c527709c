"""Samples of several rows are exact: all quantities, all calls, against each sample alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pergrad
from pergrad.engine.looping.loop import looped
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.options import Options
from pergrad.engine.recording.running import run_recorded
from pergrad.errors import BatchSizeError, MixedSamplesError, PergradError
from pergrad.testing import assert_near
from tests.engine.exactness import Formula, numbers, state_of
from tests.engine.looping.refused import refused
from tests.engine.ragged import CASES, graph_batch, packed_llama, preferences


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compares to 1e-9 of the model's largest gradient: some are zero but for rounding."""
    assert found.keys() == expected.keys()
    scale = max(float(rows.abs().max()) for rows in expected.values())
    for name, rows in expected.items():
        assert found[name].shape == rows.shape
        assert float((found[name] - rows).abs().max()) <= 1e-9 * scale, name


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_each_sample_alone(name: str) -> None:
    case = CASES[name]()
    before = state_of(case.model)
    found = pergrad.grads(case.model, case.loss, *case.batch, **case.options)
    assert_close(found, case.loop())
    assert state_of(case.model) == before


QUANTITIES: dict[str, Callable[[], pergrad.Quantity]] = {
    "norms": pergrad.Norms,
    "clipped": lambda: pergrad.ClippedSum(0.5),
    "clipped twice": lambda: pergrad.ClippedSum(0.5, memory="low"),
    "second moment": pergrad.SecondMoment,
    "variance": pergrad.Variance,
    "gram": pergrad.Gram,
    "sketch": lambda: pergrad.Projection(32),
}


@pytest.mark.parametrize(
    "name", ["GIN, Batch", "GAT, tensors", "blocks, Batch", "packed, SDPA, block mask", "pairs"]
)
def test_all_quantities_are_those_of_a_loop_over_samples(name: str) -> None:
    case = CASES[name]()
    size = len(case.alone)
    options = Options(**case.options, sample_weights=torch.linspace(0.5, 2, size).double())
    found = [make() for make in QUANTITIES.values()]
    run_recorded(case.model, case.loss, case.batch, found, options)
    expected = [make() for make in QUANTITIES.values()]
    before = Snapshot(case.model)
    looped(case.model, case.loss, case.batch, expected, options, before)
    for key, a, b in zip(QUANTITIES, found, expected, strict=True):
        of_a, of_b = a.result, b.result  # type: ignore[attr-defined]
        for part in of_b if isinstance(of_b, dict) else [None]:
            near = (of_a, of_b) if part is None else (of_a[part], of_b[part])
            assert_near(*near, f"{key} {part}")


@pytest.mark.parametrize(
    "name", ["GIN, Batch", "GINE, tensors", "packed, SDPA, positions", "images"]
)
def test_certify_and_verify_exchange_whole_samples(name: str) -> None:
    case = CASES[name]()
    certified = pergrad.certify(case.model, case.loss, *case.batch, quiet=True, **case.options)
    assert certified.ok, certified
    assert not certified.notes
    verified = pergrad.verify(case.model, case.loss, *case.batch, quiet=True, **case.options)
    assert verified.ok, verified


def with_constant_rows(h: Tensor) -> Tensor:
    return torch.cat([h, h.new_ones(2, h.shape[1])])


OWNERS = torch.tensor([0, 0, 1, 2, 2, 1, 0])
LONGER = torch.cat([OWNERS, torch.tensor([1, 2])])


def of_rows(function: Callable[[Tensor], Tensor]) -> Formula:
    return Formula(lambda m, x: function(x @ m.w), w=numbers(3, 4))


def summed(rows: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros(3, rows.shape[1], dtype=rows.dtype).index_add(0, ids, rows)


def written_last(h: Tensor) -> Tensor:
    """Writes no rows first."""
    out = h.new_zeros(len(h), h.shape[1])
    for part in (h.new_zeros(len(h)) > 0, h.new_zeros(len(h)) < 1):
        rows = part.nonzero().flatten()
        out.index_copy_(0, rows, h[rows])
    return summed(out, OWNERS)


# Constant rows belong to the sample whose rows they are combined with.
CONSTANT_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "added to rows of samples": lambda h: summed(with_constant_rows(h), LONGER),
    "multiplied": lambda h: summed(with_constant_rows(h) * h.tanh()[[*range(7), 2, 3]], LONGER),
    "activated, then added": lambda h: summed(with_constant_rows(h).tanh() * 2, LONGER),
    "cut off again": lambda h: summed(with_constant_rows(h)[:7].square(), OWNERS),
    "joined again": lambda h: summed(
        torch.cat([with_constant_rows(h)[2:], h[:2]]), LONGER.roll(-2)
    ),
    "no rows": written_last,
}


@pytest.mark.parametrize("name", CONSTANT_ROWS)
def test_constant_rows_belong_to_what_they_meet(name: str) -> None:
    model, x = of_rows(CONSTANT_ROWS[name]), numbers(7, 3)
    losses = model(x).square().sum(1)
    expected = [torch.autograd.grad(loss, model.w, retain_graph=True)[0] for loss in losses]
    found = pergrad.grads(model, lambda m, x: m(x).square().sum(1), x, owners={"x": OWNERS})
    assert_near(found["w"], torch.stack(expected))


JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "added to others": lambda h: summed(with_constant_rows(h), LONGER.roll(1)),
    "multiplied by others": lambda h: summed(
        with_constant_rows(h) * h.tanh()[[*range(6), 3, 2, 3]], LONGER
    ),
    "shifted": lambda h: summed(with_constant_rows(h)[1:8] * h.tanh(), OWNERS),
}


@pytest.mark.parametrize("name", JOINED)
def test_constant_rows_do_not_hide_samples_that_meet(name: str) -> None:
    model, x = of_rows(JOINED[name]), numbers(7, 3)
    with pytest.raises(MixedSamplesError):
        pergrad.grads(model, lambda m, x: m(x).square().sum(1), x, owners={"x": OWNERS})


def test_record_takes_owners_of_the_arguments_of_the_module() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, ids = numbers(7, 3), torch.tensor([0, 2, 1, 1, 0, 2, 1])
    expected = [
        torch.autograd.grad(model(x[ids == k]).square().sum(), list(model.parameters()))
        for k in range(3)
    ]
    with pergrad.record(model, pergrad.Grads(), owners=ids, certify=True) as grads:
        model(x).square().sum().backward()
    for k, own in enumerate(expected):
        for rows, g in zip(grads.result.values(), own, strict=True):
            assert_near(rows[k], g)


class OnBatch(nn.Module):
    """Takes a batch of graphs as its only argument."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, data: Any) -> Tensor:
        return self.inner(data.x, data.edge_index, data.batch, data.edge_attr)


def test_record_takes_a_module_of_a_batch_of_graphs() -> None:
    case = graph_batch("GIN")
    model, (data,) = OnBatch(case.model), case.batch
    with pergrad.record(model, pergrad.Grads(), certify=True) as grads:
        (model(data) - data.y).square().sum().backward()
    expected = {f"inner.{name}": rows for name, rows in case.loop().items()}
    assert_close(grads.result, expected)


def test_losses_of_rows_are_summed_for_each_sample() -> None:
    model, ids = nn.Linear(3, 1).double(), torch.tensor([1, 0, 1, 1])
    x = numbers(4, 3)

    def of_rows(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).squeeze(1).square()

    grads = pergrad.Grads()
    losses = run_recorded(model, of_rows, (x,), [grads], Options(owners=ids, loss_reduction="mean"))
    assert_near(losses, torch.stack([of_rows(model, x[ids == k]).sum() for k in range(2)]).detach())
    expected = [
        torch.autograd.grad(of_rows(model, x[ids == k]).sum(), model.weight)[0] for k in range(2)
    ]
    assert_near(grads.result["weight"], torch.stack(expected))


def test_losses_of_rows_in_another_order_are_refused() -> None:
    model, ids = nn.Linear(3, 1).double(), torch.tensor([1, 0, 1, 1])
    with pytest.raises(MixedSamplesError, match="does not depend on sample n alone"):
        pergrad.grads(model, lambda m, x: m(x).squeeze(1).flip(0), numbers(4, 3), owners=ids)


MEETING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "softmax over all rows": lambda m, x: m.a(x).softmax(0).sum(1),
    "mean of all rows": lambda m, x: (m.a(x) - m.a(x).mean(0)).square().sum(1),
    "attention without a mask": lambda m, x: (
        ((m.a(x) @ m.a(x).T).softmax(-1) @ m.a(x)).square().sum(1)
    ),
    "a mask after the softmax of all": lambda m, x: (
        ((m.a(x) @ m.a(x).T).softmax(-1) * (IDS[:, None] == IDS) @ m.a(x)).square().sum(1)
    ),
    "values that cancel": lambda m, x: (
        ((_zero(m.a(x) @ m.a(x).T) + torch.eye(len(x))) @ m.a(x)).square().sum(1)
    ),
    "scores summed": lambda m, x: (m.a(x) @ m.a(x).T).square().sum(1),
    "neighbours": lambda m, x: m.a(x.roll(1, 0)).square().sum(1),
}
IDS = torch.tensor([0, 0, 1, 2, 2, 2])


def _zero(t: Tensor) -> Tensor:
    return t - t.detach()


@pytest.mark.parametrize("name", MEETING)
def test_rows_of_different_samples_that_meet_are_refused(name: str) -> None:
    model = Formula(MEETING[name], a=nn.Linear(3, 3)).double()
    x = numbers(6, 3)
    with pytest.raises(PergradError):
        pergrad.grads(model, lambda m, x: m(x), x, owners=IDS)
    with pytest.raises(PergradError):
        pergrad.grads(model, lambda m, x: m(x), x, owners=IDS, fallback="loop")


def test_a_block_mask_in_the_scores_keeps_samples_apart() -> None:
    def attend(m: Any, x: Tensor) -> Tensor:
        mask = torch.where(IDS[:, None] == IDS, 0.0, -torch.inf).double()
        return ((m.a(x) @ m.b(x).T / 3 + mask).softmax(-1) @ m.a(x)).square().sum(1)

    model = Formula(attend, a=nn.Linear(3, 3), b=nn.Linear(3, 3, bias=False)).double()
    x = numbers(6, 3)
    found = pergrad.grads(model, lambda m, x: m(x), x, owners=IDS)
    for name, p in model.named_parameters():
        for k in range(3):
            rows = x.clone()
            (g,) = torch.autograd.grad(model(rows)[k == IDS].sum(), p)
            assert_near(found[name][k], g, name)


def test_packed_sequences_without_a_mask_are_refused() -> None:
    case = packed_llama("sdpa", "bool")
    everything = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    with pytest.raises(MixedSamplesError, match="attend to rows of other samples"):
        pergrad.grads(case.model, case.loss, *case.batch[:3], everything, **case.options)


@pytest.mark.parametrize("name", ["GINE, tensors", "packed, SDPA, block mask", "pairs", "images"])
def test_the_loop_cuts_whole_samples(name: str) -> None:
    case = CASES[name]()
    model = refused(case.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, on the hook
        found = pergrad.grads(model, case.loss, *case.batch, fallback="loop", **case.options)
    assert_close(found, case.loop())


def test_compiled_steps_take_a_function_of_the_batch_and_stay_uncompiled() -> None:
    case, grads = preferences(), pergrad.Grads()
    step = pergrad.compiled(
        case.model,
        case.loss,
        grads,
        owners=lambda tokens, _: torch.arange(len(tokens) // 2).repeat(2),
    )
    with pytest.warns(UserWarning, match="runs uncompiled"):
        step(*case.batch)
    step(*case.batch)  # a second warning would be an error
    assert_close(grads.result, case.loop())
    tokens, reference = case.batch
    rows = torch.tensor([0, 1, 4, 5])
    step(tokens[rows], reference[rows])
    assert len(grads.result["head.bias"]) == 2


def test_dropout_is_certified_with_owners() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    ids = torch.tensor([0, 0, 1, 1, 1, 2])
    report = pergrad.certify(
        model, lambda m, x: m(x).squeeze(1).square(), numbers(6, 3), owners=ids, quiet=True
    )
    assert report.ok, report


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "length": (torch.tensor([0, 1]), {}, "owners has 2 ids, but no argument has as many rows"),
    "length by name": ({"x": torch.tensor([0, 1])}, {}, r"owners\['x'\] has 2 ids"),
    "gaps": (torch.tensor([0, 2, 2, 0]), {}, r"no row for the samples \[1\]"),
    "no rows": (torch.tensor([0, 1, 1, 0]), {"batch_size": 3}, r"no row for the samples \[2\]"),
    "too many": (torch.tensor([0, 1, 1, 2]), {"batch_size": 2}, "the id 2, but batch_size is 2"),
    "negative": (torch.tensor([0, -1, 1, 0]), {}, "negative id -1"),
    "floats": (torch.tensor([0.0, 1.0, 1.0, 0.0]), {}, "must be integers"),
    "bools": (torch.tensor([True, False, True, True]), {}, "must be integers"),
    "shape": (torch.zeros(2, 2).long(), {}, r"got the shape \(2, 2\)"),
    "empty": ({"x": None}, {}, "owners is empty"),
    "second dimension": (torch.tensor([0, 1, 1, 0]), {"batch_first": False}, "batch_first=False"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_owners_are_refused_in_one_sentence(name: str) -> None:
    owners, options, message = WRONG[name]
    model, x = nn.Linear(3, 1).double(), numbers(4, 3)
    with pytest.raises(BatchSizeError, match=message):
        pergrad.grads(model, lambda m, x: m(x).squeeze(1), x, owners=owners, **options)


def test_verify_within_a_block_takes_no_owners() -> None:
    model = nn.Linear(3, 1)
    with (
        pytest.raises(PergradError, match="certify=True"),
        pergrad.record(model, pergrad.Norms(), owners=[0, 0, 1], verify=True),
    ):
        pass


def test_positions_of_owners_are_those_of_the_loss_function() -> None:
    """The model numbers its arguments anew, and gets a tensor that is none of the loss function's."""
    model = Formula(lambda m, scale, x: m.a(scale * x), a=nn.Linear(3, 1)).double()
    x, y, scale = numbers(5, 3), numbers(4, 1), numbers(5, 3)
    of_x, of_y = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 0, 1, 1])

    def losses(model: nn.Module, y: Tensor, x: Tensor) -> Tensor:
        return model(scale, x).square().squeeze(1)

    found = pergrad.grads(model, losses, y, x, owners={0: of_y, 1: of_x})
    for n in range(2):
        rows = x[of_x == n]
        total = model(scale[of_x == n], rows).square().sum()
        wanted = torch.autograd.grad(total, list(model.parameters()))
        for own, g in zip(found.values(), wanted, strict=True):
            assert_near(own[n], g)
