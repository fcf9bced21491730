"""Mutants of a Python module: copies that differ from the module in one place.

A mutant changes an operator, a comparison, a number or a truth value; removes a statement or a keyword argument;
negates a condition; or swaps two arguments or the branches of a conditional. Messages, annotations and logging are left
alone.
"""

from __future__ import annotations

import ast
import copy
import difflib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
             ast.Mod: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And,
             ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
             ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}  # fmt: skip
UNTOUCHED = (ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """One change of a module.

    Attributes:
        number: line number of the changed place.
        line: the changed lines of the module as :func:`ast.unparse` writes them, stripped.
        mutation: the lines in their place.
        tree: the changed module.
    """

    number: int
    line: str
    mutation: str
    tree: ast.Module

    @property
    def key(self) -> tuple[int, str, str]:
        """Tells the mutants of a module apart."""
        return self.number, self.line, self.mutation


def mutants(source: str, size: int, generator: random.Random) -> Iterator[Mutant]:
    """``size`` mutants of the module in a random order, or all if there are fewer; a larger draw begins with these."""
    tree = ast.parse(source)
    before = ast.unparse(tree).splitlines()
    places = list(range(sum(1 for _ in _changes(tree))))
    generator.shuffle(places)
    for place in places:
        if size == 0:
            return
        changed = copy.deepcopy(tree)
        number, change = next(itertools.islice(_changes(changed), place, None))
        change()
        after = ast.unparse(ast.fix_missing_locations(changed)).splitlines()
        diff = [text for text in difflib.unified_diff(before, after, n=0, lineterm="")][2:]
        line, mutation = (" ".join(text[1:].strip() for text in diff if text[0] == sign) for sign in "-+")
        if diff:  # two equal arguments, for instance, can be swapped without a difference
            size -= 1
            yield Mutant(number, line, mutation, changed)


def _changes(tree: ast.AST) -> Iterator[tuple[int, Callable[[], None]]]:
    """(line, function that makes the change) for each possible change below ``tree``."""
    for node in _nodes(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in OPERATORS:
            yield line, _setter(node, "op", OPERATORS[type(node.op)]())
        elif isinstance(node, ast.Compare):
            for place, operator in enumerate(node.ops):
                if type(operator) in OPERATORS:
                    yield line, _setter(node.ops, place, OPERATORS[type(operator)]())
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield line, _setter(node, "value", not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            yield line, _setter(node, "value", node.value + 1)
        elif isinstance(node, ast.IfExp):
            yield line, lambda node=node: node.__dict__.update(body=node.orelse, orelse=node.body)
        elif isinstance(node, (ast.If, ast.While)):
            yield line, _setter(node, "test", ast.UnaryOp(ast.Not(), node.test))
        elif isinstance(node, ast.Call):
            if len(node.args) > 1 and not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
                yield line, _setter(node, "args", [node.args[1], node.args[0], *node.args[2:]])
            for place in range(len(node.keywords)):
                yield line, _setter(node, "keywords", node.keywords[:place] + node.keywords[place + 1 :])
        for name in ("body", "orelse"):
            statements = getattr(node, name, None)
            for place, statement in enumerate(statements if isinstance(statements, list) else ()):
                if _can_go(statement):
                    yield statement.lineno, _setter(statements, place, ast.Pass())


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those below it, without annotations, decorators, messages and logging."""
    if isinstance(node, UNTOUCHED) or _is_logging(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "type_comment"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def _can_go(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and not _is_logging(statement)
    return isinstance(statement, (ast.AugAssign, ast.Raise, ast.Continue, ast.Delete)) or (
        isinstance(statement, ast.Assign) and any(isinstance(target, ast.Attribute) for target in statement.targets)
    )


def _is_logging(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(("logger.", "warnings."))


def _setter(owner: object, key: str | int, value: object) -> Callable[[], None]:
    if isinstance(owner, list):
        return lambda: owner.__setitem__(key, value)
    return lambda: setattr(owner, key, value)
