"""What ranks did in a run that failed: as plain data, and as lines to read."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Frame:
    """One line of one rank's traceback."""

    file: str  # a path, or the name that IPython gave a cell
    line: int
    function: str
    source: str  # the line itself, stripped; "" when it cannot be read
    own: bool  # in the learner's code: not in a library, not in the kit

    def __str__(self) -> str:
        return f"line {self.line} of {self.function}: {self.source}".rstrip(": ")


@dataclass(frozen=True)
class RankFailure:
    """What one rank raised, and where."""

    rank: int
    type: str  # the exception's class name
    message: str  # str(exception)
    frames: tuple[Frame, ...] = field(default=(), repr=False)

    @property
    def where(self) -> Frame | None:
        """The innermost line of the learner's own code; None if it has no part in this."""
        return next((frame for frame in reversed(self.frames) if frame.own), None)

    @property
    def story(self) -> tuple:
        """What two ranks share when they failed in the same way at the same line."""
        where = self.where
        return self.type, self.message, where and (where.file, where.line)

    def __str__(self) -> str:
        said = f"{self.type}: {self.message}" if self.message else self.type
        where = self.where
        if where is None:
            return said
        return f"{said}\n    {where}"


@dataclass(frozen=True)
class Wait:
    """Where a rank was when its run was ended without it."""

    rank: int
    op: str | None  # as it was called: "recv(src=1)"; None: it was in no call that the kit knows
    where: Frame | None = None  # the line of the learner's own code


def name_ranks(ranks: Iterable[int]) -> str:
    """Write ranks as words: "rank 2", "ranks 0 and 1", "ranks 0, 1 and 3"."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def tell_waits(waits: Iterable[Wait], cell_names: dict[str, str] | None = None) -> list[str]:
    """Say in lines what each rank waited in; equal waits once.

    cell_names: what the notebook calls the files of its cells, to name the cell of each line;
        None leaves files out, for a text that is the same on every run.
    """
    groups: dict[tuple, list[Wait]] = {}
    for wait in sorted(waits, key=lambda wait: wait.rank):
        groups.setdefault((wait.where, wait.op), []).append(wait)
    lines, told = [], list(groups.values())
    for group, following in zip(told, [*told[1:], None], strict=False):
        was = "was" if len(group) == 1 else "were"
        did = f"{was} waiting in {group[0].op}" if group[0].op else "had not returned"
        lines.append(f"{name_ranks(wait.rank for wait in group)} {did}")
        where = group[0].where
        if where is None or (following and following[0].where == where):
            continue  # one line of code, told below the last rank that stands there
        lines += [f"    {where}"] if cell_names is None else _point_at(where, cell_names)
    return lines


def tell_returned(ranks: Iterable[int]) -> list[str]:
    """Say in a line which ranks had returned, if any had: nobody can wait for them."""
    ranks = list(ranks)
    return [f"{name_ranks(ranks)} had returned"] if ranks else []


def _point_at(frame: Frame, cell_names: dict[str, str]) -> list[str]:
    place = cell_names.get(frame.file, frame.file)
    said = f"  {place}, line {frame.line}, in {frame.function}"
    return [said, textwrap.indent(frame.source, "    ")]


def tell_failures(
    failures: Iterable[RankFailure], cell_names: dict[str, str] | None = None
) -> list[str]:
    """Say in lines what ranks raised, and where; equal failures once. cell_names: as above."""
    stories: dict[tuple, list[RankFailure]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        stories.setdefault(failure.story, []).append(failure)
    lines = []
    for story in stories.values():
        first, who = story[0], name_ranks(failure.rank for failure in story)
        if cell_names is None:
            lines += f"{who} raised {first}".split("\n")
            continue
        said = f"{first.type}: {first.message}" if first.message else first.type
        lines.append(f"{who} raised {said}")
        own = (frame for frame in first.frames if frame.own)
        for frame, same in itertools.groupby(own):
            lines += _point_at(frame, cell_names)
            again = len(list(same)) - 1
            if again:
                lines.append(f"    ... and {again:,} more times from there")
        lines.append("")
    return lines
