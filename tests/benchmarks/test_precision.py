import pytest
import torch

from benchmarks.precision import PRECISIONS


def _settings() -> tuple[object, ...]:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.allow_tf32,
        torch.is_autocast_enabled("cpu"),
    )


@pytest.mark.parametrize("name", PRECISIONS)
def test_what_a_precision_sets_is_as_before_when_it_ends(name: str) -> None:
    before = _settings()
    with PRECISIONS[name].context(torch.device("cpu")):
        assert _settings() != before or name == "float32"
    assert _settings() == before
