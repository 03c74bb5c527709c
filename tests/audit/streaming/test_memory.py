import platform

import pytest
import torch
from torch import nn

from pergrad.audit.streaming.memory import (
    bytes_kept,
    fitting_batch_size,
    free_bytes,
    is_out_of_memory,
    keep_freed_memory,
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other ways")
def test_what_a_batch_frees_is_there_for_the_next_one():
    resource = pytest.importorskip("resource")  # not on Windows

    def batch():
        held = [torch.ones(2**20) for _ in range(32)]  # of 4 MiB
        return sum(map(len, held))

    keep_freed_memory()
    batch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        batch()
    pages = 10 * 32 * 2**22 // resource.getpagesize()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages / 10
