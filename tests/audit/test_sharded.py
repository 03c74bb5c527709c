"""Audits of models that `fully_shard` shards."""

from __future__ import annotations

from tests.distributed.sessions import checks_on_ranks

TestOnRanks = checks_on_ranks("tests.audit.sharded_checks", worlds=(1, 3))
