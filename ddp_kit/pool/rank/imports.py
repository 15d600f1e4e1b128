"""Which of the learner's files a rank has imported; the pool restarts it when one changes."""

from __future__ import annotations

import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

from ddp_kit.pool.wire.messages import FileStamp, file_stamp
from ddp_kit.trace import is_own

_KIT = str(Path(__file__).parents[2]) + os.sep
_LESSONS = os.path.join(_KIT, "lessons") + os.sep


def _is_kits(file: str) -> bool:
    """Return whether a file is the kit's own. Lessons are there to be edited."""
    return file.startswith(_KIT) and not file.startswith(_LESSONS)


class Imports:
    """Records what this process imports, except libraries: nobody edits them in a lesson."""

    def __init__(self) -> None:
        self._new: dict[str, FileStamp] = {}
        for module in list(sys.modules.values()):
            self._record(getattr(module, "__file__", None))
        path_stats = SourceFileLoader.path_stats

        def path_stats_of_learner(loader: SourceFileLoader, path: str) -> dict:
            if self._record(path):
                # Bytecode is matched with its source by whole seconds and size. Without stats
                # Python compiles the source, as it must after two edits in one second.
                raise OSError("the bytecode of a learner's module is not used")
            return path_stats(loader, path)

        SourceFileLoader.path_stats = path_stats_of_learner  # type: ignore[method-assign]

    def _record(self, file: str | None) -> bool:
        stamp = file_stamp(file) if file and is_own(file) and not _is_kits(file) else None
        if file and stamp:
            self._new[file] = stamp
        return stamp is not None

    def take(self) -> dict[str, FileStamp]:
        """Return what was imported since the last call."""
        new, self._new = self._new, {}
        return new
