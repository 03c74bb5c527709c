"""A build that is killed and resumed, or shared by processes, leaves the same bytes."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import pergrad
from pergrad.errors import IndexingError, InterruptedAuditError
from pergrad.index.store import chunks
from tests.index.cases import built, data, killed, losses, network

ROOT = Path(__file__).parents[2]
BUILD = (
    "index build tests.index.cases:killed --dim 32 --batch-size 4 --chunk 8 --no-certify".split()
)


def run(
    path: Path, *before: str, dtype: str = "float64", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Build the index in another process, of one thread as every one here."""
    source = str(Path(pergrad.__file__).parents[1])
    known = {**os.environ, "PYTHONPATH": f"{source}:{ROOT}", "OMP_NUM_THREADS": "1", **environment}
    command = [*before, "-m", "pergrad", *BUILD, "--dtype", dtype, "-o", str(path)]
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=known, capture_output=True, text=True, timeout=300
    )


def everything(path: Path) -> dict[str, bytes]:
    """Returns all files of an index, but its lock and what is derived from the rows."""
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name != ".lock" and not p.name.startswith("approximate")
    }


def digest(path: Path) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.glob("rows-0/*"))
    }


@pytest.mark.slow
def test_killed_and_resumed_and_on_two_processes_the_bytes_are_the_same(tmp_path: Path) -> None:
    assert run(tmp_path / "whole").returncode == 0
    expected = digest(tmp_path / "whole")
    assert len(expected) == 10  # rows and facts of five chunks
    assert run(tmp_path / "killed", KILL_AT="27").returncode == -9
    assert len(digest(tmp_path / "killed")) == 6  # three chunks are kept
    with pytest.raises(IndexingError, match="is not finished: 24 of 40"):
        pergrad.Index(tmp_path / "killed")
    assert run(tmp_path / "killed").returncode == 0
    assert digest(tmp_path / "killed") == expected
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    two = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}")
    done = run(tmp_path / "two", *two)
    assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "two") == expected


@pytest.mark.slow
def test_on_two_processes_rows_in_bfloat16_are_the_same(tmp_path: Path) -> None:
    halves = {"dtype": "bfloat16"}
    assert run(tmp_path / "one", **halves).returncode == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    two = ("-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}")
    done = run(tmp_path / "two", *two, **halves)
    assert done.returncode == 0, done.stderr
    assert digest(tmp_path / "two") == digest(tmp_path / "one")


def test_a_build_that_is_interrupted_resumes_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"batch_size": 4, "chunk": 8}
    model = network()
    built(tmp_path / "whole", model, **options)
    monkeypatch.setenv("KILL_AT", "")
    real, count = chunks.write_whole, [0]

    def full(*args: object, **keywords: object) -> None:
        count[0] += 1
        if count[0] > 5:
            raise InterruptedAuditError(
                "no space left to write it: free some and run the same command"
            )
        real(*args, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(chunks, "write_whole", full)
    with pytest.raises(InterruptedAuditError, match="no space left"):
        built(tmp_path / "cut", model, **options)
    monkeypatch.setattr(chunks, "write_whole", real)
    with pytest.raises(IndexingError, match="not finished"):
        pergrad.Index(tmp_path / "cut")
    built(tmp_path / "cut", model, **options)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": network(seed=4)}, "another model"),
        ({"dataset": data(seed=4)}, "another data set"),
        ({"dtype": "float32"}, "another dtype"),
        ({"projection": "count", "dim": 8}, "another projection"),
        ({"subset": 5}, "another subset"),
    ],
)
def test_a_folder_of_another_index_is_refused_and_stays(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    built(tmp_path / "a")
    before = digest(tmp_path / "a")
    with pytest.raises(IndexingError, match=message):
        built(tmp_path / "a", **changes)
    assert digest(tmp_path / "a") == before


def test_states_that_an_interrupted_build_lacks_are_written_when_it_resumes(tmp_path: Path) -> None:
    model = network()
    built(tmp_path / "whole", model)
    built(tmp_path / "cut", model)
    shutil.rmtree(tmp_path / "cut" / "states")
    built(tmp_path / "cut", model)
    assert everything(tmp_path / "cut") == everything(tmp_path / "whole")


def test_data_of_another_shape_leave_the_index_as_it_was(tmp_path: Path) -> None:
    index = built(tmp_path)
    before = everything(tmp_path)
    wrong = TensorDataset(torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.long))
    with pytest.raises(
        IndexingError, match=r"cannot be appended to .*: .*shapes cannot be"
    ) as caught:
        index.append(wrong, quiet=True)
    assert "\n" not in str(caught.value)
    assert everything(tmp_path) == before
    index.append(data(8, seed=5), quiet=True)
    assert len(index) == 48


@pytest.mark.parametrize("is_compacted", [False, True])
def test_an_append_that_cannot_end_is_dropped(tmp_path: Path, is_compacted: bool) -> None:
    index = built(tmp_path)
    if is_compacted:
        index.delete([1, 2])
        index.compact()
    before, batch = everything(tmp_path), data(3, seed=9).tensors
    scores = index.scores(batch)
    x, y = data(60, seed=5).tensors
    y[50] = 7  # no class of the model: chunks before it are written
    with pytest.raises(IndexingError, match="out of bounds"):
        index.append(TensorDataset(x, y), quiet=True)
    with pytest.raises(
        IndexingError, match=r"run the same append again .* `pergrad index abandon`"
    ):
        pergrad.Index(tmp_path)
    with pytest.raises(IndexingError, match="drop it with `pergrad index abandon`"):
        index.append(data(8, seed=5), quiet=True)
    assert pergrad.Index.abandon_append(tmp_path) == 48
    assert everything(tmp_path) == before
    again = pergrad.Index(tmp_path, network(), data(), losses)
    assert torch.equal(again.scores(batch), scores)
    again.append(data(8, seed=5), quiet=True)
    assert again.indices.tolist()[-8:] == [*range(40, 48)]
    with pytest.raises(IndexingError, match="has no append that was interrupted"):
        pergrad.Index.abandon_append(tmp_path)


@pytest.mark.parametrize(("kind", "message"), [("adam", "optimizer"), ("gauss_newton", "at most")])
def test_what_cannot_be_fitted_is_refused_before_a_row_is_computed(
    tmp_path: Path, kind: str, message: str
) -> None:
    model = network() if kind == "adam" else torch.nn.Linear(6, 2000).double()
    with pytest.raises(IndexingError, match=message):
        built(tmp_path, model, preconditioner=kind)
    assert not [*tmp_path.iterdir()]


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(IndexingError, match="not empty and holds no index"):
        built(tmp_path)
    with pytest.raises(IndexingError, match="holds no index"):
        pergrad.Index(tmp_path)


def test_items_that_cannot_be_read_are_skipped_and_counted() -> None:
    class Broken(type(data())):  # type: ignore[misc]
        def __getitem__(self, index: int) -> object:
            if index in (3, 39):
                raise ValueError("broken")
            return super().__getitem__(index)

    index = built(dataset=Broken(*data().tensors))
    assert len(index) == 38
    assert index.info().skipped == 2
    assert 3 not in index.indices
    with pytest.raises(pergrad.PergradError, match="broken"):
        built(dataset=Broken(*data().tensors), strict=True)


def test_the_certificate_is_kept() -> None:
    index = pergrad.Index.build(killed(), quiet=True)
    assert index.info().certified
    assert losses is not None
