from __future__ import annotations

import gc
import mmap
import threading

import pytest
import torch
from torch import Tensor

from pergrad.runtime import allocation
from pergrad.runtime.allocation import _KeptMemory, empty, large_result, zeros
from pergrad.runtime.caches import clear_caches

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="kept memory is for Linux"
)
LARGE = (3, 1024, 1024)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> _KeptMemory:
    fresh = _KeptMemory()
    monkeypatch.setattr(allocation, "_MEMORY", fresh)
    return fresh


def _large(shape: tuple[int, ...] = LARGE, dtype: torch.dtype = torch.float32) -> Tensor:
    found = large_result(shape, torch.empty(0, dtype=dtype))
    assert found is not None
    return found


def test_small_results_and_other_tensors_are_torchs_own() -> None:
    assert large_result((8, 8), torch.empty(0)) is None
    assert large_result(LARGE, torch.empty(0, device="meta")) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_result_holds_what_is_written_to_it(dtype: torch.dtype) -> None:
    for shape in (LARGE, (5, 1000, 999)):
        for value in (2, 3, 4):  # in a fresh block, in huge pages, and in those again
            found = _large(shape, dtype)
            assert found.shape == shape
            assert found.is_contiguous()
            assert found.dtype == dtype
            assert bool((found.fill_(value) == value).all())


def test_no_memory_is_handed_out_that_somebody_holds() -> None:
    held = [_large().fill_(k) for k in range(3)]
    part = _large().fill_(3)[1, 5:]  # a view holds all of it
    others = [_large().fill_(-1) for _ in range(3)]
    assert [t.unique().tolist() for t in (*held, part)] == [[0], [1], [2], [3]]
    assert len({t.data_ptr() for t in (*held, *others)}) == 6


def test_what_is_dropped_is_used_again() -> None:
    addresses = []
    for _ in range(5):
        addresses.append(_large().data_ptr())
        gc.collect()
    assert len(set(addresses[1:])) == 1  # the second is in huge pages


def test_fresh_pages_are_touched_in_the_first_steps_only() -> None:
    resource = pytest.importorskip("resource")
    for _ in range(2):
        _large().zero_()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        _large().zero_()
    pages = 10 * 4 * 3 * 2**20 // resource.getpagesize()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages / 10


def test_smaller_results_use_a_block_that_would_not_be_half_empty() -> None:
    whole = (8, 1024, 1024)
    for _ in range(2):
        address = _large(whole).data_ptr()
    assert _large((7, 1024, 1024)).data_ptr() == address
    assert _large((2, 1024, 1024)).data_ptr() != address


def test_no_more_is_kept_than_was_in_use_at_once(memory: _KeptMemory) -> None:
    for size in range(1, 40):
        _large((size, 1024, 1024))
        assert sum(map(len, memory._free)) <= memory._most_in_use
    assert memory._most_in_use <= 40 * 4 * 2**20


def test_threads_do_not_share_a_result() -> None:
    wrong = []

    def work(value: int) -> None:
        for _ in range(50):
            found = _large().fill_(value)
            if not bool((found == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_zeros_are_zero_where_something_was() -> None:
    for _ in range(3):
        _large().fill_(1)
    assert not zeros(LARGE, torch.empty(0)).any()
    assert not zeros((3, 2), torch.empty(0)).any()
    assert empty((3, 2), torch.empty(0)).shape == (3, 2)


@pytest.mark.parametrize("size", [2, 600])
def test_products_for_compiled_steps_are_those_of_torch(size: int) -> None:
    g, x = torch.randn(4, size, 5).double().mT, torch.randn(4, size, 5).double()
    torch.testing.assert_close(torch.ops.pergrad.products(x, g), torch.bmm(x, g))
    torch.testing.assert_close(
        torch.ops.pergrad.product(x[:, :, :1], g[:, :1]), x[:, :, :1] * g[:, :1]
    )
    torch.library.opcheck(torch.ops.pergrad.products.default, (x, g))
    torch.library.opcheck(torch.ops.pergrad.product.default, (x, x))


def test_what_is_free_can_be_given_back(memory: _KeptMemory) -> None:
    kept, dropped = _large(), _large()
    del dropped
    gc.collect()
    clear_caches()  # which has the process's own memory, not this one
    memory._collect()
    assert len(memory) == 1
    memory.clear()
    assert len(memory) == 0
    kept.fill_(3)
    del kept
    gc.collect()
    memory._collect()
    assert len(memory) == 1


def test_no_memory_is_kept_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERGRAD_KEEP_MEMORY", "0")
    assert large_result(LARGE, torch.empty(0)) is None
    assert not allocation.is_large(LARGE, torch.empty(0))
    monkeypatch.setenv("PERGRAD_KEEP_MEMORY", "1")
    assert large_result(LARGE, torch.empty(0)) is not None
