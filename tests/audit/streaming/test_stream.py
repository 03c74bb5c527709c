import numpy as np
import pytest
import torch

from pergrad.audit.streaming.chunks import gaps, kept_spans
from pergrad.audit.streaming.folder import ResultsFolder
from pergrad.audit.streaming.gradients import Gradients
from pergrad.audit.streaming.loading import Loader
from pergrad.audit.streaming.stream import Stream, Work, batches_in, shard
from pergrad.audit.subject.spec import grouped_parameters
from pergrad.audit.writing.joining import read_all
from pergrad.errors import AuditError, InterruptedAuditError
from tests.audit.cases import SIZE, BadItem, data, losses, mlp


class Said:
    def __init__(self):
        self.words, self.done = [], 0

    def begin(self, samples, done): ...

    def advance(self, samples):
        self.done += samples

    def say(self, message):
        self.words.append(message)


@pytest.fixture
def folder(tmp_path):
    made = ResultsFolder(tmp_path)
    made.open()
    made.begin({"identity": {}, "batch_size": 16})
    return made


def stream(folder, spec, *, watch=None, save_every=60.0):
    spec.model.double()
    indices = np.arange(len(spec.dataset))
    gradients = Gradients(spec.model, spec, grouped_parameters(spec), sketch_dim=8, seed=0)
    return Stream(
        folder,
        Loader(spec, indices, 0),
        gradients,
        indices,
        seed=0,
        workers=0,
        save_every=save_every,
        watch=watch or Said(),
    )


def work(items):
    """A queue of items for one process."""
    left = list(items)
    return Work(lambda: left.pop(0) if left else None)


def rows(folder):
    return read_all(folder.chunks, np.arange(SIZE))[0].rows


def test_batches_end_where_those_of_a_run_from_the_start_end():
    whole = batches_in([(0, 100)], 16)
    for start, stop in ((16, 64), (96, 100)):
        assert [b for b in whole if start <= b[0] < stop] == batches_in([(start, stop)], 16)


def test_everything_is_one_chunk_where_there_is_time(folder):
    watch = Said()
    stream(folder, mlp(), watch=watch).run(work([(0, SIZE)]), 16)
    assert kept_spans(folder.chunks) == [(0, SIZE)]
    assert watch.done == SIZE
    assert watch.words == []


def test_each_batch_is_a_chunk_where_there_is_none(folder):
    stream(folder, mlp(), save_every=0).run(work([(0, SIZE)]), 16)
    assert kept_spans(folder.chunks) == [(0, 16), (16, 32), (32, 48), (48, SIZE)]


def test_spans_that_are_no_neighbours_are_chunks_of_their_own(folder):
    stream(folder, mlp()).run(work([(0, 16), (32, 48)]), 16)
    assert kept_spans(folder.chunks) == [(0, 16), (32, 48)]


def test_rows_do_not_depend_on_the_chunks(folder, tmp_path):
    stream(folder, mlp(), save_every=0).run(work([(32, SIZE), (0, 32)]), 16)
    other = ResultsFolder(tmp_path / "other")
    other.open()
    other.begin({"identity": {}, "batch_size": 16})
    stream(other, mlp()).run(work([(0, SIZE)]), 16)
    for name in ("loss", "norm", "group_norms", "sketch"):
        assert getattr(rows(folder), name).tobytes() == getattr(rows(other), name).tobytes()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")]
)
@pytest.mark.parametrize("in_backward", [False, True])
def test_the_batch_shrinks_until_it_fits_and_the_audit_goes_on(folder, error, in_backward):
    def greedy(model, x, y):
        found = losses(model, x, y)
        if len(x) > 5 and float(x[0, 0]) != float(data()[0][0][0]):  # the first batch fits
            if not in_backward:
                raise error

            def hook(_):
                raise error

            found.register_hook(hook)
        return found

    watch = Said()
    stream(folder, mlp(loss=greedy), watch=watch).run(work([(0, SIZE)]), 16)
    whole, sizes = read_all(folder.chunks, np.arange(SIZE))
    assert sizes == {16: 16, 4: SIZE - 16}
    assert folder.batch_size({"batch_size": 16}) == 4
    assert watch.words == [
        "out of memory with batches of 16; continuing with 8",
        "out of memory with batches of 8; continuing with 4",
    ]
    assert watch.done == SIZE
    assert np.isfinite(whole.rows.norm).all()


def test_a_last_batch_that_does_not_fit_shrinks_below_its_own_size(folder):
    def greedy(model, x, y):
        if len(x) == 12:
            raise MemoryError
        return losses(model, x, y)

    watch = Said()
    stream(folder, mlp(loss=greedy), watch=watch).run(work([(0, SIZE)]), 48)
    assert watch.words == ["out of memory with batches of 12; continuing with 6"]


def test_one_sample_that_does_not_fit_stops_the_audit_and_keeps_the_rest(folder):
    def greedy(model, x, y):
        if (y[0] == data()[9][1]) and torch.equal(x[0], data()[9][0].double()):
            raise MemoryError
        return losses(model, x, y)

    with pytest.raises(InterruptedAuditError, match=r"batch of one sample \(index 9\)"):
        stream(folder, mlp(loss=greedy)).run(work([(0, SIZE)]), 1)
    assert kept_spans(folder.chunks) == [(0, 9)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, AuditError])
def test_what_was_computed_is_kept_whatever_happens(folder, error):
    class Ends(BadItem):
        def __getitem__(self, index):
            if index == 33:
                raise error("now")
            return data()[index]

    with pytest.raises(error, match="now"):
        stream(folder, mlp(dataset=Ends(*data().tensors))).run(work([(0, SIZE)]), 16)
    assert kept_spans(folder.chunks) == [(0, 32)]
    assert gaps(kept_spans(folder.chunks), SIZE) == [(32, SIZE)]


def test_an_error_of_the_backward_names_the_samples(folder):
    def loss(model, x, y):
        found = losses(model, x, y)
        found.register_hook(lambda grad: grad.view(-1, 7))
        return found

    with pytest.raises(AuditError, match=r"the backward raised RuntimeError.*\(samples 0 to 15\)"):
        stream(folder, mlp(loss=loss)).run(work([(0, SIZE)]), 16)


def test_an_error_of_the_loss_names_the_samples(folder):
    def loss(model, x, y):
        return losses(model, x, y) if len(x) == 16 else losses(model, x, y).mean()

    with pytest.raises(AuditError, match=r"got a scalar.*\(samples 48 to 59\)"):
        stream(folder, mlp(loss=loss)).run(work([(0, SIZE)]), 16)


@pytest.mark.parametrize("broken", [[37], [35, 37, 46], [47]])
def test_an_error_of_one_sample_names_it(folder, broken):
    bad = data().tensors[0][broken]

    def loss(model, x, y):
        if (x[:, None] == bad).all(2).any():
            raise IndexError("index out of range")
        return losses(model, x, y)

    with pytest.raises(AuditError, match=rf"IndexError: index out .*\(sample {broken[0]}\)"):
        stream(folder, mlp(loss=loss)).run(work([(0, SIZE)]), 16)
    assert kept_spans(folder.chunks) == [(0, 32)]


def test_shards_are_all_batches_in_order():
    batches = batches_in([(0, 100)], 16)
    for count in (1, 2, 3, 20):
        parts = [shard(batches, rank, count) for rank in range(count)]
        assert [batch for part in parts for batch in part] == batches


def test_batches_of_a_token_budget_have_one_padded_length_and_at_most_its_tokens():
    padded = np.repeat([16, 24, 64, 512], [10, 7, 5, 3])
    found = batches_in([(0, 25)], 100, padded)
    assert [n for start, stop in found for n in range(start, stop)] == list(range(25))
    for start, stop in found:
        assert len(set(padded[start:stop])) == 1
        assert padded[start:stop].sum() <= 100 or stop - start == 1
    assert (0, 6) in found
    assert (20, 21) in found


def test_batches_of_a_token_budget_end_where_those_of_a_run_from_the_start_end():
    padded = np.repeat([16, 24, 64], [10, 7, 5])
    whole = batches_in([(0, 22)], 100, padded)
    for start, stop in whole:
        rest = [b for b in whole if b[0] >= start]
        assert batches_in([(start, 22)], 100, padded) == rest
        assert batches_in([(start, stop)], 100, padded) == [(start, stop)]
