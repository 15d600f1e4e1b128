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

_Names = set[str]


def calls_of_polling_loop(file: str, line: int) -> frozenset[str] | None:
    """Return the functions that the loop around a line calls, such as {"all", "time.sleep"}.

    They are harmless if they are what their names say. None: no loop is around the line, or the
    innermost one does more than poll.
    """
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
    calls: _Names = set()
    if not _is_open(loop.test, calls):
        return None
    changed = {name for statement in loop.body for name in _assigned(statement)}
    if not all(_is_harmless(statement, calls, changed) for statement in loop.body):
        return None
    used = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
    used |= {call.partition(".")[0] for call in calls}
    return None if used & changed else frozenset(calls)


# Only waits for all of several operations count: one that is open is enough to stay in the loop.


def _is_open(test: ast.expr, calls: _Names) -> bool:
    """Return whether a test is true as long as any of the operations in it is not complete."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_complete(test.operand, calls)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return all(_is_open(value, calls) for value in test.values)
    element = _element(test, "any", calls)
    return element is not None and _is_open(element, calls)


def _is_complete(test: ast.expr, calls: _Names) -> bool:
    """Return whether a test is true only when all the operations in it are complete."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_open(test.operand, calls)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(_is_complete(value, calls) for value in test.values)
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute):
        plain = _is_plain(test.func.value) and not test.args and not test.keywords
        return plain and test.func.attr == "is_completed"
    element = _element(test, "all", calls)
    return element is not None and _is_complete(element, calls)


def _element(test: ast.expr, function: str, calls: _Names) -> ast.expr | None:
    """Return `element` of a test such as `all(element for name in works)`."""
    if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and len(test.args) == 1):
        return None
    made = test.args[0]  # a list would ask all operations, not only as long as it must
    if test.func.id != function or test.keywords or not isinstance(made, ast.GeneratorExp):
        return None
    first, *others = made.generators
    if others or first.ifs or first.is_async or not isinstance(first.target, ast.Name):
        return None
    calls.add(function)
    return made.elt if _is_plain(first.iter) else None


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


def _is_harmless(statement: ast.stmt, calls: _Names, changed: _Names) -> bool:
    """Return whether a statement goes on to the next one, each time that it is run."""
    if isinstance(statement, (ast.Pass, ast.Continue)):
        return True
    if isinstance(statement, ast.Assign):
        named = all(isinstance(target, ast.Name) for target in statement.targets)
        return named and _is_simple(statement.value)
    if isinstance(statement, ast.AugAssign):
        adds = isinstance(statement.op, (ast.Add, ast.Sub))
        return adds and isinstance(statement.target, ast.Name) and _is_simple(statement.value)
    if not isinstance(statement, ast.Expr):
        return False
    called = statement.value
    if not isinstance(called, ast.Call):
        return isinstance(called, ast.Constant)
    name = ast.unparse(called.func)
    calls.add(name)
    values = [*called.args, *(keyword.value for keyword in called.keywords)]
    if name == "print":
        return all(map(_is_simple, values))
    # A time that changes may become negative, which ends the loop with an error.
    steady = all(
        isinstance(value, ast.Constant) or (isinstance(value, ast.Name) and value.id not in changed)
        for value in values
    )
    return name in ("sleep", "time.sleep") and steady


def _is_simple(value: ast.expr) -> bool:
    """Return whether an expression calls nothing and does not begin to fail at some time."""
    if isinstance(value, ast.BinOp):
        simple = isinstance(value.op, (ast.Add, ast.Sub))
        return simple and _is_simple(value.left) and _is_simple(value.right)
    if isinstance(value, ast.JoinedStr):
        return all(map(_is_simple, value.values))
    if isinstance(value, ast.FormattedValue):
        return value.format_spec is None and _is_simple(value.value)
    return isinstance(value, (ast.Constant, ast.Name))
