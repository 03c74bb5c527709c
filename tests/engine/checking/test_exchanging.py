"""Every ordered pair of samples is tried, by the fewest rounds, and those that meet are found."""

from collections.abc import Callable
from itertools import combinations, permutations
from math import comb
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from pergrad.engine.checking.exchanging import _differs, meeting
from pergrad.engine.checking.replays import LossReplay
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.engine.recording.options import Options
from pergrad.engine.samples.proving import subsets
from pergrad.errors import PergradError
from tests.engine.exactness import Formula, numbers, state_of

SIZE, T, D, OUT, WORDS = 6, 4, 4, 3, 7


def loss(model: Callable[..., Any], *batch: Any) -> Tensor:
    return (model(*batch) + 0.5).pow(3).flatten(1).sum(1)


def problems(model: nn.Module, *batch: Any, size: int = SIZE, fn: Any = loss) -> list[str]:
    notes: list[str] = []
    replay = LossReplay(model.double(), fn, batch, Options(), Snapshot(model), size)
    return meeting(replay, notes) + notes


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 20, 64])
def test_every_ordered_pair_has_a_round_that_exchanges_one_and_keeps_the_other(size: int) -> None:
    table = subsets(size)
    for m, n in permutations(range(size), 2):
        assert any(bool(row[m]) and not bool(row[n]) for row in table)


@pytest.mark.parametrize(("size", "rounds"), [(1, 0), (2, 2), (3, 3), (64, 8), (256, 11)])
def test_rounds_are_the_fewest(size: int, rounds: int) -> None:
    assert len(subsets(size)) == rounds
    assert comb(rounds, rounds // 2) >= size
    assert rounds == 0 or comb(rounds - 1, (rounds - 1) // 2) < size


def test_a_model_that_keeps_samples_apart_has_no_problem_and_its_modes() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Dropout(), nn.LayerNorm(D), nn.Linear(D, OUT))
    model[1].train(False)
    before, modes = state_of(model.double()), [m.training for m in model.modules()]
    assert problems(model, numbers(SIZE, D)) == []
    assert state_of(model) == before
    assert [m.training for m in model.modules()] == modes


@pytest.mark.parametrize(("source", "target"), [*permutations(range(4), 2)])
def test_any_pair_that_meets_out_of_sight_of_autograd_is_found(source: int, target: int) -> None:
    def leak(m: Any, x: Tensor) -> Tensor:
        h = m.part(x)
        other = torch.zeros_like(h)
        other[target] = h.detach()[source]
        return h + other

    model = Formula(leak, part=nn.Linear(D, OUT))
    (problem,) = problems(model, numbers(4, D), size=4)
    assert f"changes the outputs of [{target}]" in problem


# Functions of the batch that some exchanges leave unchanged: of the set of its samples, or of few of them.
OF_THE_BATCH: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h.mean(0),
    "largest": lambda h: h.amax(0),
    "second largest": lambda h: h.sort(0).values[-2],
    "median": lambda h: h.median(0).values,
    "last": lambda h: h[-1],
    "neighbour": lambda h: h.roll(1, 0),
    "count": lambda h: (h > 0).sum(0) * 0.1,
}


@pytest.mark.parametrize("size", [2, SIZE, 9])
@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_a_detached_function_of_the_batch_is_found(name: str, size: int) -> None:
    if name == "second largest" and size == 2:
        name = "last"
    torch.manual_seed(size)
    model = Formula(
        lambda m, x: (h := m.part(x)) - OF_THE_BATCH[name](h.detach()), part=nn.Linear(D, OUT)
    )
    assert len(problems(model, numbers(size, D), size=size)) == 1


_TOGETHER = [
    pair for pair in combinations(range(9), 2) if any(row[list(pair)].all() for row in subsets(9))
]


@pytest.mark.parametrize("pair", _TOGETHER)
def test_a_length_that_two_samples_of_one_round_decide_is_found(pair: tuple[int, int]) -> None:
    def padded(m: Any, x: Tensor) -> Tensor:
        longest = (x != 0).sum(1).max()
        return m.part(x) * longest

    x = torch.randn(9, D).double()
    x[:, -1] = 0
    x[list(pair), -1] = 1
    assert len(problems(Formula(padded, part=nn.Linear(D, OUT)), x, size=9)) == 1


def test_samples_that_meet_in_training_only_are_found_in_spite_of_dropout() -> None:
    def mixup(m: Any, x: Tensor) -> Tensor:
        h = m.drop(m.part(x))
        return h + h.detach()[torch.randperm(len(h))] if m.training else h

    model = Formula(mixup, part=nn.Linear(D, OUT), drop=nn.Dropout())
    assert "mixes samples" in problems(model, numbers(SIZE, D))[0]


def test_functional_dropout_is_no_mixing() -> None:
    model = Formula(lambda m, x: F.dropout(m.part(x), training=True), part=nn.Linear(D, OUT))
    assert problems(model, numbers(SIZE, D)) == []


@pytest.mark.parametrize("mixes", [False, True])
def test_draws_that_depend_on_values_are_left_out_by_eval_mode(mixes: bool) -> None:
    def routed(m: Any, x: Tensor) -> Tensor:
        h, chosen = m.part(x), x[:, 0] > 0
        noise = torch.zeros_like(h)
        if m.training:  # the first expert alone draws
            noise[chosen] = torch.rand_like(h[chosen])
        return h + noise + (h.detach().mean(0) if mixes else 0)

    model, x = Formula(routed, part=nn.Linear(D, OUT)), numbers(SIZE, D)
    x[:, 0] = x[:, 0].abs() * torch.tensor([1, -1, 1, -1, 1, 1])
    found = problems(model, x)
    assert any("mixes samples" in p for p in found) is mixes
    assert any("eval mode" in p for p in found)


def test_draws_that_always_depend_on_values_are_refused() -> None:
    def routed(m: Any, x: Tensor) -> Tensor:
        h, noise = m.part(x), torch.zeros(len(x), OUT, dtype=x.dtype)
        noise[x[:, 0] > 0] = torch.rand_like(h[x[:, 0] > 0])
        return h + noise

    with pytest.raises(PergradError, match="depend on the samples"):
        problems(Formula(routed, part=nn.Linear(D, OUT)), numbers(SIZE, D))


def test_targets_and_masks_go_with_their_samples() -> None:
    """Padding of one sample must not be looked at in another one's place."""
    ids = torch.randint(1, WORDS, (SIZE, T))
    mask = torch.ones(SIZE, T, dtype=torch.bool)
    for n in range(SIZE):
        mask[n, 1 + n % T :] = False
    ids[~mask] = 0

    def checked(m: Any, ids: Tensor, mask: Tensor) -> Tensor:
        assert torch.equal(ids != 0, mask)  # as it would fail with ids alone exchanged
        return m.table(ids) * mask[..., None]

    model = Formula(checked, table=nn.Embedding(WORDS, D))
    assert problems(model, ids, mask) == []


@pytest.mark.parametrize("mixes", [False, True])
def test_integers_are_exchanged_too(mixes: bool) -> None:
    def looked_up(m: Any, ids: Tensor) -> Tensor:
        return m.table(ids) + (ids.double().mean() if mixes else 0)

    found = problems(Formula(looked_up, table=nn.Embedding(WORDS, D)), torch.arange(SIZE)[:, None])
    assert bool(found) is mixes


def test_repeated_samples_do_not_hide_others() -> None:
    x = numbers(2, D)[[0, 0, 0, 1, 0, 0]]
    model = Formula(lambda m, x: (h := m.part(x)) - h.detach().mean(0), part=nn.Linear(D, OUT))
    assert "mixes samples" in problems(model, x)[0]


def test_equal_samples_cannot_be_tried_which_is_noted() -> None:
    (note,) = problems(nn.Linear(D, OUT), numbers(1, D).expand(SIZE, D))
    assert "all samples of the batch are the same" in note


def test_a_single_sample_has_none_to_meet() -> None:
    assert problems(nn.Linear(D, OUT), numbers(1, D), size=1) == []


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(PergradError, match="no tensor among the arguments has 6 samples"):
        problems(nn.Linear(D, OUT), numbers(SIZE + 1, D), fn=lambda m, x: loss(m, x[:SIZE]))


@pytest.mark.parametrize("mixes", [False, True])
def test_entries_of_lists_are_exchanged(mixes: bool) -> None:
    def of_a_list(model: nn.Module, rows: list[Tensor]) -> Tensor:
        x = torch.stack(rows)
        return loss(model, x - x.mean(0) if mixes else x)

    rows = [numbers(D) for _ in range(SIZE)]
    assert bool(problems(nn.Linear(D, OUT), rows, fn=of_a_list)) == mixes


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_packed_sequences_are_exchanged(mixes: bool, is_sorted: bool) -> None:
    lengths = [4, 3, 3, 1] if is_sorted else [3, 1, 4, 3]
    packed = pack_sequence([numbers(n, D) for n in lengths], enforce_sorted=is_sorted)

    def recurrent(m: Any, packed: Any) -> Tensor:
        h = pad_packed_sequence(m.rnn(packed)[0], batch_first=True)[0]
        return h + (h.detach().mean(0) if mixes else 0)

    found = problems(Formula(recurrent, rnn=nn.GRU(D, OUT)), packed, size=4)
    assert bool(found) is mixes


def test_samples_with_losses_that_are_not_finite_are_compared() -> None:
    x = numbers(SIZE, D)
    x[2] = torch.nan
    assert problems(nn.Linear(D, OUT), x) == []


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.int64, torch.bool])
def test_outputs_of_any_type_are_compared(dtype: torch.dtype) -> None:
    a = torch.tensor([[1, 0], [0, 1], [1, 1]]).to(dtype)
    assert not _differs(a, a.clone()).any()
    b = a.clone()
    b[1, 0] = 1j if dtype.is_complex else 1
    assert _differs(a, b).tolist() == [False, True, False]
