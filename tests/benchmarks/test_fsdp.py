import re

import pytest
import torch.distributed as dist

from benchmarks import fsdp


def test_every_model_is_exact_and_has_a_row_for_each_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fsdp.main(["--size", "tiny", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert len(re.findall(r"\dx$", printed, re.MULTILINE)) == 10
    assert printed.count(" 1.00x") >= 2
    assert not dist.is_initialized()
