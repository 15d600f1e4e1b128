"""Loops that do nothing but ask whether operations are complete, found in their source.

    while not work.is_completed():
        time.sleep(0.1)

    while not all(work.is_completed() for work in works):
        tries += 1

Such a loop is a wait: it ends once the operations are complete, and nothing else ends it. A loop
that does more than poll, sleep, count and print a fixed text is left out, because that may end it
in another way.
"""

from __future__ import annotations

import ast
import linecache
import re

_TEST = re.compile(  # as ast.unparse writes it
    r"not (?:\w+\.is_completed\(\)"
    r"|all\(\(?(?P<each>\w+)\.is_completed\(\) for (?P=each) in \w+\)?\))"
)
_TEXT = r"'[^']*'"
_BODY = re.compile(
    r"pass|continue|\.\.\.|(time\.)?sleep\([\d.]+\)|\w+ \+= 1"
    rf"|print\(({_TEXT})?(, (end|sep)={_TEXT}|, flush=True)*\)"
)


def find_polling_loop(file: str, line: int) -> set[str] | None:
    """Return the names in the innermost loop around a line.

    None if there is no loop, or it does more than poll.
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
    test = loop and _TEST.fullmatch(ast.unparse(loop.test))
    if not loop or not test or loop.orelse:
        return None
    if not all(_BODY.fullmatch(ast.unparse(statement)) for statement in loop.body):
        return None
    return {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)} - {test["each"]}
