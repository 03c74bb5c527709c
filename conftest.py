import gc
import operator
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pergrad.runtime.caches import clear_caches


def _let_scalars_be_read() -> None:
    """Let `range(0, T, BLOCK)` run in the interpreter of Triton 3.6.

    It holds a scalar as an array of one number and reads it by `int(array)`, which NumPy 2.4 refuses.
    Triton 3.7 reads it as is done here, and is left alone.
    """
    try:
        # Not at the top: Triton reads TRITON_INTERPRET when it defines its own functions, as `tl.sum`.
        from triton.runtime import interpreter  # noqa: PLC0415
    except ImportError:  # no Triton for this machine: the tests of kernels are skipped
        return
    patch = interpreter._patch_lang_tensor
    scalar: Any = type("Scalar", (), {"handle": SimpleNamespace(data=torch.ones(1).int().numpy())})
    patch(scalar, interpreter._LangPatchScope())
    try:
        operator.index(scalar())
    except TypeError:

        def patch_and_mend(tensor: type, scope: Any) -> None:
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        interpreter._patch_lang_tensor = patch_and_mend


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    _let_scalars_be_read()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _exclude_all_from_collections()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Excludes what a module has imported, too, and what it has taken back into collections."""
    yield
    if nextitem is None or nextitem.path != item.path:
        _exclude_all_from_collections()


def _exclude_all_from_collections() -> None:
    """Keeps what is there by now out of collections of garbage, each of which takes a second else."""
    # When hypothesis is first imported, it looks for referrers, which are not seen once frozen.
    if "hypothesis" in sys.modules:
        gc.collect()
        gc.freeze()


_SELECT, _INDEX_SELECT = torch.select, torch.index_select


@pytest.fixture(autouse=True)
def _caches_of_its_own() -> Iterator[None]:
    """No test sees what another one has left behind."""
    torch.select, torch.index_select = _SELECT, _INDEX_SELECT  # torch_geometric replaces them
    clear_caches()
    yield
    clear_caches()
