"""What a program of the suite is, and how a template becomes many programs.

The text of a program is the body of `worker(rank, world_size)`. A comment marks each line that is
at fault, with the ranks for which it is:

    if rank != 1:
        dist.barrier()  # fault: 0, 2; absent: 1

    fault      ranks for which the call on this line breaks a rule, or waits for ever because of it
    held up    ranks that do nothing wrong here, but take part, or cannot continue
    absent     ranks that should have made the call on this line, and never do

"all" stands for every rank. A fault that no single line shows, such as a wait that is missing, is
marked at the call that started it. If a rank starts an operation on one line and waits for it on
another, both are marked, and to show either is right.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Protocol

DEADLOCK = "deadlock"  # a rank waits for what can never come
MISMATCH = "mismatch"  # ranks make calls that belong together and do not agree
RAISED = "raised"  # PyTorch refuses a call; the error has to arrive, with its rank and line
UNAWAITED = "unawaited"  # an operation is started, and nothing ever waits for it
NONE = "none"  # nothing is wrong, and nothing must be reported
EXPECTED = (DEADLOCK, MISMATCH, RAISED, UNAWAITED, NONE)

HEADER = """\
import torch
import torch.distributed as dist


def worker(rank, world_size):
"""
_MARK = re.compile(r"(fault|held up|absent): (all|\d+(?:, \d+)*)")


@dataclass(frozen=True)
class Program:
    """One small program, and what a tool should say about it.

    wrong: what is wrong, or what is special about a right program, in a sentence.
    expected: one of EXPECTED.
    unseen: why nothing on the host can show the fault; "" if something can.
    seconds: that it takes by itself, if it is long.
    """

    name: str
    category: str
    wrong: str
    expected: str
    world_size: int
    body: str
    unseen: str = ""
    seconds: float = 0

    @property
    def is_right(self) -> bool:
        return self.expected == NONE

    @property
    def source(self) -> str:
        """The whole program: a module with the function `worker`."""
        return HEADER + textwrap.indent(self.body, "    ")

    @cached_property
    def marks(self) -> dict[str, dict[int, set[int]]]:
        """For "fault", "held up" and "absent": the lines of each rank."""
        found: dict[str, dict[int, set[int]]] = {"fault": {}, "held up": {}, "absent": {}}
        for number, line in enumerate(self.source.splitlines(), 1):
            _, _, comment = line.partition("# ")
            for kind, ranks in _MARK.findall(comment):
                listed = range(self.world_size) if ranks == "all" else map(int, ranks.split(","))
                for rank in listed:
                    found[kind].setdefault(rank, set()).add(number)
        return found

    def write(self, folder: Path) -> Path:
        """Write the program as a file of its own, so that its lines have true numbers."""
        file = folder / f"{self.name}.py"
        file.write_text(self.source, "utf-8")
        return file


class Row(Protocol):
    """A row of a table with which templates are filled, such as a call."""

    @property
    def fields(self) -> dict[str, str]:
        """What a template uses as $name, $call, ..."""


def program(
    name: str, category: str, wrong: str, expected: str, world_size: int, body: str, **more
) -> Program:
    """Return a program. body: the lines of its worker, indented as you like."""
    body = textwrap.dedent(body).strip("\n") + "\n"
    return Program(name, category, wrong, expected, world_size, body, **more)


def each(
    rows: Iterable[Row],
    name: str,
    category: str,
    wrong: str,
    expected: str,
    world_size: int,
    body: str,
    **more,
) -> Iterator[Program]:
    """Return one program for each row. name, wrong and body are templates of the row's fields."""
    body = textwrap.dedent(body).strip("\n") + "\n"
    for row in rows:
        fields = row.fields
        named, sentence = (Template(text).substitute(fields) for text in (name, wrong))
        yield Program(named, category, sentence, expected, world_size, fill(body, fields), **more)


def fill(body: str, fields: Mapping[str, str]) -> str:
    """Return a template's text with these fields; one of several lines is indented throughout."""
    lines = []
    for line in body.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += Template(line).substitute(fields).replace("\n", "\n" + indent).splitlines()
    return "\n".join(lines) + "\n"
