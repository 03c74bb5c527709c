import numpy as np
import pytest

from pergrad.attribution import near_duplicates
from pergrad.attribution.buckets import Buckets, Recall
from pergrad.attribution.directions import directions
from tests.attribution.gradient_cases import gradients

THRESHOLD = 0.985


def clustered(samples: int, width: int = 32) -> np.ndarray:
    """Ten clusters; a tenth are copies of others at a cosine just above the threshold."""
    centres = gradients(10, width, seed=1)
    rows = gradients(samples, width) + centres[np.arange(samples) % 10]
    copies = samples // 10
    scale = np.linalg.norm(rows[:copies], axis=1, keepdims=True) / width**0.5
    rows[-copies:] = rows[:copies] + 0.1 * scale * gradients(copies, width, seed=2)
    return rows.astype(np.float32)


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return clustered(3000)


def pairs_of(found) -> set[tuple[int, int]]:
    return set(zip(found.index_a.tolist(), found.index_b.tolist(), strict=True))


def test_buckets_find_almost_all_pairs_that_comparing_all_finds(rows) -> None:
    index = np.arange(len(rows))
    every = near_duplicates(index, rows, threshold=THRESHOLD)
    found = near_duplicates(index, rows, threshold=THRESHOLD, exact_up_to=100)
    assert every.recall is None
    assert every.count > 250
    assert pairs_of(found) <= pairs_of(every)
    assert len(found) == found.count > 0.95 * every.count
    assert found.recall.share > 0.95


def test_the_recall_is_that_of_the_pairs_of_the_samples_tried(rows) -> None:
    buckets = Buckets(directions(rows), np.arange(len(rows)))
    buckets.probes = buckets.probes[
        :, :1
    ].copy()  # fewer comparisons, so that some pairs are missed
    found = {(int(a), int(b)) for x, y, _ in buckets.pairs(THRESHOLD) for a, b in zip(x, y)}  # noqa: B905
    recall = buckets.recall(THRESHOLD, np.zeros(len(rows), dtype=np.int64))
    tried = np.random.default_rng(1).choice(len(rows), recall.samples, replace=False)
    every = near_duplicates(np.arange(len(rows)), rows, threshold=THRESHOLD)
    wanted = hit = 0
    for a, b in pairs_of(every):
        times = int(a in tried) + int(b in tried)
        wanted += times
        hit += times * ((a, b) in found)
    assert (recall.pairs, recall.found, recall.grouped) == (wanted, hit, 0)
    assert 0 < hit < wanted


def test_each_pair_comes_once(rows) -> None:
    buckets = Buckets(directions(rows), np.arange(len(rows)))
    found = [(int(a), int(b)) for x, y, _ in buckets.pairs(0.5) for a, b in zip(x, y)]  # noqa: B905
    assert len(found) == len(set(found)) > 1000
    assert all(a < b for a, b in found)


def test_copies_of_one_sample_are_one_group_and_no_bucket_is_crowded() -> None:
    rows = gradients(2000, 16).astype(np.float32)
    rows[500:] = rows[0]
    found = near_duplicates(np.arange(2000), rows, threshold=THRESHOLD, exact_up_to=0)
    assert (found.group[500:] == 1).all()
    assert found.group[0] == 1
    assert found.recall.found < found.recall.pairs  # the parts of the bucket are not all compared
    assert found.recall.grouped == found.recall.pairs
    buckets = Buckets(directions(rows), np.arange(2000))
    sizes = np.bincount(buckets.probes[:, 0], minlength=buckets.count)
    assert sizes.max() <= max(64, 4 * 2000 // 128) + 1


@pytest.mark.parametrize("samples", [0, 1, 2, 5])
def test_few_samples_and_zero_gradients(samples) -> None:
    rows = np.ones((samples + 3, 4), dtype=np.float32)
    rows[:3] = 0
    found = near_duplicates(np.arange(samples + 3), rows, exact_up_to=-1)
    assert found.count == samples * (samples - 1) // 2
    assert found.group.tolist() == [0, 0, 0] + [int(samples > 1)] * samples


def test_the_result_is_the_same_each_time(rows) -> None:
    one, two = (near_duplicates(np.arange(3000), rows, exact_up_to=0) for _ in range(2))
    assert one.cosine.tobytes() == two.cosine.tobytes()
    assert one.recall == two.recall


def test_recall_is_said_in_words() -> None:
    assert str(Recall(2048, 200, 190, 198)) == (
        "recall 95.0% of pairs, 99.0% in one group, on 200 pairs of 2,048 random samples"
    )
    assert str(Recall(10, 0, 0, 0)) == "recall unknown: 10 random samples have no pair to find"
    assert Recall(10, 0, 0, 0).as_json()["share"] is None
