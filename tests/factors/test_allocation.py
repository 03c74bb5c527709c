from __future__ import annotations

import mmap

import pytest
import torch

from pergrad.factors import allocation
from pergrad.factors.allocation import _HugePages, large_result

pytestmark = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages"
)
LARGE = (9, 1024, 1024)


class Clock:
    """A clock on which populating pages takes as long as is said."""

    def __init__(self, taken: float) -> None:
        self.taken, self.now = taken, 0.0

    def perf_counter(self) -> float:
        self.now += self.taken
        return self.now


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> _HugePages:
    fresh = _HugePages()
    monkeypatch.setattr(allocation, "_HUGE_PAGES", fresh)
    return fresh


def _have(monkeypatch: pytest.MonkeyPatch, taken: float) -> bool:
    monkeypatch.setattr(allocation, "time", Clock(taken))
    return large_result(LARGE, torch.empty(0)) is not None


@pytest.mark.usefixtures("pages")
def test_small_results_and_other_tensors_are_torchs_own() -> None:
    assert large_result((8, 8), torch.empty(0)) is None
    assert large_result(LARGE, torch.empty(0, device="meta")) is None


@pytest.mark.usefixtures("pages")
def test_huge_pages_are_taken_while_they_come_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    if not _have(monkeypatch, 1e-4):
        pytest.skip("the kernel gives none")
    assert _have(monkeypatch, 1e-4)


@pytest.mark.usefixtures("pages")
def test_slow_huge_pages_are_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    if not _have(monkeypatch, 1e-4):
        pytest.skip("the kernel gives none")
    assert not _have(monkeypatch, 1.0)
    again = [_have(monkeypatch, 1e-4) for _ in range(allocation._RESTS)]
    assert not any(again[:-1])
    assert again[-1]


@pytest.mark.usefixtures("pages")
def test_a_result_holds_what_is_written_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = large_result((3, 4096, 4096), torch.empty(0))
    if found is None:
        pytest.skip("the kernel gives none")
    assert not found.any()
    assert found.fill_(2).sum() == 2 * found.numel()
