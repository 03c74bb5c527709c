"""Recurrent modules under `call_for_per_sample_grads`, against a loop over samples."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import pergrad
from pergrad.testing import loop_grads
from tests.engine.loop_check import EXACT, Reduction, assert_grad_samples, check, double, reduce
from tests.engine.recurrent_cases import (
    BATCH,
    HIDDEN,
    INPUT,
    KINDS,
    TIME,
    build,
    losses,
    losses_of,
    run,
    states_of,
)
from tests.engine.torch_databases import MODULE_INFOS

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def check_recurrent(
    module: nn.RNNBase,
    x: Tensor,
    *states: Tensor,
    loss_reduction: Reduction = "sum",
    needs_grad: bool = False,
    **options: Any,
) -> None:
    expected = loop_grads(module, losses, x, *states)
    leaves = [tensor.detach().clone().requires_grad_(needs_grad) for tensor in (x, *states)]
    plain_outputs = run(module, module, *leaves)
    wrapped = pergrad.call_for_per_sample_grads(module, loss_reduction=loss_reduction, **options)
    outputs = run(wrapped, module, *leaves)
    for got, plain in zip(outputs, plain_outputs, strict=True):
        assert_close(got, plain, **EXACT)
    reduce(losses_of(outputs), loss_reduction).backward()
    assert_grad_samples(module, expected)
    if needs_grad:
        loss = reduce(losses_of(plain_outputs), loss_reduction)
        for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            assert_close(leaf.grad, grad, **EXACT)


OPTIONS = [
    {},
    {"num_layers": 2},
    {"num_layers": 3},
    {"bidirectional": True},
    {"bidirectional": True, "num_layers": 2},
    {"bidirectional": True, "num_layers": 3, "bias": False},
    {"bias": False},
    {"bias": False, "num_layers": 2},
]


@every_kind
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
def test_grad_sample_equals_the_loop(
    kind: str, options: dict[str, Any], loss_reduction: Reduction, batch_first: bool
) -> None:
    check_recurrent(
        build(kind, batch_first=batch_first, **options),
        double(BATCH, TIME, INPUT),
        loss_reduction=loss_reduction,
        batch_first=batch_first,
    )


@every_kind
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
def test_given_initial_states_and_gradients_to_all_inputs(
    kind: str, options: dict[str, Any], batch_first: bool
) -> None:
    module = build(kind, batch_first=batch_first, **options)
    # States have the batch in dimension 1 whatever the module says, so the size is given.
    check_recurrent(
        module,
        double(BATCH, TIME, INPUT),
        *states_of(module, BATCH),
        needs_grad=True,
        batch_size=BATCH,
        batch_first=batch_first,
    )


@every_kind
def test_batch_size_is_read_from_dimension_one_of_time_first_input_and_states(kind: str) -> None:
    module = build(kind, num_layers=2)
    check_recurrent(
        module, double(BATCH, TIME, INPUT), *states_of(module, BATCH), batch_first=False
    )


@every_kind
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
def test_all_sizes_equal(kind: str, batch_first: bool) -> None:
    module = build(kind, 3, 3, num_layers=3, batch_first=batch_first)
    check_recurrent(
        module,
        double(3, 3, 3),
        *states_of(module, 3),
        loss_reduction="mean",
        needs_grad=True,
        batch_first=batch_first,
    )


@every_kind
@pytest.mark.parametrize(("batch", "time"), [(1, 4), (4, 1), (1, 1)])
def test_one_sample_or_one_step(kind: str, batch: int, time: int) -> None:
    module = build(kind, num_layers=2, bidirectional=True, batch_first=True)
    check_recurrent(module, double(batch, time, INPUT), needs_grad=True)


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("given_states", [False, True], ids=["zero states", "given states"])
def test_lstm_with_projections(
    num_layers: int, bias: bool, bidirectional: bool, given_states: bool
) -> None:
    module = build(
        "lstm",
        proj_size=2,
        num_layers=num_layers,
        bias=bias,
        bidirectional=bidirectional,
        batch_first=True,
    )
    states = states_of(module, BATCH) if given_states else ()
    check_recurrent(module, double(BATCH, TIME, INPUT), *states, needs_grad=True, batch_size=BATCH)


@every_kind
@pytest.mark.parametrize("frozen", ["weight_ih", "weight_hh", "bias_ih", "bias_hh", "_l0", "_l1"])
def test_frozen_weights_are_left_alone(kind: str, frozen: str) -> None:
    module = build(kind, num_layers=2, batch_first=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(frozen not in name)
    check_recurrent(module, double(BATCH, TIME, INPUT), needs_grad=True)


def database_cases() -> list[Any]:
    """Give each recurrent module of torch's database a batch: its inputs have none."""
    cases = []
    for info in MODULE_INFOS:
        if info.module_cls not in (nn.RNN, nn.LSTM, nn.GRU):
            continue
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=False, training=True
        )
        for index, given in enumerate(inputs):
            x, *states = given.forward_input.args
            name = f"{info.module_cls.__name__}-{index}"
            make = partial(info.module_cls, **given.constructor_input.kwargs)
            cases.append(pytest.param(make, x, bool(states), id=name))
    return cases


@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
@pytest.mark.parametrize(("make", "x", "given_states"), database_cases())
def test_module_of_the_database_with_a_batch(
    make: Callable[[], nn.RNNBase], x: Tensor, given_states: bool, loss_reduction: Reduction
) -> None:
    module = make().double()
    assert x.dim() == 2
    batched = double(3, *x.shape)
    check_recurrent(
        module,
        batched,
        *(states_of(module, 3) if given_states else ()),
        loss_reduction=loss_reduction,
        needs_grad=loss_reduction == "mean",
        batch_size=3,
        batch_first=module.batch_first,
    )


@pytest.mark.parametrize(("make", "x", "given_states"), database_cases())
def test_module_of_the_database_without_a_batch_is_refused(
    make: Callable[[], nn.RNNBase], x: Tensor, given_states: bool
) -> None:
    module = make().double()
    states = tuple(state[0] for state in states_of(module, 1)) if given_states else ()
    hx = states if len(states) == 2 else states[0] if states else None

    def step() -> None:
        output, _ = pergrad.call_for_per_sample_grads(module, batch_size=x.shape[0])(x, hx)
        output.sum().backward()

    with pytest.raises(RuntimeError):
        step()
    assert all(not hasattr(parameter, "grad_sample") for parameter in module.parameters())


class Tagger(nn.Module):
    """Words to tags through a time-first recurrent layer, in a model that is batch first."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, INPUT, padding_idx=0)
        self.recurrent = KINDS[kind](INPUT, HIDDEN, num_layers=2, bidirectional=True)
        self.norm = nn.LayerNorm(2 * HIDDEN)
        self.head = nn.Linear(2 * HIDDEN, 4)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embed(words).transpose(0, 1))
        return self.head(self.norm(hidden).transpose(0, 1))


@every_kind
@pytest.mark.parametrize("time", [3, BATCH])
def test_time_first_layer_inside_a_batch_first_model(kind: str, time: int) -> None:
    check(Tagger(kind).double(), torch.randint(9, (BATCH, time)), "mean")


class Unrolled(nn.Module):
    """Reads a sequence in two pieces, handing the state over."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.recurrent = KINDS[kind](INPUT, HIDDEN, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        first, state = self.recurrent(x[:, :2])
        second, _ = self.recurrent(x[:, 2:], state)
        return torch.cat([first, second], dim=1)


@every_kind
def test_state_handed_from_one_call_to_the_next(kind: str) -> None:
    check(Unrolled(kind).double(), double(BATCH, TIME + 1, INPUT), needs_grad=True)


@every_kind
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
def test_dropout_of_everything_cuts_the_layers_apart(kind: str, batch_first: bool) -> None:
    # p = 1 is the one dropout without chance in it, so the loop applies as it is.
    module = build(kind, num_layers=3, dropout=1.0, bidirectional=True, batch_first=batch_first)
    check_recurrent(module, double(BATCH, TIME, INPUT), needs_grad=True, batch_first=batch_first)
    rows = module.weight_ih_l1.grad_sample
    assert not rows.any()


@every_kind
def test_dropout_is_off_in_eval_mode(kind: str) -> None:
    module = build(kind, num_layers=2, dropout=0.5, batch_first=True).eval()
    check_recurrent(module, double(BATCH, TIME, INPUT), needs_grad=True)


@every_kind
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "time first"])
def test_dropout_draws_what_the_plain_module_draws(
    kind: str, bidirectional: bool, batch_first: bool
) -> None:
    module = build(
        kind, num_layers=3, dropout=0.5, bidirectional=bidirectional, batch_first=batch_first
    )
    x = double(BATCH, TIME, INPUT)
    torch.manual_seed(7)
    plain = run(module, module, x)
    losses_of(plain).sum().backward()
    summed = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    outputs = run(pergrad.call_for_per_sample_grads(module, batch_first=batch_first), module, x)
    for got, expected in zip(outputs, plain, strict=True):
        assert_close(got, expected, **EXACT)
    losses_of(outputs).sum().backward()
    for name, parameter in module.named_parameters():
        assert_close(parameter.grad_sample.sum(0), summed[name], **EXACT)


class TwoLayersWithMask(nn.Module):
    """A two-layer relu RNN written out, its dropout mask (B, T, H) an input."""

    def __init__(self, module: nn.RNNBase) -> None:
        super().__init__()
        for name, parameter in module.named_parameters():
            self.register_parameter(name, nn.Parameter(parameter.detach().clone()))

    def layer(self, x: Tensor, suffix: str) -> Tensor:
        w_ih, w_hh, b_ih, b_hh = (
            getattr(self, f"{name}_{suffix}")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        steps = [x.new_zeros(x.shape[0], w_hh.shape[0])]
        for t in range(x.shape[1]):
            steps.append(torch.relu(x[:, t] @ w_ih.T + b_ih + steps[-1] @ w_hh.T + b_hh))
        return torch.stack(steps[1:], dim=1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layer(self.layer(x, "l0") * mask, "l1")


def test_gradients_go_through_the_mask_that_dropout_drew() -> None:
    p, batch, time, width = 0.25, 8, 10, 12
    module = build("rnn_relu", INPUT, width, num_layers=2, dropout=p, batch_first=True)
    with torch.no_grad():
        # Layer 1 passes its input on, moved off relu's kink, so that the output shows the mask.
        module.bias_ih_l0.fill_(3.0)
        module.weight_ih_l1.copy_(torch.eye(width))
        module.weight_hh_l1.zero_()
        module.bias_ih_l1.fill_(1.0)
        module.bias_hh_l1.zero_()
    x, cotangent = double(batch, time, INPUT), double(batch, time, width)
    output, _ = pergrad.call_for_per_sample_grads(module)(x)
    (output * cotangent).sum().backward()

    written_out = TwoLayersWithMask(module)
    first = written_out.layer(x, "l0").detach()
    alive = first > 1e-3
    mask = torch.where(alive, (output.detach() - 1.0) / first, torch.zeros_like(first))
    kept = mask[alive] > 0.5
    assert_close(mask[alive], kept.double() / (1 - p), **EXACT)
    assert abs(kept.double().mean().item() - (1 - p)) < 0.1
    assert (mask[0] != mask[1]).any(), "two samples share a mask"
    assert (mask[:, 0] != mask[:, 1]).any(), "two steps share a mask"

    def masked(model: nn.Module, x: Tensor, mask: Tensor, cotangent: Tensor) -> Tensor:
        return (model(x, mask) * cotangent).flatten(1).sum(1)

    assert_grad_samples(module, loop_grads(written_out, masked, x, mask, cotangent))
