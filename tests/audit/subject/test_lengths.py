import numpy as np
import pytest
import torch

from pergrad.audit.subject.lengths import bucket_lengths, by_bucket, length_of
from pergrad.errors import AuditError


def test_lengths_of_the_usual_items():
    assert length_of({"input_ids": torch.zeros(7), "label": 1}) == 7
    assert length_of((torch.zeros(5, 3), torch.tensor(1))) == 5
    assert length_of("abc") == 3
    assert length_of(torch.tensor(1.0)) == 1


@pytest.mark.parametrize("item", [{"text": "abc"}, 3.0, (3,)])
def test_an_item_without_a_length_is_refused_with_the_next_step(item):
    with pytest.raises(AuditError, match=r"set spec\.length"):
        length_of(item)


def test_a_bucket_is_at_least_as_long_and_adds_at_most_a_third_beyond_the_shortest():
    lengths = np.arange(16, 5000)
    found = bucket_lengths(lengths)
    assert (found >= lengths).all()
    assert ((found - lengths) / found).max() <= 1 / 3
    assert (np.diff(found) >= 0).all()


def test_samples_are_sorted_by_bucket_and_keep_their_order_within():
    indices = np.array([3, 5, 8, 9])
    found, padded = by_bucket(indices, {3: 60, 5: 2, 8: 50, 9: 16}.get)
    assert found.tolist() == [5, 9, 3, 8]
    assert padded.tolist() == [16, 16, 64, 64]
