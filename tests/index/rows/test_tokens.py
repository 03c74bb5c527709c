"""Rows of tokens are what each position adds to its sample's gradient, whatever the padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pergrad
from pergrad.errors import IndexingError
from pergrad.index import building


class Language(nn.Module):
    """A causal model of one attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 24)
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True))


def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    targets = batch["input_ids"][:, 1:].masked_fill(batch["attention_mask"][:, 1:] == 0, -100)
    logits = model(batch["input_ids"])[:, :-1]
    found = F.cross_entropy(logits.mT, targets, reduction="none", ignore_index=-100)
    return found.sum(1) / (targets != -100).sum(1).clamp(min=1)


def texts(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 11, (3 + n % 4,), generator=generator) for n in range(count)]


def padded(longest: int) -> Any:
    def collate(items: list[Tensor]) -> dict[str, Tensor]:
        size = max(longest, *(len(item) for item in items))
        ids = torch.stack([F.pad(item, (0, size - len(item))) for item in items])
        mask = torch.stack([torch.arange(size) < len(item) for item in items])
        return {"input_ids": ids, "attention_mask": mask.long()}

    return collate


def index_of(
    model: nn.Module, per: str = "token", longest: int = 0, path: Any = None, **options: Any
) -> pergrad.Index:
    given = {"projection": "none", "dtype": "float64", "preconditioner": "none", "batch_size": 3}
    return pergrad.Index.build(
        model,
        texts(),
        path,
        token_losses,
        collate=padded(longest),
        per=per,
        quiet=True,
        certify=False,
        **{**given, **options},
    )


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Language().double()


@pytest.mark.parametrize("projection", ["none", "count", "two_sided", "rademacher"])
def test_tokens_add_up_to_their_sample(model: nn.Module, projection: str) -> None:
    tokens = index_of(model, projection=projection, dim=32)
    samples = index_of(model, "sample", projection=projection, dim=32)
    total = torch.zeros_like(samples.rows())
    total.index_add_(0, torch.from_numpy(tokens.indices), tokens.rows())
    torch.testing.assert_close(total, samples.rows(), rtol=1e-10, atol=1e-12)
    assert tokens.tokens is not None
    lengths = [len(text) for text in texts()]
    assert np.array_equal(tokens.tokens, np.concatenate([np.arange(n) for n in lengths]))


def test_padding_and_batches_do_not_change_rows(model: nn.Module) -> None:
    expected = index_of(model).rows()
    torch.testing.assert_close(index_of(model, longest=12).rows(), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        index_of(model, batch_size=1).rows(), expected, rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("per", ["sample", "token"])
@pytest.mark.parametrize("projection", ["none", "count", "two_sided"])
def test_rows_in_bfloat16_do_not_depend_on_padding_and_batches(projection: str, per: str) -> None:
    torch.manual_seed(0)
    model = Language()
    given = {"compute_dtype": "bfloat16", "dtype": "float32", "projection": projection, "dim": 64}
    expected = index_of(model, per, **given).rows()[:, 0]
    assert len(expected) == (6 if per == "sample" else sum(map(len, texts())))
    for changed in ({"longest": 12}, {"batch_size": 1}, {"batch_size": 6, "longest": 9}):
        found = index_of(model, per, **{**given, **changed}).rows()[:, 0]
        has_length = expected.norm(dim=1) > 0  # no target depends on the last token of a text
        cosines = F.cosine_similarity(found, expected, dim=1)[has_length]
        assert len(cosines) >= 6
        assert float(cosines.min()) > 0.999
        torch.testing.assert_close(found.norm(dim=1), expected.norm(dim=1), rtol=2e-2, atol=1e-6)


def test_norms_of_tokens_are_estimated_by_their_rows(model: nn.Module) -> None:
    exact, rough = (index_of(model, norms=norms).samples.norm for norms in ("exact", "estimated"))
    np.testing.assert_allclose(rough, exact, rtol=1e-9, atol=1e-12)  # rows are whole


def test_files_of_tokens_have_fewer_samples(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_CHUNKS", 1)
    monkeypatch.setattr(building, "_MOST_BYTES", 6 * 8 * 32)  # six rows
    files = {}
    for per in ("sample", "token"):
        given = {"projection": "count", "dim": 32, "batch_size": 1}
        index = index_of(model, per, path=tmp_path / per, **given)
        files[per] = len(list((tmp_path / per / "rows-0").glob("*.npy")))
        assert len(index) == (6 if per == "sample" else sum(map(len, texts())))
    assert files == {"sample": 1, "token": 6}


def test_a_query_is_scored_against_each_token(model: nn.Module) -> None:
    tokens, samples = index_of(model), index_of(model, "sample")
    query = padded(0)(texts()[:2])
    scores = tokens.scores(query)
    total = torch.zeros(2, 6, dtype=torch.float64)
    total.index_add_(1, torch.from_numpy(tokens.indices), scores)
    torch.testing.assert_close(total, samples.scores(query), rtol=1e-9, atol=1e-12)
    assert "token" in tokens.query(query, 3).frame.columns
    assert tokens.info().per == "token"


def test_a_text_is_tokenized(model: nn.Module) -> None:
    def tokenizer(given: list[str], **_: Any) -> dict[str, Tensor]:
        return padded(0)([torch.tensor([ord(c) % 11 for c in text]) for text in given])

    index = index_of(model, "sample", tokenizer=tokenizer)
    expected = index.scores(tokenizer(["abcd", "bcd"]))
    assert torch.equal(index.scores(["abcd", "bcd"]), expected)
    assert torch.equal(index.scores("abcd")[0], index.scores(tokenizer(["abcd"]))[0])
    with pytest.raises(IndexingError, match="needs tokenizer="):
        index_of(model, "sample").scores("abcd")


def test_a_parameter_without_positions_is_refused(model: nn.Module) -> None:
    class Pooled(Language):
        def forward(self, tokens: Tensor) -> Tensor:
            scale = self.head(self.table(tokens).mean(1))
            return super().forward(tokens) * scale[:, None]

    with pytest.raises(IndexingError, match=r"head\.weight"):
        index_of(Pooled().double())
