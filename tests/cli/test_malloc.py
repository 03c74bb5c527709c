"""The command sets malloc for its own process; nobody else does."""

import ctypes
import platform
from typing import Any

import pytest
import torch
from torch import nn

from pergrad.audit import Spec
from pergrad.audit.streaming.gradients import Gradients
from pergrad.cli import app
from pergrad.cli.malloc import keep_freed_memory


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


class _Library:
    """Stands for the C library, and notes what is set."""

    def __init__(self) -> None:
        self.settings: list[tuple[int, int]] = []

    def __call__(self, name: None) -> "_Library":
        return self

    def mallopt(self, setting: int, value: int) -> None:
        self.settings.append((setting, value))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> _Library:
    library = _Library()
    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr("sys.platform", "linux")
    return library


def test_gradients_leave_the_allocator_alone(library: _Library) -> None:
    model = nn.Linear(2, 1)
    spec = Spec(model, [(torch.zeros(2),)], lambda model, x: model(x).sum(1))
    Gradients(model, spec, {"all": ["weight", "bias"]}, sketch_dim=4, seed=0)
    assert library.settings == []


def test_an_audit_by_the_command_sets_the_allocator(
    library: _Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(app, "load_spec", lambda *_, **__: None)
    monkeypatch.setattr(app, "run_audit", lambda *_, **__: None)
    monkeypatch.setattr(app, "_report", lambda *_: None)
    assert app.run(["audit", "some:thing", "-o", str(tmp_path)]) == 0
    assert {setting for setting, _ in library.settings} == {-1, -3}
