"""Inputs of every kind of layout, for property tests; other sizes often equal the batch size."""

from hypothesis import strategies as st

from tests.engine.samples.propagation.dependence import Batched

__all__ = ["batches"]


@st.composite
def batches(
    draw: st.DrawFn, min_rank: int = 1, max_rank: int = 3, *, plain: bool = False
) -> tuple[int, Batched]:
    """Draw a batch size and an input: one index a sample, several (`pre`, `post`), or any owners."""
    count = draw(st.sampled_from([2, 3, 1]))
    rank = draw(st.integers(min_rank, max_rank))
    dim = draw(st.integers(0, rank - 1))
    shape = [draw(st.sampled_from([count, 2, 1, 3])) for _ in range(rank)]
    kind = draw(st.sampled_from(["plain", "repeated", "owners"])) if not plain else "plain"
    if kind == "owners":
        owners = tuple(draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4)))
        shape[dim] = len(owners)
        return count, Batched(tuple(shape), dim, owners=owners)
    pre, post = draw(st.sampled_from([(1, 2), (2, 1), (2, 2)])) if kind == "repeated" else (1, 1)
    shape[dim] = pre * count * post
    return count, Batched(tuple(shape), dim, pre, post)
