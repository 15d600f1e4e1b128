"""Only a loop that nothing but the operation can end counts as a wait."""

from __future__ import annotations

import linecache
import textwrap

import pytest

from ddp_kit.trace.polling import find_polling_loop


def found(source, line=1):
    """Return which functions the loop around a line of this source calls; None: it does more."""
    source = textwrap.dedent(source)
    linecache.cache["<loop>"] = len(source), None, source.splitlines(True), "<loop>"
    try:
        loop = find_polling_loop("<loop>", line)
        return None if loop is None else loop.calls
    finally:
        del linecache.cache["<loop>"]


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("while not work.is_completed(): pass", set()),
        ("while not self.works[0].is_completed():\n    pass", set()),
        ("while not work.is_completed():\n    time.sleep(0.1)", {"time.sleep"}),
        ("while not work.is_completed():\n    sleep(pause)\n    tries += 1", {"sleep"}),
        ("while not work.is_completed():\n    print(f'try {n}', end='')\n    n = n + 1", {"print"}),
        ("while not (a.is_completed() and b.is_completed()): pass", set()),
        ("while not a.is_completed() or not b.is_completed(): pass", set()),
        ("while not all(w.is_completed() for w in works): pass", {"all"}),
        ("while any(not w.is_completed() for w in works):\n    'wait'", {"any"}),
        ("while not (\n    work.is_completed()\n):\n    continue", set()),
    ],
)
def test_a_loop_that_only_polls_is_found(source, calls):
    lines = source.count("\n") + 1
    assert all(found(source, line) == calls for line in range(1, lines + 1))
    assert found(source, lines + 1) is None


@pytest.mark.parametrize(
    "source",
    [
        "while work.is_completed(): pass",
        "while True: work.is_completed()",
        "while not work.is_completed() and tries < 3: tries += 1",
        "while not work.is_completed(): break",
        "while not work.is_completed(): tries += 1 / left",
        "while not work.is_completed(): step()",
        "while not work.is_completed(): time.sleep(step())",
        "while not work.is_completed(): pause -= 1; time.sleep(pause)",
        "while not work.is_completed(): time.sleep(-1)",
        "while not work.is_completed(): print('', end=1)",
        "while not work.is_completed(): tries += 'one'",
        "while not all(w.work.is_completed() for w in works): pass",
        "while not work.is_completed(): work = other",
        "while not works[i].is_completed(): i += 1",
        "while not work.is_completed(): works[0] = 1",
        "while not work.is_completed(): n += (yield)",
        "while not work.is_completed(): time = other; time.sleep(1)",
        "while not work.is_completed(0): pass",
        "while not pop().is_completed(): pass",
        "while not (a.is_completed() or b.is_completed()): pass",
        "while not a.is_completed() and not b.is_completed(): pass",
        "while not any(w.is_completed() for w in works): pass",
        "while not all(w.is_completed() for w in make()): pass",
        "while not all(w.is_completed() for w in works if w): pass",
        "while not work.is_completed(): pass\nelse: step()",
        "for work in works: work.is_completed()",
        "while not work.is_completed():\n    for w in works: pass",
        "if not work.is_completed(): pass",
        "",
    ],
)
def test_a_loop_that_may_end_otherwise_is_no_wait(source):
    assert found(f"def worker():\n{textwrap.indent(source, '    ')}", 2) is None


def test_the_outer_loop_counts_for_a_line_of_the_inner_one():
    source = """\
    while not work.is_completed():
        while step():
            pass
    """
    assert found(source, 3) is None
    assert found("while step():\n    while not work.is_completed():\n        pass", 3) == set()
