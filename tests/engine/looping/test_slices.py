"""Samples are taken by owners where rows have them, by shape elsewhere."""

import torch

from pergrad.engine.looping.owned_slices import OwnedSlices
from pergrad.engine.looping.slices import ownership_of_batch, slices_of
from pergrad.engine.looping.slicing import Slices
from pergrad.engine.recording.options import Options
from tests.engine.ragged import graph_batch


def test_owners_and_batches_of_graphs_decide() -> None:
    x = torch.zeros(4, 2)
    assert isinstance(slices_of(print, (x,), 4, Options()), Slices)
    owned = Options(owners=[0, 0, 1, 1])
    assert isinstance(slices_of(print, (x,), 2, owned), OwnedSlices)
    case = graph_batch("GIN")
    found = slices_of(case.loss, case.batch, 4, Options())
    assert isinstance(found, OwnedSlices)
    (data,) = found.sample(2)
    assert torch.equal(data.x, case.alone[2][0].x)
    assert torch.equal(data.edge_index, case.alone[2][0].edge_index)
    own = ownership_of_batch(case.loss, case.batch, Options())
    assert own is not None
    assert own.count == 4
    assert ownership_of_batch(print, (x,), Options()) is None
