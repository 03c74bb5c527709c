"""Two processes train the weights of a loop over all samples written by hand."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integrations import of_a_rank, test_accelerate, test_hf, test_lightning

ROOT = Path(__file__).parents[2]
BOUNDS = {"accelerate": 0.8, "trainer": 2.5, "lightning": 1.6}
pytestmark = pytest.mark.slow


def trained(kind: str, bound: float | None, folder: Path) -> list[Tensor]:
    """Runs two processes; returns the weights of the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.of_a_rank", kind, str(bound), str(folder)],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "test",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    found: list[Tensor] = torch.load(folder / "weights.pt")
    return found


def by_hand(kind: str, bound: float | None) -> list[Tensor]:
    count = of_a_rank.SAMPLES
    if kind == "accelerate":
        groups = [[*range(count)]]  # two processes, batches of 4, two of them in a step
        return test_accelerate.trained_by_hand(test_accelerate.small_model(), groups, bound)
    large = float("inf") if bound is None else bound
    if kind == "trainer":
        return test_hf.by_hand(test_hf.llama(), test_hf.samples("next")[:8], 8, bound=large)
    module = test_lightning.Classifier().double()
    return test_lightning.by_hand(module, 16, bound=large, samples=count)


@pytest.mark.parametrize("kind", of_a_rank.KINDS)
def test_clipped_weights_are_those_of_one_loop(kind: str, tmp_path: Path) -> None:
    found = trained(kind, BOUNDS[kind], tmp_path)
    torch.testing.assert_close(found, by_hand(kind, BOUNDS[kind]), rtol=1e-6, atol=1e-6)


def test_trainer_that_logs_trains_as_a_plain_one(tmp_path: Path) -> None:
    """A plain Trainer averages over the labels of all processes, so its own weights are the oracle."""
    ours, others = tmp_path / "ours", tmp_path / "others"
    for folder in (ours, others):
        folder.mkdir()
    for p, q in zip(
        trained("trainer", None, ours), trained("plain trainer", None, others), strict=True
    ):
        assert torch.equal(p, q)
    model, wanted = test_hf.llama(), []
    for sample in test_hf.samples("next")[:8]:
        own = torch.autograd.grad(test_hf.own_loss(model, sample), list(model.parameters()))
        wanted.append(torch.stack([g.square().sum() for g in own]).sum().sqrt())
    for rank in range(2):
        norms = torch.load(ours / f"norms-{rank}.pt")
        torch.testing.assert_close(
            norms.sort().values, torch.stack(wanted).sort().values, rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("kind", ["accelerate", "lightning"])
def test_logging_alone_steps_on_the_mean(kind: str, tmp_path: Path) -> None:
    found = trained(kind, None, tmp_path)
    torch.testing.assert_close(found, by_hand(kind, None), rtol=1e-6, atol=1e-6)
