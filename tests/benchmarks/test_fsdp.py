import re
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import fsdp
from benchmarks.rows import read


def test_every_model_is_exact_and_has_a_row_for_each_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fsdp.main(["--size", "tiny", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert len(re.findall(r"\dx$", printed, re.MULTILINE)) == 10
    assert printed.count(" 1.00x") >= 2
    assert not dist.is_initialized()


def test_the_documentation_shows_the_stored_rows_of_a_gpu() -> None:
    root = Path(__file__).parents[2]
    newest = sorted((root / "benchmarks/results/fsdp").glob("cuda-*.jsonl"))[-1]
    found: dict[str, list[str]] = {}
    for row in read(newest):
        if row.method != "plain":
            found.setdefault(row.model, []).append(f"{row.ratio:.2f}")
    page = (root / "docs/benchmarks.md").read_text()
    for ratios in found.values():
        assert f"| {' | '.join(ratios)} |" in page
