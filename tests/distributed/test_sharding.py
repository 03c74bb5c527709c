"""`fully_shard` on several ranks: quantities, training, plain steps between recorded ones."""

from __future__ import annotations

import pytest

from tests.distributed import ranks
from tests.distributed.sessions import checks_on_ranks

TestOnRanks = checks_on_ranks("tests.distributed.fsdp_checks")


@pytest.mark.slow
def test_hugging_face_models() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    found = ranks.run("tests.distributed.hf_checks", 2)
    assert {name: errors for name, errors in found.items() if errors} == {}
