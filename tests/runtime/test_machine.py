import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pergrad.runtime import MACHINES, machine_of, machine_on, without_compiler


def test_machine_is_told_by_device_and_mode() -> None:
    assert machine_of(torch.ones(2)) is MACHINES["cpu", "eager"]
    assert machine_of(torch.nn.Parameter(torch.ones(2))) is MACHINES["cpu", "eager"]
    assert machine_of(torch.ones(2, device="meta")) is MACHINES["other", "eager"]
    with FakeTensorMode():
        for device in ("cpu", "cuda"):
            t = torch.empty(2, device=f"{device}:0" if device == "cuda" else device)
            assert machine_of(t) is MACHINES[device, "compiled"]
            with without_compiler():
                assert machine_of(t) is MACHINES[device, "traced"]


def test_machine_of_a_device_is_eager() -> None:
    for device, kind in (("cpu", "cpu"), ("cuda", "cuda"), ("meta", "other")):
        assert machine_on(torch.device(device)) is MACHINES[kind, "eager"]
