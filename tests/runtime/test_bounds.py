import torch

from pergrad.runtime.bounds import default_bound


def test_default_bound_is_some_memory_and_not_all_of_it() -> None:
    assert 0 < default_bound(torch.device("cpu")) <= 32 * 2**20
