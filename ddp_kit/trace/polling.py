"""Loops that do nothing but ask whether operations are complete, found in their source.

    while not work.is_completed():
        time.sleep(0.1)

Such a loop is a wait: it ends once the operation is complete, and nothing else ends it. A loop
that may end in another way, or that calls anything else, is left out.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable
from dataclasses import dataclass, field

_LARGEST = 1e9  # print and sleep take all numbers up to this one
_PRINT = {"end": str, "sep": str, "flush": bool}  # keywords that cannot fail


@dataclass
class Loop:
    """What a loop that only polls uses. It is a wait if all of that is what it seems to be."""

    calls: set[str] = field(default_factory=set)  # functions, such as "all" or "time.sleep"
    works: list[ast.expr] = field(default_factory=list)  # such as `work` or `self.works[0]`
    collections: list[ast.expr] = field(default_factory=list)  # of works
    numbers: set[str] = field(default_factory=set)  # names that its body reads


def find_polling_loop(file: str, line: int) -> Loop | None:
    """Return the innermost loop around a line; None if there is none, or it does more than poll."""
    linecache.checkcache(file)
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # such as a cell with magics
        return None
    around = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.While) and node.lineno <= line <= (node.end_lineno or 0)
    )
    loop = max(around, key=lambda node: node.lineno, default=None)
    if loop is None or loop.orelse:
        return None
    found = Loop()
    if not _says(loop.test, False, found):
        return None
    changed = {name for statement in loop.body for name in _assigned(statement)}
    if not all(_is_harmless(statement, found, changed) for statement in loop.body):
        return None
    used = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
    used |= {call.partition(".")[0] for call in found.calls}
    return None if used & changed else found


def _says(test: ast.expr, complete: bool, found: Loop, element: str = "") -> bool:
    """Return whether a test is true only when all the operations in it are complete.

    complete: False if it is to be true as long as any of them is not. Only waits for all of several
    operations count: one that is open is enough to stay in the loop. element: the name of an
    element of a collection, if that is all it may ask.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _says(test.operand, not complete, found, element)
    if isinstance(test, ast.BoolOp) and not element:
        joined = isinstance(test.op, ast.And if complete else ast.Or)
        return joined and all(_says(value, complete, found) for value in test.values)
    if complete and isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute):
        work = test.func.value
        if test.func.attr != "is_completed" or test.args or test.keywords:
            return False
        if element:
            return isinstance(work, ast.Name) and work.id == element
        found.works.append(work)
        return _is_plain(work)
    made = None if element else _generated(test, "all" if complete else "any", found)
    return made is not None and _says(
        made.elt, complete, found, ast.unparse(made.generators[0].target)
    )


def _generated(test: ast.expr, function: str, found: Loop) -> ast.GeneratorExp | None:
    """Return the generator of a test such as `all(element for name in works)`."""
    if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and len(test.args) == 1):
        return None
    made = test.args[0]  # a list would ask all operations, not only as long as it must
    if test.func.id != function or test.keywords or not isinstance(made, ast.GeneratorExp):
        return None
    first, *more = made.generators
    if more or first.ifs or first.is_async or not isinstance(first.target, ast.Name):
        return None
    found.calls.add(function)
    found.collections.append(first.iter)
    return made if _is_plain(first.iter) else None


def _is_plain(value: ast.expr) -> bool:
    """Return whether an expression only names something: `work`, `self.work`, `works[0]`."""
    if isinstance(value, ast.Attribute):
        return _is_plain(value.value)
    if isinstance(value, ast.Subscript):
        return _is_plain(value.value) and isinstance(value.slice, (ast.Constant, ast.Name))
    return isinstance(value, ast.Name)


def _assigned(statement: ast.stmt) -> Iterable[str]:
    return (
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del))
    )


def _is_harmless(statement: ast.stmt, found: Loop, changed: set[str]) -> bool:
    """Return whether a statement goes on to the next one, each time that it is run."""
    if isinstance(statement, (ast.Pass, ast.Continue)):
        return True
    if isinstance(statement, ast.Assign):
        named = all(isinstance(target, ast.Name) for target in statement.targets)
        return named and _is_number(statement.value, found)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        name = ast.Name(statement.target.id)
        return _is_number(ast.BinOp(name, statement.op, statement.value), found)
    if not isinstance(statement, ast.Expr):
        return False
    called = statement.value
    if not isinstance(called, ast.Call):
        return isinstance(called, ast.Constant)
    name = ast.unparse(called.func)
    found.calls.add(name)
    if name == "print":
        given = ((each.arg or "", each.value) for each in called.keywords)
        return all(_is_printable(value, found) for value in called.args) and all(
            isinstance(value, ast.Constant) and type(value.value) is _PRINT.get(key)
            for key, value in given
        )
    # A time that changes may become negative, which ends the loop with an error.
    if name not in ("sleep", "time.sleep") or called.keywords or len(called.args) != 1:
        return False
    (pause,) = called.args
    steady = isinstance(pause, ast.Constant) or (
        isinstance(pause, ast.Name) and pause.id not in changed
    )
    return steady and _is_number(pause, found)


def _is_printable(value: ast.expr, found: Loop) -> bool:
    """Return whether an expression is text that no code of the learner's makes, or a number."""
    if isinstance(value, ast.JoinedStr):
        return all(_is_printable(part, found) for part in value.values)
    if isinstance(value, ast.FormattedValue):
        return value.format_spec is None and _is_printable(value.value, found)
    return isinstance(value, ast.Constant) or _is_number(value, found)


def _is_number(value: ast.expr, found: Loop) -> bool:
    """Return whether an expression is a number if the names in it are, and does not grow fast."""
    if isinstance(value, ast.BinOp):
        steps = isinstance(value.op, (ast.Add, ast.Sub)) and isinstance(value.right, ast.Constant)
        return steps and _is_number(value.left, found) and _is_number(value.right, found)
    if isinstance(value, ast.Name):
        found.numbers.add(value.id)
        return True
    return isinstance(value, ast.Constant) and is_plain_number(value.value)


def is_plain_number(value: object) -> bool:
    """Return whether a value is a number that can be counted up, printed and slept for."""
    return type(value) in (bool, int, float) and 0 <= value < _LARGEST  # type: ignore[operator]
