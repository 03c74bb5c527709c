import torch
from torch import Tensor

from benchmarks.memory import step_peak_bytes

MEGABYTE = 2**20
CPU = torch.device("cpu")


def test_peak_counts_what_is_alive_at_once_and_not_what_was_freed() -> None:
    def step() -> dict[str, Tensor]:
        for _ in range(3):
            torch.empty(4 * MEGABYTE, dtype=torch.uint8)
        kept = torch.empty(MEGABYTE, dtype=torch.uint8)
        return {"sum": kept + torch.empty(MEGABYTE, dtype=torch.uint8)}

    assert step_peak_bytes(step, CPU) == 4 * MEGABYTE


def test_peak_counts_results_that_outlive_the_step() -> None:
    held: list[Tensor] = []

    def step() -> dict[str, Tensor]:
        held.extend(torch.empty(MEGABYTE, dtype=torch.uint8) for _ in range(5))
        return {}

    assert step_peak_bytes(step, CPU) == 5 * MEGABYTE
    assert len(held) == 5


def test_peak_is_not_lessened_by_what_the_step_lets_go_of() -> None:
    held = [torch.empty(3 * MEGABYTE, dtype=torch.uint8)]

    def step() -> dict[str, Tensor]:
        held.clear()
        return {"result": torch.empty(2 * MEGABYTE, dtype=torch.uint8)}

    assert step_peak_bytes(step, CPU) == 2 * MEGABYTE
