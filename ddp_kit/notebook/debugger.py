"""`%ranks debug`: the variables of a rank that raised, with the commands of pdb.

The rank itself has gone on. What it captured when it raised is put into frames of this process,
which Python's own pdb then shows.
"""

from __future__ import annotations

import linecache
import pdb
import pickle
import re
import sys
from types import FrameType, TracebackType
from typing import Any

from IPython.core.error import StdinNotImplementedError

from ddp_kit import pool
from ddp_kit.error_text import name_ranks
from ddp_kit.errors import PoolError
from ddp_kit.pool import ipython
from ddp_kit.pool.wire.messages import Captured, FrameCopy, Summary, known, shorten

LONGEST_VALUE = 200  # characters of a variable in the list of all
# Commands of pdb that continue a program, change where it stops, or need its exception.
_NEED_A_PROGRAM = """
    b break cl clear commands condition debug disable enable exceptions ignore interact j
    jump n next r restart return retval run rv s step tbreak unt until
"""


def debug(line: str) -> None:
    """Show the variables of a rank that raised.

    line: its number, then commands, separated by ";;" as in pdb; both are optional.

    Raises PoolError if there is nothing to show.
    """
    first, *_ = line.split() or [""]
    is_rank = re.fullmatch(r"-?\d+", first) is not None
    commands = line.strip().removeprefix(first).strip() if is_rank else line.strip()
    rank, captured = _find(int(first) if is_rank else None)
    given = [one for one in map(str.strip, commands.split(";;")) if one]
    RankDebugger(rank, captured, [*given, "quit"] if given else []).start()


def _find(rank: int | None) -> tuple[int, Captured]:
    """Return a rank that raised, the first one for None, and what it captured."""
    last = pool.last_failed_run()
    if last is None:
        raise PoolError("%ranks debug shows ranks that raised, and no run has failed yet")
    shown = sorted(rank for rank, sent in last.captured.items() if sent)
    # Ranks that only lost the connection to one that died are not among the failures.
    first = next((n for n in shown if n in last.failures), (*shown, None)[0])
    rank = first if rank is None else rank
    if rank in shown:
        return rank, pickle.loads(last.captured[rank])
    if rank is None:
        raise PoolError(
            "%ranks debug shows ranks that raised in a function of yours on this host, and none "
            f"did: the last run that failed ended with a {last.error}"
        )
    if rank in last.failures and rank not in last.captured:
        raise PoolError(f"rank {rank} raised on another host, where its variables stay")
    others = f"; {name_ranks(shown)} did" if shown else ""
    raise PoolError(f"rank {rank} did not raise in a function of yours{others}")


# A kernel replaces `pdb.Pdb` with IPython's, which colours what it prints for its own terminal.
_Pdb: type = next(cls for cls in pdb.Pdb.__mro__ if cls.__module__ == "pdb")


class RankDebugger(_Pdb):
    """Python's pdb on the frames that a rank captured. commands: the first ones; may be none."""

    def __init__(self, rank: int, captured: Captured, commands: list[str]) -> None:
        super().__init__(nosigint=True, readrc=False)
        self.prompt = f"(rank {rank}) "
        self._rank, self._captured, self._commands = rank, captured, commands
        self._copies: dict[FrameType, FrameCopy] = {}
        self._cell_names = ipython.cell_names()

    def start(self) -> None:
        """Run commands until one of them quits."""
        if self._captured.from_gpu:
            self.message("tensors from a GPU are copies on the CPU")
        self.reset()
        try:
            self.interaction(None, self._traceback())
        except KeyboardInterrupt:  # ■ ends it, as it ends a cell
            self.message("")
        except StdinNotImplementedError:
            self.message(
                "This front end cannot ask for commands. They may follow the rank: "
                f"%ranks debug {self._rank} where ;; locals"
            )

    def _traceback(self) -> TracebackType:
        step: TracebackType | None = None
        for copy in reversed(self._captured.frames):
            frame = _rebuild(copy)
            self._copies[frame] = copy
            step = TracebackType(step, frame, frame.f_lasti, frame.f_lineno)
        assert step is not None, "a rank sends no capture without frames"
        return step

    def _cmdloop(self) -> None:
        self.cmdqueue += self._commands  # behind what Python 3.13 has put there: show the frame
        self.cmdloop()  # without pdb's own handling of KeyboardInterrupt

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        """Return a frame's place as the kit's errors show it, and its line of code."""
        frame, line = frame_lineno
        copy = self._copies[frame]
        file = self._cell_names.get(copy.file, copy.file)
        text = f"{file}, line {line}, in {copy.function}"
        if source := linecache.getline(copy.file, line).strip():
            text += lprefix + source
        return text

    def do_locals(self, arg: str) -> None:
        """locals, or a(rgs)

        Print all variables of the current function, beginning with its arguments.
        """
        for name, value in self._copies[self.curframe].locals.items():
            try:
                text = shorten(repr(value), LONGEST_VALUE)
            except ValueError:  # a number with more digits than Python prints
                text = f"a value of type {type(value).__name__}"
            self.message(f"{name} = {text}")

    do_a = do_args = do_locals

    def get_names(self) -> list[str]:
        """Return the names of methods, for `help`."""
        return [name for name in super().get_names() if name[3:] not in _NEED_A_PROGRAM.split()]

    def _refuse(self, arg: str) -> None:
        """Print why a command of pdb is missing."""
        self.error("unavailable, because the rank has gone on; help lists the commands")


for _name in _NEED_A_PROGRAM.split():
    setattr(RankDebugger, f"do_{_name}", RankDebugger._refuse)


def _rebuild(copy: FrameCopy) -> FrameType:
    """Return a frame of this process with the file, line, name and variables of a rank's."""
    names: dict[str, Any] = {}
    for name, value in (copy.globals | copy.locals).items():
        names[name] = _module(value) if type(value) is Summary else value
    # Two statements, because the first one decides in which line the code begins.
    source = "pass; " + "\n" * (copy.line - copy.first_line) + "__take__()"
    code = compile(source, copy.file, "exec", dont_inherit=True)
    code = code.replace(co_name=copy.function, co_firstlineno=copy.first_line)
    taken: list[FrameType] = []
    names["__take__"] = lambda: taken.append(sys._getframe(1))
    exec(code, names)
    del names["__take__"]
    return taken[0]


def _module(value: Summary) -> Any:
    """Return this process's module for the summary of one; but here is no process group."""
    kind, name, *_ = known(value)
    if kind != "module" or name.startswith("torch.distributed"):
        return value
    return sys.modules.get(name, value)
