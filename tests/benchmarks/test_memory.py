import pytest
import torch
from torch import Tensor

from benchmarks.memory import step_peak_bytes

MEGABYTE = 2**20


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def test_peak_counts_what_is_alive_at_once_and_not_what_was_freed(device: torch.device) -> None:
    def step() -> dict[str, Tensor]:
        for _ in range(3):
            torch.empty(4 * MEGABYTE, dtype=torch.uint8, device=device)
        kept = torch.empty(MEGABYTE, dtype=torch.uint8, device=device)
        return {"sum": kept + torch.empty(MEGABYTE, dtype=torch.uint8, device=device)}

    assert step_peak_bytes(step, device) == 4 * MEGABYTE


def test_peak_counts_results_that_outlive_the_step(device: torch.device) -> None:
    held: list[Tensor] = []

    def step() -> dict[str, Tensor]:
        held.extend(torch.empty(MEGABYTE, dtype=torch.uint8, device=device) for _ in range(5))
        return {}

    assert step_peak_bytes(step, device) == 5 * MEGABYTE
    assert len(held) == 5


def test_peak_is_not_lessened_by_what_the_step_lets_go_of(device: torch.device) -> None:
    held = [torch.empty(3 * MEGABYTE, dtype=torch.uint8, device=device)]

    def step() -> dict[str, Tensor]:
        held.clear()
        return {"result": torch.empty(2 * MEGABYTE, dtype=torch.uint8, device=device)}

    assert step_peak_bytes(step, device) == 2 * MEGABYTE
