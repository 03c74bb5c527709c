"""The stored tables of compiled steps and of rungs, and the scripts that write them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.compiled import ROWS, TABLE, compiled_row, markdown
from tests.zoo.explained import rungs_of

STORED = [json.loads(line) for line in ROWS.read_text().splitlines()]
# Steps whose plain training can be traced and which `compiled` cannot: samples are placed by values of ids.
OURS = {"LLaVA", "PaliGemma", "BLIP-2", "JetMoE", "Funnel", "X-MOD", "SEW-D"}


def test_nothing_fails_to_compile_that_the_table_does_not_name() -> None:
    bad = {row["name"] for row in STORED if row["verdict"] in ("uncompiled", "fallback", "wrong")}
    assert bad <= OURS
    assert not [row for row in STORED if row["verdict"] in ("fallback", "wrong")]


def test_every_architecture_was_traced() -> None:
    traced = {row["name"] for row in STORED if row["backend"] == "eager"}
    assert traced == ARCHITECTURES.keys()


def test_the_table_shows_the_stored_rows() -> None:
    assert TABLE.read_text().splitlines()[3:] == "\n".join(markdown(STORED)).splitlines()[3:]


def test_fewer_than_two_percent_of_parameters_are_below_broadcast() -> None:
    text = Path(__file__).with_name("RUNGS.md").read_text()
    found = re.search(r"(\d+) of (\d+) parameters \(([\d.]+) %\)", text)
    assert found is not None
    slow, used, percent = map(float, found.groups())
    assert used > 12_000
    assert percent < 2
    assert round(100 * slow / used, 2) == percent


@pytest.mark.parametrize("name", ["CLIP", "BART"])  # rows picked by position
def test_a_step_is_traced_with_the_numbers_of_the_recorded_one(name: str) -> None:
    row = compiled_row(name, "eager")
    assert row["verdict"] == "compiled", row["reason"]


def test_a_model_that_nobody_can_trace_is_told_apart() -> None:
    assert compiled_row("Longformer", "eager")["verdict"] == "model"


def test_position_tables_and_tokens_have_no_slow_rung() -> None:
    for name in ("Swin", "ViT"):
        found = rungs_of(name)
        assert not found.why_not
        assert not found.below


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Swin", "SwinV2", "ConvNeXt", "ViTDet", "EfficientNet", "BEiT", "T5", "GPT-2"]
)
def test_a_step_is_compiled_by_inductor(name: str) -> None:
    row = compiled_row(name, "inductor")
    assert row["verdict"] == "compiled", row["reason"]
