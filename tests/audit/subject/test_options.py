import numpy as np
import pytest
import torch

from pergrad.audit import AuditOptions
from pergrad.audit.subject.options import chosen_device, chosen_indices
from pergrad.errors import AuditError


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"batch_size": 0},
            {"sketch_dim": 0},
            {"workers": -1},
            {"dtype": "int8"},
            {"save_every": -1},
        ),
        *({"shown": "50"}, {"batch_size": 1.5}, {"workers": None}, {"seed": "a"}, {"seed": -1}),
        *({"seed": 2**63}, {"save_every": "x"}, {"certify": "no"}, {"strict": 1}, {"shown": True}),
        *({"duplicates": "0.9"}, {"duplicates": 2}),
    ],
)
def test_options_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(AuditError, match=next(iter(wrong))):
        AuditOptions(**wrong)


def test_numbers_of_numpy_and_devices_of_torch_are_options():
    found = AuditOptions(batch_size=np.int64(3), save_every=2, device=torch.device("cpu"))
    assert (found.batch_size, found.device) == (3, "cpu")


def test_a_subset_is_drawn_by_the_seed_and_sorted():
    found = chosen_indices("20", 100, seed=1)
    assert len(set(found)) == 20
    assert (np.diff(found) > 0).all()
    assert np.array_equal(found, chosen_indices(20, 100, seed=1))
    assert not np.array_equal(found, chosen_indices(20, 100, seed=2))


@pytest.mark.parametrize(
    ("subset", "expected"), [(None, range(9)), ("3:5", (3, 4)), (":2", (0, 1)), ("7:", (7, 8))]
)
def test_a_range_is_taken_as_it_is(subset, expected):
    assert chosen_indices(subset, 9, seed=0).tolist() == list(expected)


@pytest.mark.parametrize("subset", ["0", "10", "5:2", "3:3", "0:10", "some", "-3", "1:2:3"])
def test_a_subset_that_is_not_within_the_data_is_refused(subset):
    with pytest.raises(AuditError, match="subset"):
        chosen_indices(subset, 9, seed=0)


def test_an_empty_data_set_is_refused():
    with pytest.raises(AuditError, match="empty"):
        chosen_indices(None, 0, seed=0)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu9", "torch does not know device"),
        ("meta", "runs on cpu or cuda"),
        ("mps", "runs on cpu or cuda"),
    ],
)
def test_a_device_that_an_audit_cannot_run_on_is_refused(device, message):
    with pytest.raises(AuditError, match=message):
        chosen_device(device)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AuditError, match=r"'cuda:0': torch .* sees no CUDA GPU"):
        chosen_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(AuditError, match="'cuda:2': there are 2 GPUs, cuda:0 to cuda:1"):
        chosen_device("cuda:2")


def test_each_local_rank_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [chosen_device(None, rank).index for rank in range(3)] == [0, 1, 0]
    assert chosen_device("cuda", 1) == torch.device("cuda:1")
    assert chosen_device("cuda:0", 1) == torch.device("cuda:0")
