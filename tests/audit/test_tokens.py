"""Audits with a token budget: ragged sequences, sorted into batches by length."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pergrad.audit import AuditOptions, Spec, run_audit
from pergrad.errors import AuditError

LENGTHS = [3, 40, 17, 20, 5, 90, 33, 16, 60, 8, 25, 41, 30, 2, 18, 70]


class Reader(nn.Module):
    """Predicts the next token from the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(11, 6, padding_idx=0)
            self.head = nn.Linear(6, 11)

    def forward(self, tokens):
        hidden = self.embed(tokens).cumsum(1)
        return self.head(torch.tanh(hidden))


def losses(model, tokens):
    found = F.cross_entropy(
        model(tokens[:, :-1]).mT, tokens[:, 1:], reduction="none", ignore_index=0
    )
    return found.sum(1) / (tokens[:, 1:] != 0).sum(1).clamp(min=1)


def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 11, (length,), generator=generator) for length in LENGTHS]


class Padded:
    """Pads a batch to its longest sample; remembers the batches."""

    def __init__(self):
        self.shapes = []

    def __call__(self, items):
        found = nn.utils.rnn.pad_sequence(items, batch_first=True)
        self.shapes.append(tuple(found.shape))
        return found


def spec(**changes):
    return Spec(
        **{"model": Reader(), "dataset": texts(), "loss": losses, "collate": Padded()} | changes
    )


def table(folder):
    return pq.read_table(folder / "samples.parquet")


def options(**changes):
    return AuditOptions(dtype="float64", certify=False, **changes)


def test_rows_do_not_depend_on_the_batch_they_were_in(tmp_path):
    summary = run_audit(spec(), tmp_path / "tokens", options(tokens=128))
    run_audit(spec(), tmp_path / "alone", options(batch_size=1))
    found, alone = table(tmp_path / "tokens"), table(tmp_path / "alone")
    assert found["index"].to_pylist() == list(range(len(LENGTHS)))
    for name in ("loss", "norm", "self_influence", "alignment"):
        np.testing.assert_allclose(found[name].to_numpy(), alone[name].to_numpy(), rtol=1e-9)
    assert found["rank"].equals(alone["rank"])
    assert summary["samples"] == len(LENGTHS)


def test_batches_keep_to_the_budget_and_short_samples_share_one(tmp_path):
    collate = Padded()
    run_audit(spec(collate=collate), tmp_path, options(tokens=128))
    assert all(rows * tokens <= 128 for rows, tokens in collate.shapes)
    assert max(rows for rows, _ in collate.shapes) >= 5
    assert len(collate.shapes) < len(LENGTHS)


def test_an_audit_that_lost_chunks_goes_on_to_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        run_audit(spec(), tmp_path / name, options(tokens=64, save_every=0))
    (tmp_path / "two/summary.json").unlink()
    for path in sorted((tmp_path / "two/chunks").glob("*.npz"))[1::2]:
        path.unlink()
    run_audit(spec(), tmp_path / "two", options(tokens=64, save_every=0))
    one, two = ((tmp_path / name / "samples.parquet").read_bytes() for name in ("one", "two"))
    assert one == two
    with pytest.raises(AuditError, match="another tokens"):
        run_audit(spec(), tmp_path / "two", options(tokens=32))


def test_out_of_memory_halves_the_budget(tmp_path):
    def greedy(model, tokens):
        if tokens.numel() > 70:
            raise torch.OutOfMemoryError("too many")
        return losses(model, tokens)

    data = [item for item in texts() if len(item) <= 60]
    collate = Padded()
    summary = run_audit(
        spec(loss=greedy, dataset=data, collate=collate), tmp_path, options(tokens=256)
    )
    assert summary["samples"] == len(data)
    assert min(map(int, summary["batch_sizes"])) < 256


def test_spec_length_gives_the_tokens_of_other_items(tmp_path):
    data = [{"ids": item} for item in texts()]
    changes = {
        "dataset": data,
        "collate": lambda items: Padded()([item["ids"] for item in items]),
    }
    with pytest.raises(AuditError, match=r"no input_ids.*set spec\.length"):
        run_audit(spec(**changes), tmp_path / "a", options(tokens=64))
    summary = run_audit(
        spec(**changes, length=lambda item: len(item["ids"])), tmp_path / "b", options(tokens=64)
    )
    assert summary["samples"] == len(LENGTHS)


def test_a_batch_size_and_a_budget_are_refused():
    with pytest.raises(AuditError, match="batch_size or tokens, not both"):
        AuditOptions(batch_size=4, tokens=100)
