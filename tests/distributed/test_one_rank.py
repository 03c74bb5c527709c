"""Checks of several ranks on one, in this process, where coverage and mutations reach them.

Sums over one rank change nothing, so this does not stand for the sessions on several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.distributed import ranks

MODULES = ("fsdp_checks", "ddp_checks", "tensor_parallel_checks", "pipeline_checks")
CHECKS = {
    f"{module}-{name.removeprefix('check_')}": check
    for module in MODULES
    for name, check in ranks.checks_of(f"tests.distributed.{module}").items()
}


@pytest.fixture(autouse=True)
def _job() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS.keys())
def test_one_rank(check: Callable[[], None]) -> None:
    torch.manual_seed(0)
    check()
