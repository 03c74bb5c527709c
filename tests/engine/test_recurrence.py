"""Recurrent layers as one function of all their steps: what models do around them, and what that saves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close

import pergrad
from pergrad.errors import MixedSamplesError
from pergrad.rules.recurrence import Steps
from pergrad.testing import assert_near
from tests.engine.loop_check import EXACT, check, double
from tests.engine.recurrent_cases import BATCH, HIDDEN, INPUT, KINDS, TIME, build

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Around(nn.Module):
    """A recurrent layer, and the code around it."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Tensor], **others: Any) -> None:
        super().__init__()
        self.layer = layer
        self._forward = forward
        for name, value in others.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def last_of(final: Any) -> Tensor:
    """The last of the states: c, where there is one."""
    return (final[-1] if isinstance(final, tuple) else final)[-1]


def with_output_twice(m: Any, x: Tensor) -> Tensor:
    output, final = m.layer(x)
    return output * last_of(final).unsqueeze(1) + output.flip(1)


def with_last_state_alone(m: Any, x: Tensor) -> Tensor:
    return last_of(m.layer(x)[1])


def with_first_step_alone(m: Any, x: Tensor) -> Tensor:
    return m.layer(x)[0][:, 0]


def in_two_pieces_cut_apart(m: Any, x: Tensor) -> Tensor:
    first, state = m.layer(x[:, :2])
    cut = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
    return torch.cat([first, m.layer(x[:, 2:], cut)[0]], 1)


def there_and_back(m: Any, x: Tensor) -> Tensor:
    output, state = m.layer(x)
    return m.layer(x.flip(1), state)[0] * output


def with_output_changed_in_place(m: Any, x: Tensor) -> Tensor:
    return m.layer(x)[0].mul_(2.0).relu_() + 1


def on_two_rows_a_sample(m: Any, x: Tensor) -> Tensor:
    output, _ = m.layer(torch.stack([x, x.flip(1)], 1).flatten(0, 1))
    return output.unflatten(0, (-1, 2)).prod(1)


def on_copies_behind_each_other(m: Any, x: Tensor) -> Tensor:
    output, _ = m.layer(torch.cat([x, x.flip(1)]))
    return output[: len(x)] * output[len(x) :]


WAYS = [
    with_output_twice,
    with_last_state_alone,
    with_first_step_alone,
    in_two_pieces_cut_apart,
    there_and_back,
    with_output_changed_in_place,
    on_two_rows_a_sample,
    on_copies_behind_each_other,
]


@every_kind
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_whatever_the_model_does_with_a_layer(kind: str, way: Callable[..., Tensor]) -> None:
    layer = build(kind, num_layers=2, batch_first=True)
    check(Around(layer, way), double(BATCH, TIME, INPUT), needs_grad=True)


@every_kind
def test_learned_initial_state(kind: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.start.expand(-1, x.shape[0], -1).contiguous()
        return m.layer(x, (h, h.cos()) if kind == "lstm" else h)[0]

    layer = build(kind, batch_first=True)
    start = nn.Parameter(double(1, 1, HIDDEN))
    check(Around(layer, forward, start=start), double(BATCH, TIME, INPUT), needs_grad=True)


@every_kind
def test_weights_tied_within_a_layer_and_across_layers(kind: str) -> None:
    layer = build(kind, HIDDEN, HIDDEN, num_layers=2, batch_first=True)
    layer.weight_hh_l0 = layer.weight_ih_l1 = layer.weight_ih_l0
    layer.bias_hh_l0 = layer.bias_ih_l0
    model = Around(layer, lambda m, x: m.layer(x)[0])
    check(model, double(BATCH, TIME, HIDDEN), needs_grad=True)


@every_kind
def test_hidden_weight_that_is_derived(kind: str) -> None:
    layer = parametrizations.weight_norm(build(kind, batch_first=True), "weight_hh_l0")
    check(Around(layer, lambda m, x: m.layer(x)[0]), double(BATCH, TIME, INPUT), needs_grad=True)


class Factors(pergrad.Quantity):
    """How many factors each parameter came in."""

    def begin(self, batch: Any) -> None:
        self.counts: dict[str, int] = {}

    def consume(self, name: str, gradients: Any) -> None:
        self.counts[name] = len(gradients.kinds)

    def end(self) -> None: ...


@every_kind
@pytest.mark.parametrize("is_packed", [False, True])
def test_each_weight_has_one_factor_however_many_steps(kind: str, is_packed: bool) -> None:
    module = build(kind, num_layers=2, bidirectional=True, batch_first=True)
    x = double(BATCH, 50, INPUT)
    with pergrad.record(module, Factors(), batch_size=BATCH) as factors:
        given = pack_padded_sequence(x, torch.tensor([50, 50, 9, 4, 1]), batch_first=True)
        output, _ = module(given if is_packed else x)
        (output.data if is_packed else output).sum().backward()
    assert factors.counts == {name: 1 for name, _ in module.named_parameters()}


@every_kind
@pytest.mark.parametrize("frozen", ["none", "weight_hh_l0", "weight_ih_l0"])
def test_samples_in_the_place_of_time_are_refused(kind: str, frozen: str) -> None:
    module = build(kind, batch_first=False, bias=False)
    for name, p in module.named_parameters():
        p.requires_grad_(name != frozen)
    with pytest.raises(MixedSamplesError, match="several samples as one sequence"):
        pergrad.call_for_per_sample_grads(module)(double(BATCH, TIME, INPUT))[0].sum().backward()
    assert not any(hasattr(p, "grad_sample") for p in module.parameters())


def test_samples_in_the_place_of_time_may_be_looked_at() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        m.metric = m.layer(x.transpose(0, 1))[0].mean().detach()
        return m.layer(x)[0]

    check(Around(build("gru", batch_first=True), forward), double(BATCH, TIME, INPUT))


def test_packed_sequences_that_change_their_sample_are_refused() -> None:
    class Crooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = build("lstm")

        def forward(self, x: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, torch.full((BATCH,), TIME), batch_first=True)
            rows = [t * BATCH + (torch.arange(BATCH) + t) % BATCH for t in range(TIME)]
            turned = packed.data[torch.cat(rows)]
            output, _ = self.layer(PackedSequence(turned, packed.batch_sizes))
            return pad_packed_sequence(output, batch_first=True)[0]

    with pytest.raises(MixedSamplesError, match="several samples as one sequence"):
        pergrad.call_for_per_sample_grads(Crooked())(double(BATCH, TIME, INPUT)).sum().backward()


def started(model: Any, x: Tensor, given: Tensor, order: Callable[[Tensor], Tensor]) -> Tensor:
    """Runs a layer on `given`, starting from a function of `x` that `order` has moved."""
    state = order(model.start(x[:, 0]))[None]
    both = (model.start(x[:, 0])[None], state) if isinstance(model.layer, nn.LSTM) else state
    return model.layer(given, both)[0]


@every_kind
@pytest.mark.parametrize(
    "order", [lambda h: h.flip(0), lambda h: h[0].expand_as(h), lambda h: h.roll(1, 0)]
)
def test_states_of_other_samples_than_those_of_the_input_are_refused(kind: str, order: Any) -> None:
    layer, start = build(kind, batch_first=True), nn.Linear(INPUT, HIDDEN).double()
    for given in (lambda x: x, lambda x: x.flip(0)):  # either may be in the order of the batch
        model = Around(layer, lambda m, x, f=given: started(m, x, f(x), order), start=start)
        with pytest.raises(MixedSamplesError):
            pergrad.norms(
                model, lambda m, x: m(x).square().flatten(1).sum(1), double(BATCH, TIME, INPUT)
            )


@every_kind
def test_input_that_is_the_same_for_all_samples_belongs_to_those_of_the_states(kind: str) -> None:
    layer, start = build(kind, batch_first=True), nn.Linear(INPUT, HIDDEN).double()

    def decode(m: Any, x: Tensor) -> Tensor:
        return started(m, x, torch.ones(len(x), 2, INPUT, dtype=x.dtype), lambda h: h)

    check(Around(layer, decode, start=start), double(BATCH, TIME, INPUT))


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.RNNCell])
def test_cell_on_a_repeated_weight_belongs_to_the_samples_of_its_states(cell: Any) -> None:
    def decode(m: Any, x: Tensor) -> Tensor:
        state: Tensor = m.layer(m.token.repeat(len(x), 1), m.start(x))
        return state

    others = {"token": nn.Parameter(double(1, INPUT)), "start": nn.Linear(INPUT, HIDDEN).double()}
    check(Around(cell(INPUT, HIDDEN).double(), decode, **others), double(BATCH, INPUT))


@pytest.mark.parametrize("kind", ["gru", "rnn_tanh", "rnn_relu"])
def test_autocast_gives_the_dtype_of_the_plain_layer(kind: str) -> None:
    module = KINDS[kind](INPUT, HIDDEN, batch_first=True)
    x = torch.randn(BATCH, TIME, INPUT)
    with torch.autocast("cpu", torch.bfloat16):
        plain, last = module(x)
        got, own_last = pergrad.call_for_per_sample_grads(module)(x)
    assert (got.dtype, own_last.dtype) == (plain.dtype, last.dtype)
    assert_close(got.float(), plain.float(), rtol=2e-2, atol=2e-2)


def test_clipped_sum_that_runs_the_backward_twice() -> None:
    module, x = build("lstm", num_layers=2, batch_first=True), double(BATCH, TIME, INPUT)
    sums = []
    for memory in ("kept", "low"):
        with pergrad.record(module, pergrad.ClippedSum(0.3, memory=memory)) as clipped:
            module(x)[0].square().sum().backward()
        sums.append(clipped.result)
    for name, expected in sums[0].items():
        assert_near(sums[1][name], expected, name)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_step(backend: Any) -> None:
    module = build("lstm", batch_first=True)
    grads = pergrad.Grads()

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[0].square().flatten(1).sum(1)

    step = pergrad.compiled(module, losses, grads, backend=backend)
    x = double(BATCH, 3, INPUT)
    for _ in range(2):
        step(x)
    assert step.graphs == 1
    for name, expected in pergrad.grads(module, losses, x).items():
        assert_near(grads.result[name], expected, name)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("dim", "sizes", "shape"), [(0, None, (3, 2, 5)), (1, None, (3, 2, 5)), (0, (3, 3, 1), (7, 5))]
)
def test_steps_are_put_together_as_they_were(
    dim: int, sizes: tuple[int, ...] | None, shape: tuple[int, ...], reverse: bool
) -> None:
    steps, rows = Steps(dim, reverse, sizes), torch.randn(shape)
    parts = steps.split(rows)
    assert [len(part) for part in parts] == list(steps.rows(rows))
    assert_close(steps.join(list(parts)), rows, **EXACT)
    assert_close(steps.first(rows), parts[-1 if reverse else 0], **EXACT)
