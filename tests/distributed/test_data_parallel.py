"""DistributedDataParallel on several ranks: quantities, training, plain steps between recorded ones."""

from __future__ import annotations

from tests.distributed.sessions import checks_on_ranks

TestOnRanks = checks_on_ranks("tests.distributed.ddp_checks")
