"""Checks that commands in the documentation exist.

Commands are looked up, not run, but for those of `pergrad` about a module in the current folder.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shlex
import tomllib
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from unittest.mock import patch

from pergrad.cli import main
from tests.starting import Started

__all__ = ["failure_of", "problem_of"]

ROOT = Path(__file__).parents[2]


def problem_of(command: str) -> str | None:
    """What is wrong with a command, or None.

    >>> problem_of("make test ARGS='-k conv'  # one family")
    >>> problem_of("make tea")
    'make tea: the Makefile has no target tea'
    """
    words = shlex.split(command, comments=True)
    if words[:3] == ["python", "-m", "pergrad"]:
        return _pergrad(command, words[3:])
    if words[:2] in ([".venv/bin/python", "-m"], ["python", "-m"]):
        return _module(command, words[2])
    look_up = {"make": _make, "pip": _pip, "python": _script, "pergrad": _pergrad, "cd": _nothing}
    if words[0] == "torchrun":  # what it runs is looked up
        return problem_of(shlex.join(["python", *words[words.index("-m") :]]))
    if words[0] not in look_up:
        return f"{command}: an unknown kind of command, one of {[*look_up]} is known"
    return look_up[words[0]](command, words[1:])


def _nothing(command: str, words: list[str]) -> None:
    return None


def _make(command: str, words: list[str]) -> str | None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    unknown = [word for word in words if "=" not in word and word not in targets]
    return f"{command}: the Makefile has no target {unknown[0]}" if unknown else None


def _pip(command: str, words: list[str]) -> str | None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if words == ["wheel", "--no-deps", "--wheel-dir", "dist", "."]:
        return None
    if words == ["install", f"dist/{project['name']}-*.whl"]:  # what that writes
        return None
    match = re.fullmatch(r"(\.|pergrad)(?:\[(.*)\])?", words[-1])
    if words[0] != "install" or match is None:
        return f"{command}: only `pip install .[extras]` is known"
    extras = (match[2] or "").split(",") if match[2] else []
    unknown = [extra for extra in extras if extra not in project["optional-dependencies"]]
    return f"{command}: pyproject.toml has no extra {unknown[0]}" if unknown else None


def _script(command: str, words: list[str]) -> str | None:
    return None if (ROOT / words[0]).is_file() else f"{command}: there is no {words[0]}"


def _module(command: str, name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"{command}: there is no module {name}"


def is_about_here(command: str) -> bool:
    """Whether it is `pergrad COMMAND module:name ...` of a module in the current folder."""
    words = shlex.split(command, comments=True)
    module = words[2].partition(":")[0] if len(words) > 2 else ""
    return words[0] == "pergrad" and Path(f"{module}.py").is_file()


def failure_of(command: str) -> str | None:
    """Runs a command of pergrad; what went wrong, or None."""
    module, *words = shlex.split(command, comments=True)
    process = Started(module, *words, cwd=Path.cwd())
    out, err = process.communicate()
    return f"{command}: {out}{err}" if process.returncode else None


@cache
def _help(*words: str) -> str:
    """What `pergrad WORDS --help` prints; empty where it fails."""
    printed = io.StringIO()
    wide = {"COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1"}
    with redirect_stdout(printed), patch.dict(os.environ, wide):
        try:
            main([*words, "--help"])
        except SystemExit as end:
            return "" if end.code else printed.getvalue()
    return printed.getvalue()


def _pergrad(command: str, words: list[str]) -> str | None:
    is_subcommand = bool(words) and not words[0].startswith("-")
    group = words[: 2 if words[:1] == ["index"] else 1]  # the commands of `pergrad index`
    text = _help(*group) if is_subcommand else _help()
    if not text:
        return f"{command}: `pergrad {' '.join(group)} --help` fails"
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    unknown = [o for o in options if not re.search(rf"{re.escape(o)}(?![\w-])", text)]
    return f"{command}: its help does not name {unknown}" if unknown else None
