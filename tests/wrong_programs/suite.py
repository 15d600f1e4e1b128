"""All programs of the suite, and what a program is.

A file in `programs/` has a section for each category. A program begins with its name and what to
expect of it, then comes a sentence, and then, indented, the body of `worker(rank, world_size)`:

    # stores and barriers

    barrier_skipped_by_rank_1: deadlock, 3 ranks
    Rank 1 never comes to the barrier.
        if rank != 1:
            dist.barrier()  # fault: 0, 2; absent: 1

The comment marks a line that is at fault, with the ranks for which it is:

    fault      ranks for which the call on this line breaks a rule, or waits for ever because of it
    held up    ranks that do nothing wrong here, but take part, or cannot continue
    absent     ranks that should have made the call on this line, and never do

"all" stands for every rank. A fault that no single line shows, such as a wait that is missing, is
marked at the call that started it. If a rank starts an operation on one line and waits for it on
another, both are marked, and to show either is right.

"2 s" after the ranks is the time that the program takes by itself, if it is long. A line "unseen:"
gives the reason why nothing on the host can show the fault, and a line "otherwise on shm:" why the
program does something else on the kit's backend shm. "each of ALL" makes the program a
template, which is filled with every row of a table in `calls.py`. The indented lines below a
category are what its programs have in common; $body stands there for what is their own.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from string import Template

import calls

DEADLOCK = "deadlock"  # a rank waits for what can never come
MISMATCH = "mismatch"  # ranks make calls that belong together and do not agree
RAISED = "raised"  # PyTorch refuses a call; the error has to arrive, with its rank and line
UNAWAITED = "unawaited"  # an operation is started, and nothing ever waits for it
NONE = "none"  # nothing is wrong, and nothing must be reported

HEADER = """\
import torch
import torch.distributed as dist


def worker(rank, world_size):
"""
_MARK = re.compile(r"(fault|held up|absent): (all|\d+(?:, \d+)*)")
_TITLE = re.compile(
    rf"(\S+): ({DEADLOCK}|{MISMATCH}|{RAISED}|{UNAWAITED}|{NONE}), (\d+) ranks"
    r"(?:, (\d+) s)?(?:, each of (.+))?"
)


@dataclass(frozen=True)
class Program:
    """One small program, and what a tool should say about it.

    wrong: what is wrong, or what is special about a right program, in a sentence.
    """

    name: str
    category: str
    wrong: str
    expected: str
    world_size: int
    body: str
    seconds: float = 0
    unseen: str = ""
    otherwise_on_shm: str = ""

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


def read(text: str) -> Iterator[Program]:
    """Return the programs of a file."""
    is_indented = [(line[:1] in ("", " "), line) for line in text.splitlines()]
    parts = ([line for _, line in part] for _, part in groupby(is_indented, lambda pair: pair[0]))
    for head, indented in zip(parts, parts, strict=True):
        own = textwrap.dedent("\n".join(indented)).strip("\n") + "\n"
        if head[0].startswith("# "):
            category, shared = head[0][2:], own.strip() or "$body"
            continue
        title, sentence, *notes = head
        reasons = dict(note.split(": ", 1) for note in notes)
        name, expected, size, seconds, rows = _TITLE.fullmatch(title).groups()
        for row in eval(rows, dict(vars(calls))) if rows else [{}]:
            named = fill(name, row)
            yield Program(
                named,
                category,
                fill(sentence, row),
                expected,
                int(size),
                fill(shared, {"program": named, "body": fill(own, row)}) + "\n",
                int(seconds or 0),
                reasons.get("unseen", ""),
                reasons.get("otherwise on shm", ""),
            )


def fill(template: str, fields: Mapping[str, str]) -> str:
    """Return a text with these fields; one of several lines is indented throughout."""
    lines = []
    for line in template.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += Template(line).substitute(fields).replace("\n", "\n" + indent).split("\n")
    return "\n".join(line.rstrip() for line in lines)


FILES = """
    collectives point_to_point peers_and_sources waits waits_and_batches groups arguments objects
    stores_and_barriers data_parallel meshes fsdp_and_pipelines right_collectives right_messages
    right_meshes right_slow right_others right_waits right_polls right_threads
"""
PROGRAMS = [
    program
    for name in FILES.split()
    for program in read((Path(__file__).parent / "programs" / f"{name}.txt").read_text("utf-8"))
]


def programs_for(backend: str) -> list[Program]:
    """Return the programs whose expected answer holds for a backend, "gloo" or "shm"."""
    return [one for one in PROGRAMS if backend != "shm" or not one.otherwise_on_shm]


def tenth() -> list[Program]:
    """Return every tenth program, in the order of right and wrong and of the categories."""
    categories = list(dict.fromkeys(program.category for program in PROGRAMS))
    return sorted(PROGRAMS, key=lambda one: (one.is_right, categories.index(one.category)))[::10]
