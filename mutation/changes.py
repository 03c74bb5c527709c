"""Makes small changes of Python source, one expression or statement at a time."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

__all__ = ["Mutation", "choose", "mutations_of"]

# Keywords that check or bound something and change no result, such as a strict zip or a cache's size.
_DECLARATIONS = frozenset("strict frozen slots maxsize init repr eq".split())
# Functions for type checkers only.
_OF_TYPES = frozenset("cast TypeVar ParamSpec NewType".split())

_ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.Div(),
    ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(),
    ast.Mod: ast.FloorDiv(),
    ast.Pow: ast.Mult(),
    ast.MatMult: ast.Mult(),
    ast.BitAnd: ast.BitOr(),
    ast.BitOr: ast.BitAnd(),
    ast.BitXor: ast.BitAnd(),
    ast.LShift: ast.RShift(),
    ast.RShift: ast.LShift(),
}
_COMPARISONS: dict[type[ast.cmpop], Sequence[ast.cmpop]] = {
    ast.Eq: [ast.NotEq()],
    ast.NotEq: [ast.Eq()],
    ast.Lt: [ast.LtE(), ast.GtE()],
    ast.LtE: [ast.Lt(), ast.Gt()],
    ast.Gt: [ast.GtE(), ast.LtE()],
    ast.GtE: [ast.Gt(), ast.Lt()],
    ast.Is: [ast.IsNot()],
    ast.IsNot: [ast.Is()],
    ast.In: [ast.NotIn()],
    ast.NotIn: [ast.In()],
}


@dataclass(frozen=True)
class Mutation:
    """Describes a change of one place in a file, and the lines that a test must run to notice it."""

    path: str
    line: int
    kind: str
    before: str  # the changed lines, joined
    witnesses: frozenset[int]  # a test must run one of these lines
    names: frozenset[str]  # bound when the module is imported: their uses are witnesses too
    module: Module = field(repr=False, compare=False)
    node: ast.stmt | ast.expr = field(repr=False, compare=False)
    new: ast.AST = field(repr=False, compare=False)

    @cached_property
    def source(self) -> str | None:
        """Returns the changed file; None if the change cannot be written or changes nothing."""
        return self.module.replaced(self.node, self.new)

    @property
    def after(self) -> str:
        """Returns the lines after the change, joined."""
        assert self.source is not None
        return self.module.lines_of(self.node, self.source)

    @property
    def key(self) -> tuple[str, str, str]:
        """Returns the file, the lines before and the lines after, as in `accepted.toml`."""
        return self.path, self.before, self.after


def choose(mutations: Sequence[Mutation], count: int, seed: int) -> list[Mutation]:
    """Chooses `count` lines at random, and one change of each."""
    lines: dict[tuple[str, int], list[Mutation]] = {}
    for mutation in mutations:
        lines.setdefault((mutation.path, mutation.line), []).append(mutation)
    draw = random.Random(seed)
    order = sorted(lines)
    draw.shuffle(order)
    chosen: list[Mutation] = []
    for line in order:
        own = lines[line]
        draw.shuffle(own)
        chosen += [m for m in own if m.source is not None][:1] if len(chosen) < count else []
    return chosen


def mutations_of(root: Path, path: Path) -> list[Mutation]:
    """Lists all changes of a file; `source` is None for those that give equal or invalid code."""
    module = Module(path.read_text())
    return [*_Changes(path.relative_to(root).as_posix(), module).found()]


class Module:
    """Holds a module's source and tree, and replaces nodes of it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.tree = ast.parse(source)
        self._begins = [0]  # bytes before each line
        for line in source.encode().splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))

    def replaced(self, node: ast.stmt | ast.expr, new: ast.AST) -> str | None:
        """Returns the source with `new` instead of `node`, in parentheses if it needs them."""
        data = self.source.encode()
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._begins[node.lineno - 1] + node.col_offset
        end = self._begins[node.end_lineno - 1] + node.end_col_offset
        wanted = ast.dump(_with(self.tree, node, new))
        if wanted == ast.dump(self.tree):
            return None
        text = ast.unparse(new)
        for written in (text, f"({text})"):
            source = (data[:start] + written.encode() + data[end:]).decode()
            try:
                if ast.dump(ast.parse(source)) == wanted:
                    return source
            except SyntaxError:
                continue
        return None

    def lines_of(self, node: ast.stmt | ast.expr, source: str) -> str:
        """Joins the lines of a node, or the corresponding lines of a changed source."""
        end = (node.end_lineno or node.lineno) - len(self.source.splitlines())
        lines = source.splitlines()[node.lineno - 1 : end or None]
        return " ".join(line.strip() for line in lines)


class _Changes:
    """Walks through a module, keeping the statement and definitions around each expression."""

    def __init__(self, path: str, module: Module) -> None:
        self._path = path
        self._module = module

    def found(self) -> Iterator[Mutation]:
        for statement in self._module.tree.body:
            yield from self._in_statement(statement, [])

    # -- where

    def _in_statement(self, node: ast.stmt, around: list[ast.AST]) -> Iterator[Mutation]:
        if _is_left_alone(node):
            return
        for kind, new in _changed_statements(node, around):
            yield from self._mutation(kind, node, new, node, around)
        if isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare):
            yield from self._mutation("condition", node.test, _not(node.test), node, around)
        inner = [*around, node]
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_comment", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt):
                    yield from self._in_statement(child, inner)
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    for own in child.body:
                        yield from self._in_statement(own, inner)
                elif isinstance(child, ast.arguments):
                    for default in [*child.defaults, *child.kw_defaults]:
                        if default is not None:
                            yield from self._in_expression(default, node, around)
                elif isinstance(child, ast.withitem):
                    yield from self._in_expression(child.context_expr, node, around)
                elif isinstance(child, ast.expr):
                    yield from self._in_expression(child, node, around)

    def _in_expression(
        self, node: ast.expr, statement: ast.stmt, around: list[ast.AST]
    ) -> Iterator[Mutation]:
        if isinstance(node, ast.Call) and _name(node.func) in _OF_TYPES:
            return
        for kind, new in _changed_expressions(node):
            yield from self._mutation(kind, node, new, statement, around)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.keyword):
                if child.arg not in _DECLARATIONS:
                    yield from self._in_expression(child.value, statement, around)
            elif isinstance(child, ast.comprehension):
                for part in (child.iter, *child.ifs):
                    yield from self._in_expression(part, statement, around)
            elif isinstance(child, ast.arguments):
                for default in [*child.defaults, *child.kw_defaults]:
                    if default is not None:
                        yield from self._in_expression(default, statement, around)
            elif isinstance(child, ast.expr) and not isinstance(child, ast.JoinedStr):
                yield from self._in_expression(child, statement, around)

    # -- what

    def _mutation(
        self,
        kind: str,
        node: ast.stmt | ast.expr,
        new: ast.AST,
        statement: ast.stmt,
        around: list[ast.AST],
    ) -> Iterator[Mutation]:
        yield Mutation(
            self._path,
            node.lineno,
            kind,
            self._module.lines_of(node, self._module.source),
            *_witnesses(statement, around),
            self._module,
            node,
            new,
        )


class _Exchange(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self._old:
            return self._new
        found: ast.AST = self.generic_visit(node)
        return found


def _with(tree: ast.Module, old: ast.AST, new: ast.AST) -> ast.AST:
    """Returns a copy of the tree with one node replaced."""
    memo: dict[int, object] = {}
    copied = copy.deepcopy(tree, memo)
    place = memo[id(old)]
    assert isinstance(place, ast.AST)
    return _Exchange(place, new).visit(copied)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _is_left_alone(node: ast.stmt) -> bool:
    """Whether a statement computes nothing: imports, docstrings, types, lists of names, assertions."""
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.Pass | ast.Delete):
        return True
    if isinstance(node, ast.Global | ast.Nonlocal | ast.Continue | ast.Break):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        return _name(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.AnnAssign):
        return node.value is None or _name(node.annotation) == "TypeAlias"
    if isinstance(node, ast.Assign):
        return any(_name(target) in ("__all__", "__slots__") for target in node.targets)
    return False


def _changed_statements(node: ast.stmt, around: list[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    in_function = any(isinstance(a, ast.FunctionDef | ast.AsyncFunctionDef) for a in around)
    if isinstance(node, ast.Raise) or (
        in_function and isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign)
    ):
        yield "statement left out", ast.Pass()
    if isinstance(node, ast.Return):
        if node.value is None:
            yield "statement left out", ast.Pass()
        else:  # `return None` would change nothing
            yield "returns None", ast.Return(ast.Constant(None))
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        yield "arithmetic", ast.AugAssign(node.target, _ARITHMETIC[type(node.op)], node.value)


def _changed_expressions(node: ast.expr) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare():
            for k, op in enumerate(node.ops):
                for other in _COMPARISONS[type(op)]:
                    ops = [*node.ops[:k], other, *node.ops[k + 1 :]]
                    yield "comparison", ast.Compare(node.left, ops, node.comparators)
        case ast.BinOp(op=op) if type(op) in _ARITHMETIC and not _is_of_types(node):
            yield "arithmetic", ast.BinOp(node.left, _ARITHMETIC[type(op)], node.right)
        case ast.BoolOp():
            other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and/or", ast.BoolOp(other_op, node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "negation left out", node.operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
            yield "constant", _number(value - 1)
        case ast.IfExp():
            yield "condition", ast.IfExp(_not(node.test), node.body, node.orelse)
        case ast.Call():
            for k, keyword in enumerate(node.keywords):
                if keyword.arg is not None and keyword.arg not in _DECLARATIONS:
                    rest = [*node.keywords[:k], *node.keywords[k + 1 :]]
                    yield "argument left out", ast.Call(node.func, node.args, rest)
        case ast.Slice():
            if node.lower is not None:
                yield "slice", ast.Slice(None, node.upper, node.step)
            if node.upper is not None:
                yield "slice", ast.Slice(node.lower, None, node.step)
        case ast.ListComp(generators=generators) | ast.GeneratorExp(generators=generators):
            for k, own in enumerate(generators):
                if own.ifs:
                    all_of = ast.comprehension(own.target, own.iter, [], own.is_async)
                    others = [*generators[:k], all_of, *generators[k + 1 :]]
                    yield "condition left out", type(node)(node.elt, others)
        case _:
            pass


def _number(value: int | float) -> ast.expr:
    return ast.UnaryOp(ast.USub(), ast.Constant(-value)) if value < 0 else ast.Constant(value)


def _not(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    return ast.UnaryOp(ast.Not(), node)


def _is_of_types(node: ast.BinOp) -> bool:
    """Whether `a | b` is a union of types, as the second argument of isinstance may be."""
    if not isinstance(node.op, ast.BitOr):
        return False
    parts = [node.left, node.right]
    return any(_is_of_types(p) if isinstance(p, ast.BinOp) else _is_type(p) for p in parts)


def _is_type(node: ast.expr) -> bool:
    name = _name(node.value) if isinstance(node, ast.Subscript) else _name(node)
    return name[:1].isupper() or name in ("int", "float", "bool", "str", "list", "tuple", "dict")


def _witnesses(statement: ast.stmt, around: list[ast.AST]) -> tuple[frozenset[int], frozenset[str]]:
    """Returns the lines that a test must run to notice a change, and names whose uses count too."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        # a decorator or a default: tests that run the body can notice it
        return _lines(statement.body), frozenset([statement.name])
    for outer in reversed(around):
        if isinstance(outer, ast.FunctionDef):
            return _own_lines(statement), frozenset()
        if isinstance(outer, ast.ClassDef):
            return _lines(outer.body), frozenset([outer.name])
    names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and _is_bound(n)}
    return frozenset(), frozenset(names)


def _is_bound(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _own_lines(statement: ast.stmt) -> frozenset[int]:
    """Returns the lines of a statement without its body."""
    body = getattr(statement, "body", None)
    end = body[0].lineno - 1 if body else statement.end_lineno
    return frozenset(range(statement.lineno, max(end or 0, statement.lineno) + 1))


def _lines(body: Sequence[ast.stmt]) -> frozenset[int]:
    return frozenset(range(body[0].lineno, (body[-1].end_lineno or body[-1].lineno) + 1))
