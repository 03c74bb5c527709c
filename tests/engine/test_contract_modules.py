"""`call_for_per_sample_grads` against a loop over samples, module by module.

The modules and inputs are those of torch's two module databases, then own cases for the options
that these leave out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import pergrad
from tests.engine.loop_check import EXACT, Reduction, check, double, trainable
from tests.engine.torch_databases import LEGACY_MODULE_TESTS, MODULE_INFOS

FAMILIES = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.Embedding,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    make_input: Callable[[], Tensor]


def module_db_cases() -> Iterator[Case]:
    for info in MODULE_INFOS:
        if info.module_cls not in FAMILIES:
            continue
        for training in (True, False):
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=torch.float64, requires_grad=False, training=training
            )
            for index, given in enumerate(inputs):
                arguments = given.constructor_input
                (x,) = [*given.forward_input.args, *given.forward_input.kwargs.values()]

                def build(
                    cls: type[nn.Module] = info.module_cls,
                    arguments: Any = arguments,
                    training: bool = training,
                ) -> nn.Module:
                    return cls(*arguments.args, **arguments.kwargs).double().train(training)

                mode = "train" if training else "eval"
                name = f"{info.module_cls.__name__}-{index}-{given.desc or 'plain'}-{mode}"
                yield Case(name, build, lambda x=x: x.clone())


def legacy_cases() -> Iterator[Case]:
    for index, test in enumerate(LEGACY_MODULE_TESTS):
        name = str(test.get("fullname") or test["module_name"])
        if not name.startswith(("Linear", "Conv1d", "Conv2d", "Conv3d", "LayerNorm", "Embedding")):
            continue
        constructor = test.get("constructor") or getattr(nn, name, None)
        module = constructor(*test.get("constructor_args", ()))
        if not isinstance(module, FAMILIES):
            continue

        def build(constructor: Any = constructor, test: Any = test) -> nn.Module:
            return constructor(*test.get("constructor_args", ())).double()

        def make_input(test: Any = test) -> Tensor:
            x = test["input_fn"]() if "input_fn" in test else torch.randn(*test["input_size"])
            return x.double() if x.is_floating_point() else x

        yield Case(f"legacy-{name}-{test.get('desc', 'plain')}-{index}", build, make_input)


def affine_instance_norm_cases() -> Iterator[Case]:
    """Instance norms with weights, which the databases of torch 2.11 do not have."""
    for cls, shape in (
        (nn.InstanceNorm1d, (4, 3, 15)),
        (nn.InstanceNorm2d, (2, 3, 6, 6)),
        (nn.InstanceNorm3d, (2, 3, 4, 4, 4)),
    ):
        x = torch.randn(shape, dtype=torch.float64)
        yield Case(
            f"{cls.__name__}-affine",
            lambda cls=cls: cls(3, affine=True).double(),
            lambda x=x: x.clone(),
        )


def has_batch(module: nn.Module, x: Tensor) -> bool:
    ranks = {
        nn.Linear: range(2, 9),
        nn.Conv1d: (3,),
        nn.Conv2d: (4,),
        nn.Conv3d: (5,),
        nn.InstanceNorm1d: (3,),
        nn.InstanceNorm2d: (4,),
        nn.InstanceNorm3d: (5,),
    }
    return x.shape[0] > 0 and x.dim() in ranks.get(type(module), range(1, 9))


torch.manual_seed(0)
CASES = [
    case
    for case in (*module_db_cases(), *legacy_cases(), *affine_instance_norm_cases())
    if any(True for _ in case.build().parameters())
]
BATCHED = [case for case in CASES if has_batch(case.build(), case.make_input())]
UNBATCHED = [case for case in CASES if case not in BATCHED]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_every_family_has_cases() -> None:
    assert {type(case.build()) for case in BATCHED} == set(FAMILIES)


@pytest.mark.parametrize("needs_grad", [False, True], ids=["input", "input with grad"])
@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
@pytest.mark.parametrize("case", BATCHED, ids=lambda case: case.name)
def test_grad_sample_equals_the_loop(
    case: Case, loss_reduction: Reduction, needs_grad: bool
) -> None:
    x = case.make_input()
    check(case.build(), x, loss_reduction, needs_grad=needs_grad and x.is_floating_point())


@pytest.mark.parametrize("case", UNBATCHED, ids=lambda case: case.name)
def test_input_without_a_batch_is_refused(case: Case) -> None:
    model = case.build()
    with pytest.raises(RuntimeError):
        pergrad.call_for_per_sample_grads(model)(case.make_input()).sum().backward()
    assert all(not hasattr(parameter, "grad_sample") for parameter in model.parameters())


@pytest.mark.parametrize("case", BATCHED, ids=lambda case: case.name)
def test_each_parameter_may_be_frozen(case: Case) -> None:
    x = case.make_input()
    for name, _ in case.build().named_parameters():
        model = case.build()
        model.get_parameter(name).requires_grad_(False)
        if trainable(model):
            check(model, x)


@pytest.mark.parametrize(
    ("build", "x"),
    [
        (lambda: nn.Linear(3, 2), double(3, 5).t()),
        (lambda: nn.Linear(3, 2), double(6, 4, 3)[::2, :, :]),
        (lambda: nn.Linear(3, 2), double(4, 1, 3).expand(4, 5, 3)),
        (lambda: nn.Conv2d(3, 2, 3), double(4, 6, 7, 3).permute(0, 3, 1, 2)),
        (lambda: nn.Conv1d(3, 2, 2), double(6, 3, 4).transpose(0, 2)),
        (lambda: nn.LayerNorm(3), double(3, 4, 5).transpose(0, 2)),
        (lambda: nn.GroupNorm(3, 6), double(4, 5, 6).transpose(1, 2)),
        (lambda: nn.InstanceNorm1d(3, affine=True), double(5, 3, 4).transpose(0, 2)),
        (lambda: nn.Embedding(7, 3), torch.randint(7, (4, 5)).t()),
        (lambda: nn.Embedding(7, 3), torch.randint(7, (1, 5)).expand(6, 5)),
    ],
)
def test_input_need_not_be_contiguous(build: Callable[[], nn.Module], x: Tensor) -> None:
    check(build().double(), x, needs_grad=x.is_floating_point() and 0 not in x.stride())


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [1, (2, 1), "same"])
def test_convolution_pads_in_every_mode(padding_mode: str, padding: Any) -> None:
    model = nn.Conv2d(2, 4, (4, 3), padding=padding, padding_mode=padding_mode, groups=2)
    check(model.double(), double(3, 2, 6, 5), needs_grad=True)


@pytest.mark.parametrize("batch", [3, 40])
@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"dilation": 2},
        {"groups": 2},
        {"groups": 4},
        {"stride": 2, "dilation": 2, "padding": 2, "groups": 2},
        {"dilation": 3, "padding": "same"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution_options_work_at_any_batch_size(
    dims: int, options: dict[str, Any], batch: int
) -> None:
    cls = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    check(cls(4, 8, 2, **options).double(), double(batch, 4, *[6] * dims), needs_grad=True)


@pytest.mark.parametrize("track", [False, True], ids=["own statistics", "running statistics"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_instance_norm_with_and_without_running_statistics(training: bool, track: bool) -> None:
    model = nn.InstanceNorm2d(3, affine=True, track_running_stats=track).double().train(training)
    if track:
        model.running_mean.normal_()
        model.running_var.uniform_(0.5, 2.0)
    # In training mode the statistics move, but the output does not depend on them.
    check(model, double(4, 3, 5, 2), needs_grad=True)


def test_running_statistics_move_as_in_a_plain_call() -> None:
    plain, recorded = (
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True).double() for _ in range(2)
    )
    x = double(4, 3, 5)
    plain(x)
    pergrad.call_for_per_sample_grads(recorded)(x).sum().backward()
    assert_close(recorded.running_mean, plain.running_mean, **EXACT)
    assert_close(recorded.running_var, plain.running_var, **EXACT)
    assert recorded.num_batches_tracked == plain.num_batches_tracked


INDEX = torch.tensor([[1, 1, 0, 4], [2, 2, 2, 1], [0, 0, 0, 0], [4, 3, 2, 1]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 0},
        {"padding_idx": -1},
        {"scale_grad_by_freq": True},
        {"scale_grad_by_freq": True, "padding_idx": 2},
        {"sparse": True},
        {"max_norm": 0.5},
        {"max_norm": 0.5, "norm_type": 1.0, "padding_idx": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_embedding_honours_its_options(options: dict[str, Any], loss_reduction: Reduction) -> None:
    check(nn.Embedding(5, 3, **options).double(), INDEX, loss_reduction)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding_of_one_index_a_sample(padding_idx: int | None) -> None:
    check(nn.Embedding(5, 3, padding_idx=padding_idx).double(), torch.tensor([1, 4, 2, 2, 0]))
