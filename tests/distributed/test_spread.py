import pytest

from pergrad.distributed.spread import Spread
from pergrad.errors import PergradError


def test_a_module_without_a_wrapper_may_keep_its_sums() -> None:
    Spread().refuse_local("ClippedSum")


def test_a_sum_of_one_rank_is_refused_by_the_name_of_the_wrapper() -> None:
    with pytest.raises(PergradError, match=r"ClippedSum .* DistributedDataParallel .*reduce=True"):
        Spread("DistributedDataParallel").refuse_local("ClippedSum")


def test_ranks_that_may_have_left_are_not_waited_for() -> None:
    with pytest.raises(PergradError, match=r"`Join`.*empty batches"):
        Spread("DistributedDataParallel", is_joining=True).group(None)
