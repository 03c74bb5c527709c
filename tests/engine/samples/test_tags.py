"""Tags: no recording leaves one on a tensor, whatever the caller keeps, and no file gets one."""

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pergrad
from pergrad.engine.intercepting.tracker import Tracker
from pergrad.engine.samples.layouts import Scope
from pergrad.engine.samples.tags import TAG, Tagged, leaving_tags_out_of_files, remove_tags
from pergrad.errors import MixedSamplesError, PergradError
from tests.engine.exactness import numbers
from tests.engine.trackers import N, samples, tracker_of


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return t * t

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class Keeps(nn.Module):
    """Keeps tensors of all kinds: of samples, of weights, views, buffers, without gradients, copies."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.w = nn.Linear(3, 3), nn.Parameter(torch.rand(3, 3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros(()))
        self.kept: list[Any] = []
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.mean = h.detach().mean(0)
        self.count.add_(1)
        derived = self.w.exp()
        written = h.clone()
        written[:, 0].mul_(2)
        with torch.no_grad():
            data = h * 2
        inner = checkpoint(lambda t: F.linear(t, derived), h, use_reentrant=False)
        function = Square.apply(h)
        mapped = torch.vmap(lambda t: t * 2)(h)
        self.kept += [x, h, derived, derived.T, written, data, inner, function, mapped, x.flip(0)]
        self.kept += [copy.copy(x), copy.deepcopy(x), self.state_dict(), h.split(1), (h.max(1),)]
        if self.fails == "in the forward":
            raise ValueError(self.fails)
        out = inner + function + written + mapped
        return out - out.mean(0) if self.fails == "refused" else out


def tensors_with_tags() -> list[Tensor]:
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    return [t for t in tensors if any(name.startswith("_pergrad") for name in vars(t))]


EARLIER: list[Tensor] = []  # of other tests, kept so that their ids stay theirs


def tagged() -> list[list[str]]:
    """Lists the attributes of all tensors that have a tag of this test."""
    known = {id(t) for t in EARLIER}
    return [list(vars(t)) for t in tensors_with_tags() if id(t) not in known]


@pytest.fixture(autouse=True)
def _begin() -> Iterator[None]:
    torch.manual_seed(0)
    EARLIER[:] = tensors_with_tags()
    yield
    EARLIER.clear()


@pytest.fixture
def model() -> Keeps:
    return Keeps()


X = torch.rand(N, 3)


def loss_of(model: Any, x: Tensor) -> Tensor:
    losses = model(x).square().sum(1)
    model.kept.append(losses)
    return losses


def recorded(model: Keeps, **options: Any) -> None:
    with pergrad.record(model, pergrad.Norms(), **options):
        total = loss_of(model, X).sum()
        total.backward()
    model.kept.append(total)


def in_micro_batches(model: Keeps) -> None:
    with pergrad.record(model, pergrad.Norms(), calls="more"):
        for x in X.split(2):
            loss_of(model, x).sum().backward()


def by_contract(model: Keeps, **options: Any) -> None:
    loss_of(pergrad_call(model), X).sum().backward(**options)


def pergrad_call(model: Keeps) -> Any:
    call: Any = pergrad.call_for_per_sample_grads(model)
    call.kept = model.kept
    return call


def of_an_expanded_weight(model: Keeps) -> None:
    w = pergrad.ExpandedWeight(model.w, N, "sum")
    model.kept += [F.linear(X, w), w]


def compiled(model: Keeps) -> None:
    plain = nn.Linear(3, 3)
    plain.register_buffer("mean", torch.zeros(3))

    def losses(model: Any, x: Tensor) -> Tensor:
        h = model(x)
        model.mean = h.detach().mean(0)
        return h.square().sum(1)

    step = pergrad.compiled(plain, losses, pergrad.Norms(), backend="eager")
    for _ in range(3):
        model.kept.append(step(X))
    model.kept.append((plain, step))


WAYS: dict[str, Callable[[Keeps], Any]] = {
    "record": recorded,
    "owners": lambda model: recorded(model, owners=torch.tensor([0, 0, 1, 1])),
    "keep_grad": lambda model: recorded(model, keep_grad=True),
    "verify": lambda model: recorded(model, verify=True),
    "more": in_micro_batches,
    "grads": lambda model: pergrad.grads(model, loss_of, X),
    "norms": lambda model: pergrad.norms(model, loss_of, X),
    "certified": lambda model: pergrad.certify(model, loss_of, X),
    "contract": by_contract,
    "contract, kept graph": lambda model: by_contract(model, retain_graph=True),
    "expanded weight": of_an_expanded_weight,
    "compiled": compiled,
}


@pytest.mark.parametrize("way", WAYS)
def test_no_recording_leaves_a_tag_on_what_is_kept(model: Keeps, way: str) -> None:
    WAYS[way](model)
    assert model.kept
    if way == "contract, kept graph":
        model.kept = [t for t in model.kept if not isinstance(t, Tensor) or t.grad_fn is None]
    assert tagged() == []


@pytest.mark.parametrize("way", ["record", "keep_grad", "more", "grads", "norms", "contract"])
@pytest.mark.parametrize("fails", ["in the forward", "refused"])
def test_no_tag_is_left_after_an_error(model: Keeps, way: str, fails: str) -> None:
    model.fails = fails
    with pytest.raises(ValueError if fails == "in the forward" else MixedSamplesError) as error:
        WAYS[way](model)
    assert model.kept
    assert tagged() == [], "although the traceback has all frames"
    assert error


def test_no_tag_is_left_after_an_error_of_the_caller(model: Keeps) -> None:
    def fail() -> None:
        with pergrad.record(model, pergrad.Norms()):
            loss_of(model, X).sum()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert tagged() == []


def test_a_graph_of_the_contract_without_a_backward_keeps_its_tags_as_long_as_it_lives(
    model: Keeps,
) -> None:
    out = pergrad.call_for_per_sample_grads(model)(X)
    assert tagged()
    del out
    assert tagged() == []


def test_a_second_backward_of_the_contract_is_as_the_first(model: Keeps) -> None:
    total = pergrad.call_for_per_sample_grads(model)(X).square().sum()
    found: list[Any] = []
    for keep in (True, False):
        total.backward(retain_graph=keep)
        found.append(getattr(model.w, "grad_sample"))  # noqa: B009
        for p in model.parameters():
            delattr(p, "grad_sample")
    assert torch.equal(*found)
    assert tagged() == []


def test_tensors_that_one_block_has_left_may_go_into_another(model: Keeps) -> None:
    recorded(model)
    x, data = model.kept[0], model.kept[5]
    model.kept.clear()
    norms, expected = pergrad.Norms(), pergrad.Norms()
    with pergrad.record(model, norms):
        model(x + data).sum().backward()
    with pergrad.record(model, expected):
        model((x + data).clone()).sum().backward()
    assert torch.equal(norms.result, expected.result)
    assert tagged() == []


def test_a_backward_after_the_block_is_refused_as_before(model: Keeps) -> None:
    with pergrad.record(model, pergrad.Norms()):
        total = loss_of(model, X).sum()
        total.backward(retain_graph=True)
    with pytest.raises(PergradError):
        total.backward()
    assert tagged() == []


# -- files and copies


def loaded(value: Any, *, is_clean: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    assert (b"pergrad" not in file.getvalue()) == is_clean
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_results_that_are_saved_after_the_block_load_as_weights(model: Keeps) -> None:
    with pergrad.record(model, pergrad.Norms()):
        h = model(X)
        total = h.sum()
        total.backward()
    for t, found in zip([h, total], loaded([h, total]), strict=True):
        assert torch.equal(t, found)
        assert not vars(found)


@pytest.mark.filterwarnings("ignore:backward hook")
@pytest.mark.parametrize("save", [loaded, lambda value: pickle.loads(pickle.dumps(value))])
def test_files_of_a_forward_have_no_tags_and_the_forward_goes_on(save: Any) -> None:
    class Saves(nn.Linear):
        found: Any = None

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            x.note = "of the user"  # type: ignore[attr-defined]
            self.found = save([x, h, h.detach(), self.weight.T, self.state_dict()])
            delattr(x, "note")
            return h

    model, x = Saves(3, 3), torch.rand(N, 3)
    norms, expected = pergrad.Norms(), pergrad.Norms()
    with pergrad.record(model, norms):
        model(x).square().sum().backward()
    plain = nn.Linear(3, 3)
    plain.load_state_dict(model.state_dict())
    with pergrad.record(plain, expected):
        plain(x).square().sum().backward()
    assert torch.equal(norms.result, expected.result)
    first, *others, state = model.found
    assert vars(first) == {"note": "of the user"}
    assert torch.equal(first, x)
    assert not any(map(vars, others))
    assert torch.equal(state["weight"], model.weight)


def test_a_copy_of_an_input_has_its_samples() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(N, 3))

        def forward(self, x: Tensor) -> Tensor:
            return copy.copy(x) * copy.deepcopy(x) * self.w[0]

    model, x = Copies(), torch.rand(N, 3)
    found = pergrad.grads(model, lambda m, x: m(x).sum(1), x)["w"]
    assert torch.allclose(found[:, 0], x * x)
    assert not found[:, 1:].any()


def test_a_tensor_that_is_saved_out_of_sight_of_the_recorder_loads_and_means_nothing() -> None:
    tracker = tracker_of()
    w = numbers(2)
    tracker.mark(w, tracker.constant)
    for t in (samples(tracker, 3, N, dim=1), w):
        found = loaded(t, is_clean=False)
        assert torch.equal(found, t)
        assert not tracker.knows(found)
        assert tracker.tag(found) is tracker.constant
        assert tracker.mark_input(found, 0)
        remove_tags(t)


# -- one tag


def test_a_copy_of_a_tag_is_the_tag() -> None:
    for tag in (Scope(N).samples(0), Scope(N).constant(), Scope(N).lost("no")):
        assert copy.copy(tag) is tag
        assert copy.deepcopy([tag])[0] is tag


def test_only_the_tags_of_the_scope_are_taken_off() -> None:
    first, second = tracker_of(), tracker_of()
    a, b = samples(first, N), samples(first, N)
    second.mark(b, second.constant)
    with torch.no_grad():
        first.mark(b, first.constant)
    first.untag()
    assert not vars(a)
    assert list(vars(b)) == [TAG]
    assert second.knows(b)
    second.untag()
    assert not vars(b)
    Tracker.unmark(a, b)


def test_tensors_are_referred_to_weakly() -> None:
    tracker = tracker_of()
    a = samples(tracker, N)
    samples(tracker, N)
    assert len(tracker.tagged_here) == 2
    tracker.tagged_here.forget_dead()
    assert [reference() for reference in tracker.tagged_here] == [a]
    tracker.untag()
    assert tracker.tagged_here == Tagged()


def test_many_dead_references_are_dropped_and_few_are_not_looked_for() -> None:
    tracker = tracker_of()
    alive = [samples(tracker, N) for _ in range(8)]
    tracker.tagged_here.forget_dead()
    for _ in range(8):
        samples(tracker, N)
        tracker.tagged_here.forget_dead()
    assert len(tracker.tagged_here) == 16
    samples(tracker, N)
    tracker.tagged_here.forget_dead()
    assert [reference() for reference in tracker.tagged_here] == alive


def test_what_says_how_to_copy_a_tensor_stays_without_tags() -> None:
    plain = numbers(2).__reduce_ex__(2)
    assert leaving_tags_out_of_files(plain) is plain
