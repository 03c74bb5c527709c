"""Streams of random numbers are standard, independent of each other, and repeat by their key."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from pergrad.errors import PrivacyError
from pergrad.private.drawing import streams as module
from pergrad.private.drawing.streams import KEY_BYTES, Streams, new_key, seeded

KINDS = [False, True]


@pytest.mark.parametrize("cryptographic", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_million_normals_pass_kolmogorov_smirnov(cryptographic: bool, dtype: torch.dtype) -> None:
    drawn = Streams(b"k" * 32, cryptographic=cryptographic)("noise").normals(
        torch.empty(1000, 1000, dtype=dtype)
    )
    assert drawn.shape == (1000, 1000)
    assert drawn.dtype is dtype
    assert stats.kstest(drawn.double().flatten().numpy(), "norm").pvalue > 1e-3
    # Rows and columns are uncorrelated: chi-squared of 1,000 products.
    products = (drawn[1:] * drawn[:-1]).double().sum(1) / 1000**0.5
    assert stats.chi2.sf(float(products.square().sum()), len(products)) > 1e-3


@pytest.mark.parametrize("cryptographic", KINDS)
def test_streams_of_steps_and_purposes_are_uncorrelated(cryptographic: bool) -> None:
    streams = Streams(b"k" * 32, cryptographic=cryptographic)
    like = torch.empty(100_000, dtype=torch.float64)
    drawn = torch.stack(
        [
            *(streams("noise", k).normals(like) for k in range(6)),
            streams("count", 0).normals(like),
            Streams(b"l" * 32, cryptographic=cryptographic)("noise", 0).normals(like),
        ]
    )
    off = (drawn @ drawn.T)[torch.ones(8, 8).triu(1).bool()] / len(like) ** 0.5
    assert stats.chi2.sf(float(off.square().sum()), len(off)) > 1e-3


def test_a_seed_that_is_no_generator_is_refused() -> None:
    with pytest.raises(PrivacyError, match=r"must be a torch\.Generator, got 5"):
        new_key(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("cryptographic", KINDS)
def test_a_stream_repeats_by_its_key_purpose_and_number(cryptographic: bool) -> None:
    def drawn(key: bytes, purpose: str, number: int) -> torch.Tensor:
        return Streams(key, cryptographic=cryptographic)(purpose, number).uniforms(9)

    first = drawn(b"k" * 32, "a", 1)
    assert torch.equal(first, drawn(b"k" * 32, "a", 1))
    for other in (drawn(b"l" * 32, "a", 1), drawn(b"k" * 32, "b", 1), drawn(b"k" * 32, "a", 2)):
        assert not torch.equal(first, other)
    assert ((first >= 0) & (first < 1)).all()


def test_every_bit_of_a_key_counts() -> None:
    # A seed of 32 bits would repeat: many steps share their noise then.
    first = [float(Streams(b"k" * 32)("noise", k).uniforms(1)) for k in range(20_000)]
    assert len({*first}) == len(first)
    late = Streams(b"k" * 31 + b"l")("noise", 0).uniforms(1)
    assert float(late) != first[0]


def test_a_generator_laid_out_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module._template.cache_clear()
    monkeypatch.setattr(module, "_STATE", slice(32, 32 + 8 * 624))
    with pytest.raises(PrivacyError, match="pass cryptographic=True"):
        Streams(b"k" * 32)("noise").uniforms(1)
    module._template.cache_clear()


def test_a_key_comes_from_the_system_or_from_a_generator() -> None:
    assert new_key(None) != new_key(None)
    a, b = (new_key(torch.Generator().manual_seed(1)) for _ in range(2))
    assert a == b
    assert len(a) == len(new_key(None)) == KEY_BYTES


def test_cryptographic_numbers_need_their_package() -> None:
    code = """
import sys
sys.modules["cryptography"] = None
from pergrad.errors import PrivacyError
from pergrad.private.drawing.streams import Streams
try:
    Streams(b"k" * 32, cryptographic=True)
except PrivacyError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'pergrad[private]'" in said.stdout


def test_seeded_blocks_repeat_and_leave_nothing_behind() -> None:
    def drawn() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    undisturbed = [drawn() for _ in range(2)]
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    found = [drawn()]
    with seeded(b"abcdefghijkl"):
        inside = drawn()
    found.append(drawn())
    assert found == undisturbed
    with seeded(b"abcdefghijkl"):
        assert drawn() == inside
    with seeded(b"xbcdxfghxjkl"):
        assert all(a != b for a, b in zip(drawn(), inside, strict=True))
