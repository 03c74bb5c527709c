"""Imports point down: the order is the one that ARCHITECTURE.md shows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pergrad"
MOST_MODULES = 15

Order = dict[str, int]  # from name to layer, the lowest 0


def order_in(text: str, title: str) -> Order:
    """Read a fenced block of that title: a layer a line, the top first, `|` between independent names."""
    (block,) = re.findall(rf"^```text {title}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    layers = [line.split("|") for line in reversed(block.strip().splitlines())]
    return {name.strip(): k for k, layer in enumerate(layers) for name in layer}


def name_of(path: Path, source: Path) -> tuple[str, ...]:
    """Name a module by its parts: `pergrad/engine/entry.py` is ("pergrad", "engine", "entry")."""
    parts = path.relative_to(source.parent).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imported_by(path: Path, source: Path) -> Iterator[tuple[str, ...]]:
    """Name the modules of the package that a module imports, wherever in it and for whatever reason."""
    package = name_of(path, source)
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = (*above, *(node.module or "").split("."))
            found = [module, *((*module, alias.name) for alias in node.names)]
            found = found[1:] if all(_is_module(name, source) for name in found[1:]) else found
        else:
            continue
        yield from (name for name in found if name[0] == source.name and _is_module(name, source))


def _is_module(name: tuple[str, ...], source: Path) -> bool:
    path = source.parent.joinpath(*name)
    return path.is_dir() or path.with_suffix(".py").is_file()


def edges_up(source: Path, room: tuple[str, ...], order: Order) -> list[str]:
    """List imports inside of a room, such as ("pergrad", "engine"), that do not point down."""
    found = []
    for path in sorted(source.parent.joinpath(*room).rglob("*.py")):
        name = name_of(path, source)
        own = name[len(room) : len(room) + 1]
        if own in [(), ("__main__",)]:
            continue  # above all of them
        for target in imported_by(path, source):
            if target[: len(room)] == room and _points_up(own[0], target, source, room, order):
                found.append(f"{'.'.join(name)} imports {'.'.join(target)}")
    return found


def _points_up(
    own: str, target: tuple[str, ...], source: Path, room: tuple[str, ...], order: Order
) -> bool:
    if target == room:  # by the room's own `__init__`: as high as what that brings in
        front = source.parent.joinpath(*room, "__init__.py")
        brought = [name for name in imported_by(front, source) if name[: len(room)] == room]
        return any(order[name[len(room)]] >= order[own] for name in brought)
    other = target[len(room)]
    return other != own and order[other] >= order[own]


@pytest.fixture(scope="module")
def architecture() -> str:
    return (ROOT / "ARCHITECTURE.md").read_text()


ROOMS = {"layers": ("pergrad",)} | {
    f"rooms of {name}": ("pergrad", name) for name in ("engine", "audit")
}


@pytest.mark.parametrize("title", ROOMS)
def test_imports_point_down(title: str, architecture: str) -> None:
    assert edges_up(SOURCE, ROOMS[title], order_in(architecture, title)) == []


@pytest.mark.parametrize("title", ROOMS)
def test_the_order_names_all_that_is_there_and_nothing_else(title: str, architecture: str) -> None:
    folder = SOURCE.parent.joinpath(*ROOMS[title])
    there = {path.relative_to(folder).parts[0] for path in folder.rglob("*.py")}
    there = {name.removesuffix(".py") for name in there} - {"__init__", "__main__"}
    assert order_in(architecture, title).keys() == there


@pytest.mark.parametrize(
    "line",
    [
        "from pergrad.high import a",
        "from pergrad import high",
        "import pergrad.high.inner",
        "from pergrad.high.inner import a",
        "if TYPE_CHECKING:\n    from pergrad.high import a",
        "def f():\n    from pergrad.high import a",
        "from .high import a",
        "import pergrad",
        "from pergrad import name",
        "from pergrad.beside import a",
    ],
)
def test_an_import_that_points_up_is_found(line: str, tmp_path: Path) -> None:
    order = order_in("```text layers\nhigh\nlow | beside\nlowest\n```\n", "layers")
    source = tmp_path / "pergrad"
    for name in ("__init__", "high/__init__", "high/inner", "beside", "lowest"):
        path = source / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (source / "__init__.py").write_text("from pergrad.high import name")
    (source / "low.py").write_text("import torch\nfrom pergrad import lowest\n")
    assert edges_up(source, ("pergrad",), order) == []
    (source / "low.py").write_text(line)
    assert len(edges_up(source, ("pergrad",), order)) == 1


def test_no_folder_has_more_modules_than_a_reader_can_hold() -> None:
    folders = [SOURCE, *(path for path in SOURCE.rglob("*") if path.is_dir())]
    counts = {
        str(f.relative_to(SOURCE)): len({*f.glob("*.py")} - {f / "__init__.py"}) for f in folders
    }
    assert {name: count for name, count in counts.items() if count > MOST_MODULES} == {}


def test_each_module_of_the_engine_has_a_test_module_of_its_name() -> None:
    engine, tests = SOURCE / "engine", ROOT / "tests" / "engine"
    modules = [path for path in engine.rglob("*.py") if path.name != "__init__.py"]
    missing = {
        path.relative_to(engine).with_suffix("").as_posix()
        for path in modules
        if not (tests / path.relative_to(engine).with_name(f"test_{path.name}")).is_file()
    }
    assert not missing
