import pytest
import torch
from torch import nn

from pergrad.audit.streaming.memory import (
    bytes_kept,
    fitting_batch_size,
    free_bytes,
    is_out_of_memory,
)


def test_bytes_kept_are_those_of_the_activations():
    model = nn.Sequential(nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 10), nn.Tanh())
    x = torch.zeros(4, 50)
    # Both inputs of the linear layers, of which the second is also the output of Tanh, and the last one.
    assert bytes_kept(model, lambda: model(x)) == 4 * 4 * (50 + 30 + 10)


def test_batch_size_is_a_power_of_two_or_everything():
    assert fitting_batch_size(1000, 10**12, 300) == 300
    assert fitting_batch_size(1000, 10**12, 10**6) == 1024
    assert fitting_batch_size(10**12, 10**6, 300) == 1
    assert fitting_batch_size(0, 10**9, 10) == 10


def test_batches_on_a_cpu_keep_at_most_what_stays_in_the_process():
    assert fitting_batch_size(2**16, 10**12, 10**6, on_cpu=True) == 512
    assert fitting_batch_size(2**16, 10**12, 10**6) == 1024
    assert fitting_batch_size(2**30, 10**12, 10**6, on_cpu=True) == 16
    assert fitting_batch_size(2**30, 2**35, 10**6, on_cpu=True) == 2
    assert fitting_batch_size(0, 10**9, 10**6, on_cpu=True) == 1024


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error, expected):
    assert is_out_of_memory(error) == expected


def test_something_is_free():
    assert free_bytes(torch.device("cpu")) > 0
