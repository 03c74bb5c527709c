"""A checkpoint can be read again, or the one of before stays as it was."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from pergrad.errors import PrivacyError
from pergrad.private.stepping.saving import read, write
from tests.private.stepping.cases import data, mlp, plan, run, sgd, weights

CPU = torch.device("cpu")


def test_a_run_with_numbers_of_numpy_resumes(tmp_path: Path) -> None:
    rate: Any = numpy.logspace(-1, 0, 3)[1]
    made = {"noise_multiplier": numpy.float64(1.0)}
    model, other = mlp(), mlp()
    step, loader = run(plan(**made), model, optimizer=sgd(model, lr=rate))
    step(*next(iter(loader)))
    step.save(tmp_path / "run.pt")
    again, _ = run(plan(**made), other, optimizer=sgd(other, lr=rate))
    again.load(tmp_path / "run.pt")
    assert torch.equal(weights(model), weights(other))
    assert again._optimizer.param_groups[0]["lr"] == rate


def test_another_model_or_optimizer_than_the_saved_one_is_refused(tmp_path: Path) -> None:
    model = mlp()
    step, _ = run(plan(), model, optimizer=torch.optim.Adam(model.parameters()))
    step.save(tmp_path / "run.pt")
    other, _ = run(plan(), model)
    with pytest.raises(PrivacyError, match="have no dampening, momentum, nesterov: resume with"):
        other.load(tmp_path / "run.pt")
    small = torch.nn.Linear(4, 3).double()
    other, _ = run(plan(), small, optimizer=torch.optim.Adam(small.parameters()))
    with pytest.raises(
        PrivacyError, match=r"is not the one that was saved: .*Missing key"
    ) as caught:
        other.load(tmp_path / "run.pt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.AdamW, torch.optim.Rprop])
def test_an_optimizer_s_state_keeps_its_types(
    kind: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    """torch casts all of it to the parameters' type, which a resumed run would differ by."""
    ends = []
    for has_break in (False, True):
        model = mlp(dtype)
        step, loader = run(
            plan(), model, samples=data(dtype=dtype), optimizer=kind(model.parameters())
        )
        for batch in loader:
            step(*batch)
            if has_break and step.number == 2:
                step.save(tmp_path / "run.pt")
                break
        if has_break:
            model = mlp(dtype)
            step, loader = run(
                plan(), model, samples=data(dtype=dtype), optimizer=kind(model.parameters())
            )
            step.load(tmp_path / "run.pt")
            for batch in loader:
                step(*batch)
        ends.append(weights(model))
    assert torch.equal(*ends)


def test_numbers_are_changed_in_a_copy_that_keeps_what_is_beside_the_items(tmp_path: Path) -> None:
    state: Any = mlp().state_dict()
    state["rates"] = [numpy.float32(0.5), (numpy.int64(2), "a")]
    write(tmp_path / "a.pt", {"model": state})
    found = read(tmp_path / "a.pt", {"model"}, CPU)["model"]
    assert found["rates"] == [0.5, (2, "a")]
    assert found._metadata == state._metadata
    assert isinstance(state["rates"][0], numpy.float32)


def test_what_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.pt", {"x": 1})
    with pytest.raises(PrivacyError, match=r"does not give back .*Path") as caught:
        write(tmp_path / "a.pt", {"x": tmp_path})
    assert "\n" not in str(caught.value)
    assert read(tmp_path / "a.pt", {"x"}, CPU) == {"x": 1}


def test_a_full_disk_leaves_the_checkpoint_of_before(tmp_path: Path) -> None:
    write(tmp_path / "a.pt", {"x": 1})
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(PrivacyError, match=r"cannot be written .*, and is as it was before"):
            write(tmp_path / "a.pt", {"x": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert read(tmp_path / "a.pt", {"x"}, CPU) == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_path_that_cannot_be_a_file_is_refused_and_a_link_stays_one(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "a.pt"):
        with pytest.raises(PrivacyError, match="cannot be a file there"):
            write(path, {"x": 1})
    link = tmp_path / "link.pt"
    link.symlink_to(tmp_path / "a.pt")
    write(link, {"x": 2})
    assert link.is_symlink()
    assert read(tmp_path / "a.pt", {"x"}, CPU) == {"x": 2}


def test_a_file_that_is_no_checkpoint_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write(tmp_path / "a.pt", {"x": torch.zeros(1000)})
    whole = (tmp_path / "a.pt").read_bytes()
    for told in (b"", b"hello world", whole[:700], whole[:-20]):
        (tmp_path / "b.pt").write_bytes(told)
        with pytest.raises(PrivacyError, match="is not a checkpoint of a private run") as caught:
            read(tmp_path / "b.pt", {"x"}, CPU)
        assert "\n" not in str(caught.value)
    with pytest.raises(PrivacyError, match=r"cannot be read .*No such file"):
        read(tmp_path / "none.pt", {"x"}, CPU)
