"""What a learner sees while a run lasts. Nothing of it remains when the run has ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol


class View(Protocol):
    """Shows the newest line of each rank while a run lasts."""

    def update(self, newest: list[str], starting: bool = False) -> None:
        """Show the newest line of each rank; called ten times a second at most.

        starting: the processes are still on their way, and no worker was called yet.
        """

    def close(self) -> None:
        """Take away what `update` has shown."""


def heading(world_size: int, starting: bool) -> str:
    """Say what the ranks do: "4 ranks at work"."""
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    if starting:
        return f"{ranks} {'is' if world_size == 1 else 'are'} starting"
    return f"{ranks} at work"


class TerminalView:
    """One line on the terminal that is overwritten; silent when stderr is no terminal."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._shown = ""

    def update(self, newest: list[str], starting: bool = False) -> None:
        """Show the newest line of the lowest rank that has printed."""
        line = next((f"[rank {r}] {text}" for r, text in enumerate(newest) if text), "")
        line = line or heading(self._world_size, starting)
        if sys.stderr.isatty() and line != self._shown:
            self._shown = line
            sys.stderr.write(f"\r\x1b[K{line[:78]}")
            sys.stderr.flush()

    def close(self) -> None:
        """Wipe the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


# `ddp_kit.notebook` puts its own view here when the kit is imported in a notebook.
open_view: Callable[[int], View] = TerminalView
