import pytest
import torch

from pergrad.runtime.bounds import ENOUGH_ON_GPU, bound_of_trace, default_bound


def test_default_bound_is_some_memory_and_not_all_of_it() -> None:
    assert 0 < default_bound(torch.device("cpu")) <= 32 * 2**20


@pytest.mark.parametrize(
    ("free", "whole", "now", "traced"),
    [
        (2**27, 140 * 2**30, 2**23, ENOUGH_ON_GPU),  # other processes hold the memory
        (2**27, 2**33, 2**23, 2**26),
        (2**32, 2**33, 2**28, 2**28),
        (100 * 2**30, 140 * 2**30, ENOUGH_ON_GPU, ENOUGH_ON_GPU),
    ],
)
def test_a_trace_is_not_bound_by_what_is_free_just_then(
    free: int, whole: int, now: int, traced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, whole))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    assert (default_bound(device), bound_of_trace(device)) == (now, traced)
    cpu = torch.device("cpu")
    assert bound_of_trace(cpu) == default_bound(cpu)
