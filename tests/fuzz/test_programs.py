"""Programs are data: the same seed draws the same ones, and their source compiles."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from fuzz.programs import Program, Step, draw, draw_each
from fuzz.registry import INGREDIENTS, Sizes


@pytest.mark.parametrize("mixing", [False, True])
def test_a_seed_draws_the_same_programs_again(mixing: bool) -> None:
    first, second = (list(islice(draw(3, mixing=mixing), 20)) for _ in range(2))
    assert first == second
    assert first != list(islice(draw(4, mixing=mixing), 20))


def test_programs_mix_samples_only_where_asked_to() -> None:
    for mixing in (False, True):
        for program in islice(draw(0, mixing=mixing), 200):
            mixing_steps = [step for step in program.steps if step.ingredient.mixes]
            assert len(mixing_steps) == (1 if mixing else 0)


def test_drawn_programs_are_well_formed_and_compile() -> None:
    for program in islice(draw(1, mixing=False), 200):
        assert program.is_well_formed
        compile(program.source(), "program", "exec")


def test_every_ingredient_compiles_by_itself() -> None:
    for name in INGREDIENTS:
        programs = draw_each(name)
        assert programs, name
        for program in programs:
            source = program.source()
            assert "<<" not in source
            assert "$" not in source
            compile(source, name, "exec")


def test_a_program_survives_json() -> None:
    for program in islice(draw(2, mixing=True), 20):
        assert Program.from_json(json.loads(json.dumps(program.as_json()))) == program


def test_a_choice_is_the_same_in_all_sections() -> None:
    source = Program(Sizes(2, 3, 4), "vec", (Step("embedding_bag", 5),)).source()
    assert source.count("mode='sum'") + source.count("mode='mean'") == 1


def test_a_step_must_take_what_the_one_before_gives() -> None:
    steps = (Step("to_vec", 0), Step("conv1d", 0))
    assert not Program(Sizes(2, 3, 4), "seq", steps).is_well_formed
    assert Program(Sizes(2, 3, 4), "seq", steps[::-1]).is_well_formed
