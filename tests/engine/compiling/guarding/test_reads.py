"""Tests that a trace notes the names that the code of a step mentions, and no others."""

from __future__ import annotations

import gc
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pergrad.engine.compiling.guarding.reads import Reads, on_one_stack_chunk
from pergrad.engine.looping.snapshots import Snapshot
from pergrad.reductions import sketches


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(x)) * getattr(self, "factor_of_own", 1.0)


def test_names_are_those_of_code_that_ran_and_of_what_it_calls() -> None:
    model = Own(2, 2)
    with Reads() as reads:
        model(torch.ones(1, 2))
    assert {"factor_of_own", "relu", "weight"} <= reads.names
    assert "extra_repr" not in reads.names
    assert any(scope is globals() for scope, _ in reads.scopes)


def test_random_numbers_that_are_set_back_are_counted() -> None:
    state = torch.get_rng_state()
    with Reads() as reads:
        torch.rand(1)
    assert reads.rewinds == 0
    with Reads() as reads:
        torch.set_rng_state(state)
    assert reads.rewinds == 1


def test_another_profiler_goes_on_afterwards() -> None:
    seen: list[str] = []

    def profiler(frame: object, event: str, given: object) -> None:
        seen.append(event)

    sys.setprofile(profiler)
    try:
        with Reads():
            pass
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)


def test_functions_that_a_collection_of_garbage_calls_are_not_of_the_step() -> None:
    def notice(phase: str, info: dict[str, int]) -> None:
        if phase == "another":
            info.pop(phase).name_of_a_collection  # type: ignore[attr-defined]  # noqa: B018

    def make_garbage() -> None:
        for _ in range(3000):
            part: list[object] = []
            part.append(part)

    gc.callbacks.append(notice)
    try:
        with Reads() as reads:
            make_garbage()
    finally:
        gc.callbacks.remove(notice)
    assert "name_of_a_collection" not in reads.names
    assert gc.isenabled()


def test_no_depth_of_calls_makes_reads_map_their_stack_anew() -> None:
    resource = pytest.importorskip("resource")

    def faults_of_many_events() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        with Reads():
            for _ in range(1000):
                len(())
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    def faults_at(depth: int) -> int:
        return faults_at(depth - 1) if depth else faults_of_many_events()

    faults = [on_one_stack_chunk(faults_at, depth) for depth in range(0, 200, 2)]
    assert max(faults) < 500  # a chunk for every event has thousands, in one depth of twenty or so


def test_code_of_the_engine_is_not_of_the_step() -> None:
    with Reads() as reads:
        sketches.as_matrix((2, 3))
    assert not reads.names
    assert not reads.scopes
    assert not reads.codes


def test_code_of_a_library_is_of_the_step_where_the_step_calls_it() -> None:
    def step() -> str:
        return textwrap.indent("a", " ")

    with Reads() as reads:
        textwrap.indent("a", " ")  # not called by code that was noted
    assert "splitlines" not in reads.names
    with Reads() as reads:
        step()
    assert {"textwrap", "indent", "splitlines"} <= reads.names
    assert step.__code__ in [code for _, code in reads.scopes]
    assert all(scope is globals() for scope, _ in reads.scopes)  # a library's do not change


def test_keys_that_code_mentions_are_names_also_in_tuples() -> None:
    def step(options: dict[str, int]) -> bool:
        return options["key_of_step"] == 1 or "a" in ("first_of_step", "last_of_step", 3)

    with Reads() as reads:
        step({"key_of_step": 1})
    assert {"key_of_step", "first_of_step", "last_of_step"} <= reads.names
    assert all(isinstance(name, str) for name in reads.names)


def test_random_numbers_that_the_engine_sets_back_are_not_counted() -> None:
    snapshot = Snapshot(nn.Linear(1, 1))
    with Reads() as reads:
        snapshot.restore()
    assert reads.rewinds == 0
