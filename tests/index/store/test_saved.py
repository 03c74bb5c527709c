"""What is saved is the same bytes each time, and a full disk is one sentence that leaves the old file."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest
import torch

from pergrad.errors import InterruptedAuditError
from pergrad.index.store.saved import save_whole


def test_the_same_value_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        save_whole({"x": torch.arange(9.0)}, tmp_path / name)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    assert torch.equal(torch.load(tmp_path / "a.pt")["x"], torch.arange(9.0))


@pytest.mark.parametrize("limit", [100, 900, 5000, 40_100])
def test_a_full_disk_leaves_the_file_of_before(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(InterruptedAuditError, match=r"cannot write .*a\.pt") as caught:
            save_whole({"x": torch.zeros(10_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "\n" not in str(caught.value)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a.pt", b"old")]


def test_a_value_that_cannot_be_saved_raises_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="pickle"):
        save_whole({"x": lambda: 0}, tmp_path / "a.pt")
    assert not [*tmp_path.iterdir()]
