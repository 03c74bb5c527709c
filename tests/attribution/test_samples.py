import re

import numpy as np
import pytest

from pergrad.attribution import Samples
from pergrad.errors import PergradError

ONES = np.ones(3)


def fields(**changes: object) -> dict[str, object]:
    fine = {
        "index": np.arange(3),
        "loss": ONES,
        "norm": ONES,
        "group_norms": {"head": ONES},
        "sketch": np.eye(3),
    }
    return {**fine, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": np.ones(2)}, "loss has 2 rows, but index has 3"),
        ({"norm": np.ones((3, 1))}, "norm must be (n,), got shape (3, 1)"),
        ({"group_norms": {"head": np.ones(4)}}, "group_norms['head'] has 4 rows"),
        ({"sketch": np.eye(4)}, "sketch has 4 rows"),
        ({"sketch": np.ones(3)}, "sketch must be (n, k)"),
        ({"sketch": np.ones((3, 0))}, "at least one column"),
        ({"index": np.array([0, 2, 1])}, "index must increase"),
        ({"index": np.array([0, 1, 1])}, "index must increase"),
        ({"index": np.empty(0, dtype=np.int64)}, "no samples"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused_by_name(changes, message) -> None:
    with pytest.raises(PergradError, match=re.escape(message)):
        Samples(**fields(**changes))


def test_usable_are_the_rows_without_a_value_that_is_not_finite() -> None:
    sketch = np.eye(3)
    sketch[0, 1] = np.nan
    loss, norm = np.array([1.0, np.inf, 1.0]), np.ones(3)
    samples = Samples(**fields(sketch=sketch, loss=loss, norm=norm))
    assert samples.usable.tolist() == [False, False, True]
