"""Adam's second moment divides gradients as the optimizer does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pergrad.errors import IndexingError
from tests.index.cases import built, data, flat_gradients, losses, network


def test_scores_are_divided_by_the_root_of_the_second_moment() -> None:
    model, (x, y) = network(), data().tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
    for _ in range(3):
        optimizer.zero_grad()
        losses(model, x, y).mean().backward()
        optimizer.step()
    index = built(model=model, preconditioner="adam", optimizer=optimizer)
    g = flat_gradients(model, x, y)
    v = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in model.parameters()])
    divisor = (v / (1 - 0.999**3)).sqrt() + 1e-6
    torch.testing.assert_close(
        index.scores((x[:4], y[:4])), g[:4] / divisor @ g.T, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("kind", [None, torch.optim.SGD])
def test_an_optimizer_without_a_second_moment_is_refused(
    kind: type[torch.optim.Optimizer] | None,
) -> None:
    model = network()
    optimizer = None if kind is None else kind(model.parameters(), lr=0.1)
    with pytest.raises(IndexingError, match="optimizer"):
        built(model=model, preconditioner="adam", optimizer=optimizer)


def test_another_optimizer_takes_the_place_of_the_first(tmp_path: Path) -> None:
    model, (x, y) = network(), data().tensors
    made = [torch.optim.Adam(model.parameters(), lr=0.0, eps=eps) for eps in (1e-6, 1e-1)]
    for optimizer in made:
        optimizer.zero_grad()
        losses(model, x, y).mean().backward()
        optimizer.step()
    found = []
    for name, optimizer in (("a", made[0]), ("a", made[1]), ("b", made[1])):
        options = {"preconditioner": "adam", "optimizer": optimizer}
        found.append(built(tmp_path / name, model, **options).scores((x[:4], y[:4])))
    assert not torch.allclose(found[0], found[1])
    torch.testing.assert_close(found[1], found[2])
