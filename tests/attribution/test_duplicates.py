import tracemalloc

import numpy as np
import pytest

from pergrad.attribution import near_duplicates
from tests.attribution.gradient_cases import gradients


def by_all_pairs(index, rows, threshold) -> dict[tuple[int, int], float]:
    """Every pair, one at a time."""
    norms = np.linalg.norm(rows, axis=1)
    found = {}
    for a in range(len(rows)):
        for b in range(a + 1, len(rows)):
            if min(norms[a], norms[b]) > 0:
                cosine = rows[a] @ rows[b] / norms[a] / norms[b]
                if cosine >= threshold:
                    found[int(index[a]), int(index[b])] = cosine
    return found


def rows_with_copies(samples: int) -> np.ndarray:
    """A third are copies of others with a little noise, some longer by more than the threshold allows."""
    rows = gradients(samples, 6)
    copied = np.random.default_rng(3).integers(0, samples, size=samples // 3)
    rows[: len(copied)] = rows[copied] * (1 + 0.01 * gradients(len(copied), 1, seed=4))
    rows[: len(copied)] += 0.05 * gradients(len(copied), 6, seed=5)
    return rows


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
@pytest.mark.parametrize("threshold", [0.9, 0.99])
def test_pairs_are_those_of_comparing_all(block, threshold) -> None:
    rows = rows_with_copies(90)
    index = np.arange(90) * 3 + 5
    found = near_duplicates(index, rows, threshold=threshold, block=block)
    expected = by_all_pairs(index, rows, threshold)
    assert len(expected) > 5
    pairs = zip(found.index_a.tolist(), found.index_b.tolist(), strict=True)
    assert dict(zip(pairs, found.cosine, strict=True)) == pytest.approx(expected)
    assert found.count == len(found) == len(expected)
    assert (np.diff(found.cosine) <= 0).all()


@pytest.mark.parametrize("rank", [3, 70, 300])
def test_pairs_found_by_principal_directions_are_those_of_all(rank, monkeypatch) -> None:
    monkeypatch.setattr("pergrad.attribution.duplicates._SHORTENED_FROM", 10)
    generator = np.random.default_rng(rank)
    rows = generator.normal(size=(120, rank)) @ generator.normal(size=(rank, 300))
    rows[60:] = (
        rows[:60] + 0.2 * np.linalg.norm(rows[:60], axis=1)[:, None] * gradients(60, 300) / 17
    )
    found = near_duplicates(np.arange(120), rows.astype(np.float32), threshold=0.97)
    expected = by_all_pairs(np.arange(120), rows, 0.97)
    assert len(expected) > 20
    assert set(zip(found.index_a.tolist(), found.index_b.tolist(), strict=True)) == set(expected)


def test_of_too_many_pairs_the_closest_are_held_and_all_are_counted() -> None:
    rows = rows_with_copies(90)
    options = {"threshold": 0.9, "block": 16}
    every = near_duplicates(np.arange(90), rows, **options)
    few = near_duplicates(np.arange(90), rows, limit=5, **options)
    assert few.count == every.count > 5
    assert few.cosine.tolist() == every.cosine[:5].tolist()


def test_opposite_and_zero_gradients_are_no_duplicates_and_longer_ones_are() -> None:
    rows = np.array([[1.0, 0.0], [-1.0, 0.0], [2.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    found = near_duplicates(np.arange(5), rows)
    assert (found.index_a.tolist(), found.index_b.tolist()) == ([0], [2])
    assert found.group.tolist() == [1, 0, 1, 0, 0]


def test_groups_are_chains_of_pairs_the_largest_first() -> None:
    angles = np.array(
        [0.0, 2.0, 0.05, 0.1, 2.02, 1.0]
    )  # neighbours of 0.05 have a cosine of 0.9987
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert near_duplicates(np.arange(6), rows, threshold=0.998).group.tolist() == [1, 2, 1, 1, 2, 0]


def test_groups_are_those_of_joining_one_pair_after_the_other() -> None:
    rows = rows_with_copies(200)
    found = near_duplicates(np.arange(200), rows, threshold=0.97, block=16)
    parent = list(range(200))

    def root(n: int) -> int:
        return n if parent[n] == n else root(parent[n])

    for a, b in zip(found.index_a.tolist(), found.index_b.tolist(), strict=True):
        parent[root(a)] = root(b)
    members: dict[int, set[int]] = {}
    for n in range(200):
        members.setdefault(root(n), set()).add(n)
    expected = {frozenset(some) for some in members.values() if len(some) > 1}
    groups = range(1, found.group.max() + 1)
    assert {frozenset(np.flatnonzero(found.group == g).tolist()) for g in groups} == expected


def test_a_single_sample_has_no_duplicate() -> None:
    assert len(near_duplicates(np.arange(1), np.ones((1, 2)))) == 0


def test_cosines_of_exact_copies_do_not_exceed_one() -> None:
    rows = np.tile(gradients(1, 33), (5, 1)).astype(np.float32)
    found = near_duplicates(np.arange(5), rows)
    assert found.count == 10
    assert (found.cosine <= 1).all()


def test_memory_is_bounded_by_the_block_also_when_all_are_equal() -> None:
    rows = np.ones((3000, 4), dtype=np.float32)
    tracemalloc.start()
    found = near_duplicates(np.arange(3000), rows, block=128, limit=100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.count == 3000 * 2999 // 2
    # All pairs at once would take 36 MB in float32.
    assert peak < 9e6


@pytest.mark.parametrize("every", [1, 8, 10**6])
def test_copies_do_not_depend_on_the_rows_that_bound_distances(every, monkeypatch):
    generator = np.random.default_rng(1)
    rows = 4 + generator.normal(size=(400, 12))
    rows[:30] = rows[30:60] + 0.02 * generator.normal(size=(30, 12))
    monkeypatch.setattr("pergrad.attribution.duplicates._EVERY", every)
    found = near_duplicates(np.arange(400), rows, threshold=0.9, apart=0.3)
    pairs = set(zip(found.index_a.tolist(), found.index_b.tolist(), strict=True))
    assert pairs == {(n, n + 30) for n in range(30)}


def test_where_many_samples_are_alike_copies_are_those_much_closer_still():
    generator = np.random.default_rng(0)
    centre = generator.normal(size=20)
    rows = centre + 0.1 * generator.normal(size=(200, 20))  # all have cosines above 0.96
    rows[100] = rows[7] + 0.001 * generator.normal(size=20)
    plain = near_duplicates(np.arange(200), rows, threshold=0.96)
    assert len(plain) > 1000
    found = near_duplicates(np.arange(200), rows, threshold=0.96, apart=0.3)
    assert list(zip(found.index_a, found.index_b, strict=True)) == [(7, 100)]
    assert found.group[[7, 100]].tolist() == [1, 1]


def test_more_copies_than_neighbours_are_still_copies():
    rows = np.random.default_rng(0).normal(size=(30, 8))
    rows[10:20] = rows[10] + 1e-3 * rows[10:20]
    found = near_duplicates(np.arange(30), rows, threshold=0.96, apart=0.3)
    assert (found.count, set(found.group[10:20])) == (45, {1})


@pytest.mark.parametrize("dimensions", [2, 3, 4])
def test_in_few_dimensions_chance_makes_no_duplicates(dimensions):
    generator = np.random.default_rng(dimensions)
    rows = np.c_[generator.uniform(size=(1500, dimensions)), np.ones(1500)]
    rows = rows - rows.mean(0)
    rows[:, -1] = 2.0  # directions have as many dimensions as points
    rows[700] = rows[30] + 1e-6
    found = near_duplicates(np.arange(1500), rows, threshold=0.96, apart=0.3)
    assert (found.index_a[0], found.index_b[0]) == (30, 700)
    assert found.count <= 5  # by a share of 0.3 of the fifth distance alone: 26 or more


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_number_of_exact_copies_are_duplicates(dtype):
    rows = np.random.default_rng(0).normal(size=(300, 512)).astype(dtype)
    rows[:100] = rows[0] * np.linspace(1, 3, 100, dtype=dtype)[:, None]
    found = near_duplicates(np.arange(300), rows, threshold=0.96, apart=0.3)
    assert found.count == 100 * 99 // 2


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_few_samples_have_no_fifth_neighbour(samples):
    rows = np.tile(np.arange(1.0, 4.0), (samples, 1))
    found = near_duplicates(np.arange(samples), rows, threshold=0.96, apart=0.3)
    assert found.count == samples * (samples - 1) // 2
