"""Which files of the learner's a rank has imported, and whether they have changed since."""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader

from ddp_kit.trace import is_own

Stamp = tuple[int, int]  # a file's time of change in nanoseconds, and its size in bytes


class Imports:
    """Notes what this process imports. Libraries are left out: nobody edits them in a lesson."""

    def __init__(self) -> None:
        self._new: dict[str, Stamp] = {}
        for module in list(sys.modules.values()):
            self._note(getattr(module, "__file__", None))
        path_stats = SourceFileLoader.path_stats

        def path_stats_of_learner(loader: SourceFileLoader, path: str) -> dict:
            if self._note(path):
                # Python tells bytecode from newer source by whole seconds and the size. Without
                # stats it compiles the source, as it must after two edits in one second.
                raise OSError("the bytecode of a learner's module is not used")
            return path_stats(loader, path)

        SourceFileLoader.path_stats = path_stats_of_learner  # type: ignore[method-assign]

    def _note(self, file: str | None) -> bool:
        stamp = read_stamp(file) if file and is_own(file) else None
        if file and stamp:
            self._new[file] = stamp
        return stamp is not None

    def take(self) -> dict[str, Stamp]:
        """Return what was imported since the last call."""
        new, self._new = self._new, {}
        return new


def read_stamp(file: str) -> Stamp | None:
    """Return what tells one version of a file from another; None if it cannot be read."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def changed(imported: list[dict[str, Stamp]]) -> list[set[str]]:
    """Return, for each rank, the files that have changed since it imported them.

    A file that is gone has not changed: nothing newer could be imported.
    """
    now = {file: read_stamp(file) for file in set().union(*imported)}
    return [
        {file for file, stamp in files.items() if now[file] not in (None, stamp)}
        for files in imported
    ]
