"""Every cache is bounded, listed and cleared by one call."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import pergrad
from pergrad.runtime.caches import CACHES, Cache, cached, clear_caches

SOURCE = Path(pergrad.__file__).parent


def entries(owner: str) -> int:
    return sum(cache.entries for cache in CACHES.listed() if cache.owner == owner)


def test_a_cache_is_bounded_and_begins_again() -> None:
    cache: Cache[int] = Cache(__name__, "numbers", most=3)
    for k in range(10):
        cache.put(k, -k)
        assert cache.get(k) == -k
        assert len(cache) <= 3
    assert cache.get(None) is None


def test_get_still_works_after_clear() -> None:
    cache: Cache[str] = Cache(__name__, "words")
    get = cache.get
    cache.put(1, "one")
    clear_caches()
    assert get(1) is None
    cache.put(1, "again")
    assert get(1) == "again"


def test_a_cached_function_is_called_once_until_it_is_cleared() -> None:
    calls: list[int] = []

    @cached("squares", most=2)
    def square(n: int) -> int:
        calls.append(n)
        return n * n

    assert [square(3), square(3)] == [9, 9]
    assert (calls, entries(__name__)) == ([3], 1)
    clear_caches()
    assert (square(3), calls) == (9, [3, 3])
    for n in range(5):
        square(n)
    assert entries(__name__) == 2


def test_the_list_holds_no_cache_alive() -> None:
    cache: Cache[int] = Cache(__name__, "short-lived")
    assert "short-lived" in {listed.holds for listed in CACHES.listed()}
    del cache
    gc.collect()
    assert "short-lived" not in {listed.holds for listed in CACHES.listed()}


def test_a_step_fills_caches_and_one_call_clears_them_all() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(5, 4)
    first = pergrad.norms(model, lambda model, x: model(x).sum(1), x)
    assert entries("pergrad.engine.intercepting.tracker")
    assert entries("pergrad.engine.intercepting.rule_calls")
    assert entries("pergrad.engine.samples.propagation.table")
    clear_caches()
    assert {cache.entries for cache in CACHES.listed()} == {0}
    again = pergrad.norms(model, lambda model, x: model(x).sum(1), x)
    torch.testing.assert_close(again, first, rtol=0, atol=0)


def test_every_cache_says_what_it_holds_and_what_bounds_it() -> None:
    for cache in CACHES.listed():
        assert cache.holds
        assert any(digit.isdigit() for digit in cache.bound) or "most" in cache.bound
    owners = {cache.owner for cache in CACHES.listed()}
    assert {"pergrad.runtime.allocation", "pergrad.runtime.choosing"} <= owners


def caching_decorators(tree: ast.Module) -> Iterator[int]:
    """Lines where a function of the module, or of a class, keeps results out of the list's sight."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                if ast.unparse(decorator).split("(")[0].endswith(("cache", "lru_cache")):
                    yield node.lineno
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func)
            if node in tree.body and name.endswith(("cache", "lru_cache")):
                yield node.lineno


def test_no_function_keeps_results_out_of_sight() -> None:
    found = {
        str(path.relative_to(SOURCE)): lines
        for path in SOURCE.rglob("*.py")
        if path.name != "caches.py"
        and (lines := [*caching_decorators(ast.parse(path.read_text()))])
    }
    assert found == {}


@pytest.mark.parametrize(
    "code",
    ["@cache\ndef f(): ...", "@functools.lru_cache(9)\ndef f(): ...", "f = functools.cache(g)"],
)
def test_the_search_finds_a_hidden_cache(code: str) -> None:
    assert list(caching_decorators(ast.parse(code)))
