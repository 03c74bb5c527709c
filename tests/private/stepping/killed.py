"""A private run that is killed and started again: python killed.py FOLDER [STEPS]."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from pergrad.private import Plan, Step
from tests.private.stepping.cases import data, losses, seeded

STEPS = 30


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    plan = Plan(
        noise_multiplier=1.0,
        sample_rate=0.3,
        steps=STEPS,
        max_norm=0.5,
        expected_batch_size=12,
        bands=2,
    )
    loader = plan.loader(data(dtype=torch.float32), seeded(1))
    step = Step(
        model,
        optimizer,
        losses,
        plan,
        piece_size=5,
        ledger=folder / "ledger.jsonl",
        generator=seeded(2),
    )
    checkpoint = folder / "run.pt"
    if checkpoint.exists():
        step.load(checkpoint)
    else:
        step.save(checkpoint)
    print("ready", flush=True)
    for batch in loader:
        released = step(*batch)
        if released.step % 3 == 0:
            step.save(checkpoint)
        print(released.step, flush=True)
    torch.save([p.detach() for p in model.parameters()], folder / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
