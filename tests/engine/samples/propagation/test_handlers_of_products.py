"""Every answer of the handlers of layers and products, without the probe behind one that gives up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.samples.propagation.calls import answer, named, rows

C = torch.ones  # a constant
INTS = torch.tensor([0, 1, 2])
EMBEDDED = torch.tensor([[0, 1], [1, 2], [2, 0]])
ROW = (0, 1, 1)
Answer = Callable[[], Any]


GROUPED = named("grouped_mm")
SHORT = torch.ones(2, dtype=torch.float64)
LONG = torch.ones(6, 5, requires_grad=True) * 1

BATCHWISE: dict[str, tuple[Any, Answer]] = {
    "conv": (ROW, lambda: answer(F.conv2d, rows(3, 2, 4, 4), C(5, 2, 3, 3).double())),
    "conv, several rows each": (
        (0, 1, 2),
        lambda: answer(F.conv1d, rows(6, 2, 4, post=2), C(5, 2, 3).double()),
    ),
    "conv of a constant": ("constant", lambda: answer(F.conv1d, C(1, 2, 4), C(5, 2, 3))),
    "conv without a batch": ("mixed", lambda: answer(F.conv1d, rows(3, 4), C(5, 3, 2).double())),
    "conv without a batch, owners": (
        "mixed",
        lambda: answer(F.conv2d, rows(2, 4, 4, owners=[0, 2]), C(5, 2, 2, 2).double()),
    ),
    "conv along samples": (
        "mixed",
        lambda: answer(F.conv1d, rows(1, 2, 3, dim=2), C(5, 2, 2).double()),
    ),
    "conv, samples as channels": (
        "mixed",
        lambda: answer(F.conv1d, rows(1, 3, 4, dim=1), C(3, 3, 2).double()),
    ),
    "conv, owners as channels": (
        "mixed",
        lambda: answer(F.conv1d, rows(1, 2, 4, dim=1, owners=[0, 1]), C(3, 2, 2).double()),
    ),
    "conv by groups": (
        (1, 1, 2),
        lambda: answer(
            F.conv1d, rows(1, 6, 4, dim=1, post=2), rows(6, 2, 2, post=2), None, 1, 0, 1, 3
        ),
    ),
    "conv by named groups": (
        (1, 1, 1),
        lambda: answer(F.conv1d, rows(1, 6, 4, dim=1, post=2), rows(3, 2, 2), groups=3),
    ),
    "conv by too few groups": (
        "mixed",
        lambda: answer(F.conv1d, rows(1, 6, 4, dim=1, post=2), rows(3, 6, 2)),
    ),
    "conv by groups, one kernel": (
        "mixed",
        lambda: answer(F.conv1d, rows(1, 3, 4, dim=1), C(3, 1, 2).double(), groups=3),
    ),
    "conv by groups, kernels in turn": (
        "mixed",
        lambda: answer(
            F.conv1d, rows(1, 6, 4, dim=1, post=2), rows(6, 2, 2, pre=2), None, 1, 0, 1, 3
        ),
    ),
    "conv by groups, input in turn": (
        "mixed",
        lambda: answer(
            F.conv1d, rows(1, 6, 4, dim=1, pre=2), rows(6, 2, 2, pre=2), None, 1, 0, 1, 3
        ),
    ),
    "conv by groups, samples in the kernel's channels": (
        "mixed",
        lambda: answer(
            F.conv1d, rows(1, 9, 4, dim=1, post=3), rows(3, 3, 2, dim=1), None, 1, 0, 1, 3
        ),
    ),
    "pool without a batch": (ROW, lambda: answer(F.avg_pool1d, rows(3, 4), 2)),
    "pool, samples as channels": (
        "mixed",
        lambda: answer(F.avg_pool2d, rows(2, 3, 4, 4, dim=1), 2),
    ),
    "affine grid": (ROW, lambda: answer(F.affine_grid, theta=rows(3, 2, 3), size=[3, 1, 2, 2])),
    "pad": (ROW, lambda: answer(F.pad, rows(3, 4), (1, 1))),
    "pad before": ("cut", lambda: answer(F.pad, rows(3, 4), (0, 0, 1, 0))),
    "pad after": ("cut", lambda: answer(F.pad, rows(3, 4), (0, 0, 0, 1))),
    "pad around": ((1, 1, 1), lambda: answer(F.pad, rows(2, 3, 4, dim=1), (1, 1, 0, 0, 1, 1))),
    "pad in the middle": (
        "cut",
        lambda: answer(F.pad, rows(2, 3, 4, dim=1), (0, 0, 0, 2, 0, 0)),
    ),
    "pad of a constant": ("constant", lambda: answer(F.pad, C(3), (1, 1))),
    "layer norm": (ROW, lambda: answer(F.layer_norm, rows(3, 4), [4])),
    "layer norm, samples second": (
        (1, 1, 1),
        lambda: answer(F.layer_norm, rows(2, 3, 4, dim=1), [4]),
    ),
    "layer norm over samples": (
        "mixed",
        lambda: answer(F.layer_norm, rows(2, 3, 4, dim=1), [3, 4]),
    ),
    "layer norm of a constant": ("constant", lambda: answer(F.layer_norm, C(3, 4), [4])),
    "group norm": (ROW, lambda: answer(F.group_norm, rows(3, 4), 2)),
    "group norm, samples as channels": (
        "mixed",
        lambda: answer(F.group_norm, rows(2, 3, 4, dim=1), 1),
    ),
    "prelu": (ROW, lambda: answer(F.prelu, rows(3, 2), C(2).double())),
    "prelu, samples as channels": (
        "cut",
        lambda: answer(F.prelu, rows(2, 3, dim=1), C(3).double()),
    ),
    "prelu, one slope": (
        (1, 1, 1),
        lambda: answer(F.prelu, rows(2, 3, dim=1), C(1).double()),
    ),
    "prelu, samples third": (
        (2, 1, 1),
        lambda: answer(F.prelu, rows(2, 2, 3, dim=2), C(2).double()),
    ),
    "batch norm": (ROW, lambda: answer(F.batch_norm, rows(3, 2), SHORT, SHORT)),
    "batch norm in training": (
        "mixed",
        lambda: answer(F.batch_norm, rows(3, 2), None, None, None, None, True),
    ),
    "embedding": (ROW, lambda: answer(F.embedding, rows(of=EMBEDDED), C(3, 4))),
    "embedding, aten": (ROW, lambda: answer(torch.embedding, C(3, 4), rows(of=EMBEDDED))),
    "embedding, own tables": (None, lambda: answer(F.embedding, EMBEDDED, rows(3, 4))),
    "embedding of constants": ("constant", lambda: answer(F.embedding, EMBEDDED, C(3, 4))),
    "one-hot": (ROW, lambda: answer(F.one_hot, rows(of=INTS), 3)),
    "bags": (ROW, lambda: answer(F.embedding_bag, rows(of=EMBEDDED), C(3, 4))),
    "bags, samples second": (
        None,
        lambda: answer(F.embedding_bag, rows(of=EMBEDDED.t(), dim=1), C(3, 4)),
    ),
    "loss of each": (ROW, lambda: answer(F.mse_loss, rows(3, 4), rows(3, 4), reduction="none")),
    "loss": ("total", lambda: answer(F.mse_loss, rows(3, 4), rows(3, 4))),
    "loss of broadcast targets": (
        "total",
        lambda: answer(F.mse_loss, rows(3, 3, dim=1), rows(3)),
    ),
    "loss across samples": ("mixed", lambda: answer(F.mse_loss, rows(3, 3), rows(3, 3, dim=1))),
    "loss of broadcast targets, across samples": (
        "mixed",
        lambda: answer(F.mse_loss, rows(3, 3), rows(3)),
    ),
    "cross entropy": ("total", lambda: answer(F.cross_entropy, rows(3, 4), rows(of=INTS))),
    "cross entropy of other targets": (
        "mixed",
        lambda: answer(F.cross_entropy, rows(3, 4), rows(of=INTS, owners=[1, 0, 2])),
    ),
    "cross entropy, samples third": (  # or probabilities of classes: a proof decides
        None,
        lambda: answer(F.cross_entropy, rows(3, 4, 3, dim=2), torch.stack([INTS] * 3)),
    ),
    "cross entropy of each": (
        ROW,
        lambda: answer(F.cross_entropy, rows(3, 4), rows(of=INTS), reduction="none"),
    ),
    "cross entropy of each, samples third": (
        (1, 1, 1),
        lambda: answer(
            F.cross_entropy, rows(3, 4, 3, dim=2), torch.stack([INTS] * 3), reduction="none"
        ),
    ),
    "cross entropy of each, samples as classes": (
        "mixed",
        lambda: answer(F.cross_entropy, rows(3, 3, dim=1), INTS, reduction="none"),
    ),
    "cross entropy of each, constant scores": (
        None,
        lambda: answer(F.cross_entropy, C(3, 4), rows(of=INTS), reduction="none"),
    ),
}

CONTRACTING: dict[str, tuple[Any, Answer]] = {
    "rows": (ROW, lambda: answer(torch.matmul, rows(3, 4), C(4, 5).double())),
    "over samples": ("mixed", lambda: answer(torch.mm, rows(4, 3, dim=1), C(3, 5).double())),
    "columns": ((1, 1, 1), lambda: answer(torch.mm, C(4, 5).double(), rows(5, 3, dim=1))),
    "vector by columns": (ROW, lambda: answer(torch.matmul, C(5).double(), rows(5, 3, dim=1))),
    "over the right's samples": ("mixed", lambda: answer(torch.mm, C(2, 3).double(), rows(3, 4))),
    "batch by vector": (ROW, lambda: answer(torch.matmul, rows(3, 4, 5), C(5).double())),
    "batch, samples second, by vector": (
        (1, 1, 1),
        lambda: answer(torch.matmul, rows(2, 3, 4, dim=1), C(4).double()),
    ),
    "rows by batch": ((1, 1, 1), lambda: answer(torch.matmul, rows(3, 4), C(2, 4, 5).double())),
    "matrix by batch": (ROW, lambda: answer(torch.matmul, C(2, 4).double(), rows(3, 4, 5))),
    "vector by batch": (ROW, lambda: answer(torch.matmul, C(4).double(), rows(3, 4, 5))),
    "wider batch by batch": (
        (1, 1, 1),
        lambda: answer(torch.matmul, C(7, 3, 2, 4).double(), rows(3, 4, 5)),
    ),
    "matrix by vector of samples": ("mixed", lambda: answer(torch.mv, C(2, 3).double(), rows(3))),
    "bmm": (ROW, lambda: answer(torch.bmm, rows(3, 2, 4), rows(3, 4, 5))),
    "mv": (ROW, lambda: answer(torch.mv, rows(3, 4), C(4).double())),
    "dot": ("total", lambda: answer(torch.dot, rows(3), rows(3))),
    "reflected": (ROW, lambda: answer(Tensor.__rmatmul__, C(4, 5).double(), rows(3, 4))),
    "addmm": (ROW, lambda: answer(torch.addmm, C(5).double(), rows(3, 4), C(4, 5).double())),
    "addmm, rows added": (
        ROW,
        lambda: answer(torch.addmm, rows(3, 5), C(3, 4).double(), C(4, 5).double()),
    ),
    "addmm, vector of samples": (
        (1, 1, 1),
        lambda: answer(torch.addmm, rows(3), C(2, 4).double(), rows(4, 3, dim=1)),
    ),
    "addmm, other samples": (
        "mixed",
        lambda: answer(torch.addmm, rows(3), rows(3, 4), C(4, 3).double()),
    ),
    "grouped": (ROW, lambda: answer(GROUPED, rows(3, 4), C(2, 4, 5), outputs=[LONG[:3]])),
    "grouped over samples": (
        "mixed",
        lambda: answer(GROUPED, rows(6, 3, dim=1), C(2, 3, 5), outputs=[LONG]),
    ),
    "grouped, own weights": (
        "mixed",
        lambda: answer(GROUPED, C(6, 4), rows(3, 4, 5), outputs=[LONG]),
    ),
    "linear": (ROW, lambda: answer(F.linear, rows(3, 4), C(5, 4).double())),
    "linear over samples": ("mixed", lambda: answer(F.linear, rows(2, 3, dim=1), C(5, 3).double())),
    "linear, samples second": (
        (1, 1, 1),
        lambda: answer(F.linear, rows(2, 3, 4, dim=1), C(5, 4).double()),
    ),
    "linear, own outputs": (
        (2, 1, 1),
        lambda: answer(F.linear, C(2, 2, 4).double(), rows(3, 4)),
    ),
    "linear, own inputs": (
        "mixed",
        lambda: answer(F.linear, C(2, 3).double(), rows(5, 3, dim=1)),
    ),
    "linear, both": ("mixed", lambda: answer(F.linear, rows(3, 4), rows(3, 4))),
    "einsum": (ROW, lambda: answer(torch.einsum, "ni,ij->nj", rows(3, 4), C(4, 5).double())),
    "einsum of a list": (
        (1, 1, 1),
        lambda: answer(torch.einsum, "n i, i j -> j n", [rows(3, 4), C(4, 5).double()]),
    ),
    "einsum, implicit": (ROW, lambda: answer(torch.einsum, "bi,ij", rows(3, 4), C(4, 5).double())),
    "einsum, implicit, sorted": (
        (1, 1, 1),
        lambda: answer(torch.einsum, "zi,ij", rows(3, 4), C(4, 5).double()),
    ),
    "einsum, implicit, dots": (
        (1, 1, 1),
        lambda: answer(torch.einsum, "...i,ia", rows(2, 3, 4, dim=1), C(4, 5).double()),
    ),
    "einsum, dots before": (
        (2, 1, 1),
        lambda: answer(torch.einsum, "i...j->j...i", rows(3, 2, 4)),
    ),
    "einsum, dots of other ranks": (
        (1, 1, 1),
        lambda: answer(torch.einsum, "...i,...i->...", rows(3, 4), rows(2, 3, 4, dim=1)),
    ),
    "einsum of a scalar": (
        ROW,
        lambda: answer(torch.einsum, "ni,->ni", rows(3, 4), C(()).double()),
    ),
    "einsum over samples": ("total", lambda: answer(torch.einsum, "ni->i", rows(3, 4))),
    "einsum of sublists": (None, lambda: answer(torch.einsum, rows(3, 4), [0, 1], [0])),
    "attention": (
        ROW,
        lambda: answer(F.scaled_dot_product_attention, rows(3, 2, 4), rows(3, 5, 4), rows(3, 5, 4)),
    ),
    "attention, samples second": (
        (1, 1, 1),
        lambda: answer(
            F.scaled_dot_product_attention, *[rows(2, 3, 5, 4, dim=1) for _ in range(3)]
        ),
    ),
    "attention to others": (
        "mixed",
        lambda: answer(F.scaled_dot_product_attention, *[rows(2, 3, 4, dim=1) for _ in range(3)]),
    ),
    "attention to narrower keys": (
        (1, 1, 1),
        lambda: answer(
            F.scaled_dot_product_attention,
            rows(2, 3, 5, 4, dim=1),
            key=rows(3, 5, 4),
            value=rows(3, 5, 4),
            outputs=[torch.ones(2, 3, 5, 4)],
        ),
    ),
}

CASES = {
    f"{family}: {name}": case
    for family, cases in (
        ("batchwise", BATCHWISE),
        ("contracting", CONTRACTING),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_handler_by_itself_tells_where_the_samples_are(name: str) -> None:
    expected, find = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes broadcast in losses, and implicit dimensions
        found = find()
    if isinstance(found, list):  # of equal answers, one for each output
        assert all(one == found[0] for one in found)
        found = found[0]
    assert found == expected
