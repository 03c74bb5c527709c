import pytest
import torch

from benchmarks.methods import METHODS, clear
from benchmarks.models import MODELS
from benchmarks.run import Entry, Setting, check

TINY = Setting("tiny", "float32", torch.device("cpu"), seed=0)

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_method_agrees_with_a_loop_over_the_samples(model: str, method: str) -> None:
    missing = METHODS[method].missing()
    if missing is not None:
        pytest.skip(missing)
    assert check(Entry(model, METHODS[method]), TINY) is None


@pytest.mark.parametrize("method", METHODS)
def test_second_step_after_clear_gives_what_the_first_gave(method: str) -> None:
    missing = METHODS[method].missing()
    if missing is not None:
        pytest.skip(missing)
    task = TINY.task("mlp")
    step = METHODS[method].prepare(task)
    first = {name: result.clone() for name, result in step().items()}
    clear(task.model)
    torch.testing.assert_close(step(), first)


def test_clear_leaves_no_gradient_on_any_parameter() -> None:
    task = TINY.task("mlp")
    for name in ("plain", "expanded-weights"):
        METHODS[name].prepare(task)()
        clear(task.model)
        for parameter in task.model.parameters():
            assert parameter.grad is None
            assert getattr(parameter, "grad_sample", None) is None
