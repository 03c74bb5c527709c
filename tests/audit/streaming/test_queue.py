import itertools

import pytest
import torch.distributed as dist

from pergrad.audit.streaming import queue
from pergrad.audit.streaming.queue import Beats, Queue, shared_items
from pergrad.audit.streaming.ranks import Ranks
from pergrad.audit.streaming.stream import batches_in
from pergrad.errors import InterruptedAuditError


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_items_are_the_batches_in_order_and_never_span_a_gap(ranks):
    batches = batches_in([(0, 400), (500, 1000)], 3)
    items = shared_items(batches, ranks)
    assert batches_in(items, 3) == batches
    assert len(items) >= min(len(batches), 16 * ranks)
    assert not any(start < 400 < stop for start, stop in items)


def test_every_item_goes_to_one_process():
    items = [(n, n + 1) for n in range(20)]
    store = dist.HashStore()
    queues = [Queue(items, store) for _ in range(3)]
    claimed = []
    for one in itertools.cycle(queues):
        item = one.claim()
        if item is None:
            break
        claimed.append(item)
    assert claimed == items
    assert all(one.claim() is None for one in queues)


def test_progress_counts_the_samples_of_all_processes_once():
    store = dist.HashStore()
    one, two = Queue([], store), Queue([], store)
    assert one.finished(5) == 5
    two.finished(3)
    assert one.finished(1) == 4
    assert Queue([]).finished(7) == 7


def test_a_silent_process_ends_the_others(monkeypatch):
    for name, value in (("_EVERY", 0.02), ("_SILENT", 0.3), ("_GRACE", 60.0)):
        monkeypatch.setattr(queue, name, value)
    store = dist.HashStore()
    for number in range(2):
        store.set(f"alive/{number}", "0")
    beats = Beats(store, Ranks(0, 2))
    beats.check()
    beats._over.wait(2.0)
    try:
        with pytest.raises(InterruptedAuditError, match=r"process 1 gives no sign of life.*resume"):
            beats.check()
    finally:
        beats.stop()


def test_processes_that_give_signs_of_life_are_left_alone(monkeypatch):
    for name, value in (("_EVERY", 0.02), ("_SILENT", 0.5), ("_GRACE", 60.0)):
        monkeypatch.setattr(queue, name, value)
    store = dist.HashStore()
    for number in range(2):
        store.set(f"alive/{number}", "0")
    beats = [Beats(store, Ranks(number, 2)) for number in range(2)]
    beats[0]._over.wait(1.5)
    for one in beats:
        one.check()
        one.stop()


class Closed(dist.HashStore):
    """A store whose process has ended."""

    def get(self, key):
        raise dist.DistNetworkError("closed")


def test_the_end_of_the_first_process_ends_the_others(monkeypatch):
    for name, value in (("_EVERY", 0.02), ("_GRACE", 60.0)):
        monkeypatch.setattr(queue, name, value)
    beats = Beats(Closed(), Ranks(1, 2))
    beats._over.wait(0.5)
    try:
        with pytest.raises(InterruptedAuditError, match="process 0 has ended"):
            beats.check()
    finally:
        beats.stop()
