"""Class 4: indices that move, repeat or add up samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.soundness.judge import Cases

__all__ = ["CASES"]

CASES = Cases()


def tokens(size: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 5, (size, size)),)


def embedding() -> dict[str, Any]:
    return {"emb": nn.Embedding(5, 3)}


@CASES.exact()
def permuted_and_back(m: Any, x: Tensor) -> Tensor:
    p = torch.randperm(x.shape[0])
    return m.a(x[p])[p.argsort()]


@CASES.exact()
def permuted_and_back_by_a_number(m: Any, x: Tensor) -> Tensor:
    p = torch.randperm(4)
    return m.b(m.a(x[p])[p.argsort()])


@CASES.refused()
def permuted(m: Any, x: Tensor) -> Tensor:
    p = torch.randperm(x.shape[0])
    h = m.a(x)[p]
    return x + m.b(h)


@CASES.refused()
def index_add_duplicates(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.zeros(4, 3).index_add(0, torch.tensor([0, 0, 1, 2]), m.a(x)))


@CASES.refused()
def index_add_duplicates_to_samples(m: Any, x: Tensor) -> Tensor:
    return x.index_add(0, torch.tensor([0, 0, 1, 2]), m.a(x))


@CASES.refused()
def index_copy_reversed(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.zeros(4, 3).index_copy(0, torch.tensor([3, 2, 1, 0]), m.a(x)))


@CASES.refused()
def scatter_add_over_batch(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.zeros(4, 3).scatter_add(0, torch.randint(0, 4, (4, 3)), m.a(x)))


@CASES.refused()
def index_put_swaps_two_of_four(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h.index_put((torch.tensor([0, 1]),), h[[1, 0]]))


@CASES.refused(size=8)
def setitem_swaps_two_of_eight(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h = h.clone()
    h[[0, 1]] = h[[1, 0]]
    return m.b(h)


@CASES.refused(size=8)
def index_put_swaps_two_of_eight(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(torch.index_put(h, (torch.tensor([0, 1]),), h[[1, 0]]))


@CASES.refused(batch=tokens, parts=embedding)
def rotated_tokens(m: Any, t: Tensor) -> Tensor:
    return m.emb(t.rot90()).sum(1) @ m.w


@CASES.refused(batch=tokens, parts=embedding)
def turned_tokens(m: Any, t: Tensor) -> Tensor:
    return m.emb(t.rot90(2)).sum(1) @ m.w


@CASES.exact(batch=tokens, parts=embedding)
def tokens_turned_and_back(m: Any, t: Tensor) -> Tensor:
    return m.emb(t.rot90(2)).sum(1).flip(0) @ m.w


@CASES.refused(batch=tokens, parts=embedding)
def flipped_tokens(m: Any, t: Tensor) -> Tensor:
    return m.emb(t.flip(0)).sum(1) @ m.w


@CASES.refused(batch=tokens, parts=embedding)
def transposed_tokens(m: Any, t: Tensor) -> Tensor:
    return m.emb(t.T).sum(1) @ m.w


@CASES.refused()
def take(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.take(m.a(x), torch.arange(11, -1, -1).view(4, 3)))


@CASES.refused()
def take_along_dim(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.take_along_dim(m.a(x), torch.tensor([[1], [0], [3], [2]]).expand(4, 3), 0))


@CASES.refused()
def gather_over_batch(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x).gather(0, torch.tensor([[1, 0, 2], [0, 1, 3], [3, 3, 0], [2, 2, 1]])))


@CASES.refused()
def rolled(m: Any, x: Tensor) -> Tensor:
    return x + m.b(m.a(x).roll(1, 0))


@CASES.refused()
def duplicates(m: Any, x: Tensor) -> Tensor:
    return x + m.b(m.a(x)[torch.tensor([0, 0, 1, 1])])


@CASES.refused()
def sorted_by_a_feature(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return x + m.b(h[h[:, 0].argsort()])


@CASES.exact()
def sorted_and_back(m: Any, x: Tensor) -> Tensor:
    i = x.sum(1).argsort()
    return m.b(m.a(x[i])[i.argsort()])


@CASES.exact()
def loop_over_slices(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.b(m.a(x[i : i + 1]))[0] for i in range(4)])


@CASES.exact()
def loop_over_rows(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.b(m.a(r)) for r in x])
