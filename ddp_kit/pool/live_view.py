"""What a learner sees of a run: a live view, which leaves nothing behind, and the ranks' prints."""

from __future__ import annotations

import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from ddp_kit import settings
from ddp_kit.error_text import count
from ddp_kit.errors import DeadlockError
from ddp_kit.pool.wire.messages import Bundle

# Sequences that set colours, move the cursor or name a window: "\x1b[31m", "\x1b]0;title\x07".
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b]*(\x07|\x1b\\)?|[ -/]*[0-~]?)")
_DROPPED = re.compile(r"^\.\.\. ([\d,]+ bytes) left out: ", re.MULTILINE)  # the line of KeptOutput


# What a rank does before it calls the worker. A launcher's program adds "starting under mpiexec".
STARTING = ("starting", "importing torch", "forming the group", "ready")


class RankLine(NamedTuple):
    """What one rank is doing at one moment of a run."""

    # One of STARTING, "computing", "waiting in recv(src=1)", "done", "raised" or "ended".
    doing: str
    seconds: float | None = None  # for how long: a wait to a tenth; None: less than a moment
    progress: tuple[int, int | None] | None = None  # of a loop: steps done, and total if known
    newest: str = ""  # the label of its bar, or the last line that it printed

    def __str__(self) -> str:
        return self.doing if self.seconds is None else f"{self.doing} {self.seconds:,} s"


class LiveView:
    """Shows what each rank does while a run lasts; this one shows nothing."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._opened = time.monotonic()

    def update(self, lines: Sequence[RankLine]) -> None:
        """Show what each rank is doing; called at most ten times a second."""

    def close(self) -> None:
        """Remove what `update` has shown."""


def heading(world_size: int, lines: Sequence[RankLine], seconds: int = 0) -> str:
    """Return a heading for all ranks, such as "4 ranks at work, 12 s".

    lines: of the ranks on this host. seconds: since the run began.
    """
    starting = all(line.doing.startswith(STARTING) for line in lines)
    are = "are" if world_size > 1 else "is"
    parts = [f"{count(world_size, 'rank')} {f'{are} starting' if starting else 'at work'}"]
    if elsewhere := world_size - len(lines):
        parts.append(f"{elsewhere:,} on other hosts")
    return ", ".join([*parts, *([f"{seconds:,} s"] if seconds else [])])


def as_seen(line: str) -> str:
    """Return what a terminal would show of a line: the text after its last carriage return."""
    return line.rstrip("\r").rsplit("\r", 1)[-1]


def newest_line(printed: bytes) -> str:
    """Return the beginning of the last line that is not blank, without control characters."""
    lines = printed.decode("utf-8", errors="replace").split("\n")
    shown = (_ESCAPE.sub("", as_seen(line)).strip() for line in reversed(lines))
    text = next(filter(None, shown), "")[: settings.LIVE_LINE_SHOWN]
    return "".join(char if char.isprintable() else " " for char in text).strip()


class TerminalView(LiveView):
    """One line on the terminal that is overwritten; silent if stderr is not a terminal."""

    _shown = ""

    def update(self, lines: Sequence[RankLine]) -> None:
        if not _on_terminal():
            return
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        seconds = int(time.monotonic() - self._opened)
        line = f"{f'{seconds:,} s  ' if seconds else ''}{self._in_one(lines)}"
        line = _cut(line, columns - 1)  # a full line would wrap
        if line != self._shown:
            self._shown = line
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()

    def _in_one(self, lines: Sequence[RankLine]) -> str:
        """Return how far the slowest rank is, or who waits, or what was printed last."""
        loops = [(line.progress, rank) for rank, line in enumerate(lines) if line.progress]
        if loops:
            (done, total), rank = min(loops, key=lambda at: _share(at[0]))
            return f"[rank {rank}] {draw_bar(done, total)}"
        if {line.doing for line in lines} - {"computing"}:
            return in_short(lines)
        printed = (f"[rank {rank}] {line.newest}" for rank, line in enumerate(lines) if line.newest)
        return next(printed, heading(self._world_size, lines))

    def close(self) -> None:
        if self._shown:
            self._shown = ""
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def draw_bar(done: int, total: int | None, width: int = 20) -> str:
    """Return a bar such as "█████░░░░░ 50 of 100"; without a total, the number alone."""
    if not total:
        return format_progress(done, total)
    full = min(width, width * done // total)
    return f"{'█' * full}{'░' * (width - full)} {format_progress(done, total)}"


def format_progress(done: int, total: int | None) -> str:
    """Return how far a loop has come, as in "50 of 100"; without a total, the number alone."""
    return f"{done:,} of {total:,}" if total else f"{done:,}"


def in_short(lines: Sequence[RankLine]) -> str:
    """Return how many ranks do what, with the longest wait.

    For example "4 ranks: 2 computing, 2 waiting in recv 3.1 s".
    """
    parts = [f"{many} {longest}" for many, longest in _kinds(lines)]
    return f"{count(len(lines), 'rank')}: {', '.join(parts)}"


def rows(lines: Sequence[RankLine]) -> list[tuple[str, RankLine]]:
    """Return a row for each rank, or of many ranks one for all that do the same."""
    if len(lines) <= settings.LIVE_ROWS:
        return [(f"rank {rank}", line) for rank, line in enumerate(lines)]
    return [(count(many, "rank"), line) for many, line in _kinds(lines)]


def _kinds(lines: Sequence[RankLine]) -> list[tuple[int, RankLine]]:
    """Return how many ranks do what, with the longest wait and the loop that is furthest behind."""
    kinds: dict[str, list[RankLine]] = {}
    for line in lines:
        kinds.setdefault(line.doing.partition("(")[0], []).append(line)
    found = []
    for doing, same in kinds.items():
        seconds = max((line.seconds for line in same if line.seconds is not None), default=None)
        loops = [line.progress for line in same if line.progress]
        slowest = min(loops, key=_share, default=None)
        found.append((len(same), RankLine(doing, seconds, slowest)))
    return found


def _share(progress: tuple[int, int | None]) -> float:
    return progress[0] / (progress[1] or 1)


def _cut(text: str, columns: int) -> str:
    """Return the beginning of a text that fits into so many columns of a terminal."""
    for at, char in enumerate(text):
        columns -= 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if columns < 0:
            return text[:at]
    return text


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


@dataclass(frozen=True)
class View:
    """How runs are shown: by default as in a script or on a terminal.

    open_live: makes the live view of a run with so many ranks.
    show_displayed: shows what ranks have displayed, by rank; None: ranks display nothing.
    draw_waits: shows a picture above a DeadlockError.
    most_lines, most_characters: how much of a rank's output is shown.
    visible: False if nothing is printed.
    """

    open_live: Callable[[int], LiveView] = TerminalView
    show_displayed: Callable[[Mapping[int, Sequence[Bundle]]], None] | None = None
    draw_waits: Callable[[DeadlockError], object] | None = None
    most_lines: int = sys.maxsize
    most_characters: int = sys.maxsize
    visible: bool = True


current = View()  # of this process


def use(view: View) -> None:
    """Show the runs of this process in this way from now on."""
    global current
    current = view


@contextmanager
def unseen() -> Iterator[None]:
    """Show and print nothing of runs in this block, which belong to no cell.

    What ranks printed is in the result.
    """
    before = current
    use(replace(before, open_live=LiveView, visible=False))
    try:
        yield
    finally:
        use(before)


def is_live() -> bool:
    """Return whether a run is shown while it lasts: in a notebook or on a terminal."""
    return current.open_live is not TerminalView or _on_terminal()


def say(line: str) -> None:
    """Print a line below the cell: what a rank printed, or a notice of the kit."""
    if current.visible:
        print(line)


def print_output(output: Sequence[str], kept: bool = True) -> None:
    """Print what the ranks printed: ranks ascending, each line prefixed with its rank.

    kept: the run's result or error will have it, too.
    """
    for rank, text in enumerate(output):
        lines = [as_seen(line) for line in text.removesuffix("\n").split("\n")] if text else []
        where = f"; .output[{rank}] of the result or the error has more" if kept else ""
        for line in _without_middle(lines, where):
            say(f"[rank {rank}] {line}".rstrip())


def _without_middle(lines: list[str], where: str) -> list[str]:
    """Return lines, of too many only the first and the last, with one between that says so."""
    text, most, most_lines = "\n".join(lines), current.most_characters, current.most_lines
    if len(lines) <= most_lines and len(text) <= most:
        return lines
    first = text[: most // 2].split("\n")[: most_lines // 2]
    last = text[-(most // 2) :].split("\n")[-(most_lines // 2) :]
    size = len(text) - len("\n".join(first)) - len("\n".join(last))
    left_out = f"{size:,} characters"
    if dropped := _DROPPED.search(text):
        left_out = f"{dropped[1]} and {left_out}"
    return [*first, f"... {left_out} are not shown here{where} ...", *last]
