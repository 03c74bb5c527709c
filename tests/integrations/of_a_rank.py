"""Trains with one of the integrations in one of several processes: `python of_a_rank.py KIND FOLDER`.

The environment says which process it is, as for torchrun. The first one saves the trained weights.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SAMPLES = 16


def tests_of(package: str) -> Any:
    """Imports the tests of one integration only: each package takes seconds."""
    return importlib.import_module(f"tests.integrations.test_{package}")


def with_accelerate(folder: Path, bound: float | None) -> nn.Module:
    test_accelerate = tests_of("accelerate")
    accelerator = test_accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == dist.get_world_size()
    model = test_accelerate.trained(accelerator, test_accelerate.small_model(), bound, SAMPLES)
    return accelerator.unwrap_model(model)  # type: ignore[no-any-return]


def with_trainer(folder: Path, bound: float | None) -> nn.Module:
    test_hf = tests_of("hf")
    model, callback = test_hf.llama(), test_hf.hf.Callback(bound, noise_scale=True)
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
    data = test_hf.samples("next")[:8]
    trainer = test_hf.trained(test_hf.Trainer, model, data, folder, callback, **options)
    assert callback.norms is not None
    assert len(callback.norms) == 8
    assert "noise_scale" in trainer.state.log_history[0]
    torch.save(callback.norms, folder / f"norms-{os.environ['RANK']}.pt")
    return model


def with_plain_trainer(folder: Path, bound: float | None) -> nn.Module:
    test_hf = tests_of("hf")
    model = test_hf.llama()
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
    test_hf.trained(test_hf.PlainTrainer, model, test_hf.samples("next")[:8], folder, **options)
    return model


def with_lightning(folder: Path, bound: float | None) -> nn.Module:
    test_lightning = tests_of("lightning")
    module, callback = test_lightning.Classifier().double(), test_lightning.Callback(bound)
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 2}
    test_lightning.trained(module, folder, callback, samples=SAMPLES, **options)
    assert callback.norms is not None
    assert len(callback.norms) == 16
    return module


KINDS = {"accelerate": with_accelerate, "trainer": with_trainer, "lightning": with_lightning}
PLAIN = {"plain trainer": with_plain_trainer}


def main(kind: str, bound: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = (KINDS | PLAIN)[kind](Path(folder), None if bound == "None" else float(bound))
    if os.environ["RANK"] == "0":
        torch.save([p.detach() for p in model.parameters()], Path(folder) / "weights.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
