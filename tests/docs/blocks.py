"""Runs the code blocks of a page of the documentation, in order and in one namespace.

A `python` block runs; one with the name of a file for its title is written to that file too. A `text` block
with the title "output" is what the blocks since the last one have printed; where its title says that numbers
vary, all but the numbers must agree. A `console` block is a number of commands, which are looked up, or run
where they are of `pergrad` and about a file of the page. Any other block is refused: nothing goes unchecked.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path

from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from tests.docs.commands import failure_of, is_about_here, problem_of

__all__ = ["run"]

OUTPUT, ROUGH_OUTPUT = 'text title="output"', 'text title="output; numbers vary"'
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?")


class _Blocks:
    """The evaluators of one page, and what its blocks have printed since the last output."""

    def __init__(self) -> None:
        self._printed = io.StringIO()
        self._python = PythonEvaluator()
        self._by_language: dict[str, Callable[[Example], str | None]] = {
            "python": self._run,
            OUTPUT: lambda example: self._compare(example, str),
            ROUGH_OUTPUT: lambda example: self._compare(example, _without_numbers),
            "console": self._look_up,
        }

    def parse(self, document: Document) -> Iterable[Region]:
        for region in RawFencedCodeBlockLexer(re.compile(r"(?P<info>[^\n]*)\n"))(document):
            region.parsed = region.lexemes["source"]
            info = region.lexemes["info"].strip()
            is_file = re.fullmatch(r'python title="[\w.]+"', info)
            region.evaluator = (
                self._run_file if is_file else self._by_language.get(info, self._refuse)
            )
            yield region

    def _run(self, example: Example) -> str | None:
        with redirect_stdout(self._printed):
            return self._python(example)

    def _run_file(self, example: Example) -> str | None:
        _, name, _ = example.region.lexemes["info"].split('"')
        Path(name).write_text(str(example.parsed))
        return self._run(example)

    def _compare(self, example: Example, seen: Callable[[str], str]) -> str | None:
        printed, self._printed = self._printed.getvalue(), io.StringIO()
        expected = str(example.parsed)
        if printed and seen(expected).split() == seen(printed).split():
            return None
        return f"expected:\n{expected}\nprinted:\n{printed}"

    def _look_up(self, example: Example) -> str | None:
        commands = [line[2:] for line in example.parsed.splitlines() if line.startswith("$ ")]
        if not commands:
            return "a console block without a command: begin its lines with `$ `"
        found = (failure_of(c) if is_about_here(c) else problem_of(c) for c in commands)
        return "\n".join(problem for problem in found if problem) or None

    def _refuse(self, example: Example) -> str:
        return f"unknown kind of block {example.region.lexemes['info']!r}: {[*self._by_language]}"


def _without_numbers(text: str) -> str:
    """The text with a mark in the place of each number."""
    return _NUMBER.sub("#", text)


def run(page: Path) -> int:
    """Run all blocks of a page; how many there are."""
    document = Sybil([_Blocks().parse], path=str(page.parent)).parse(page)
    document.namespace["__name__"] = "__main__"
    examples = list(document.examples())
    for example in examples:
        example.evaluate()
    return len(examples)
