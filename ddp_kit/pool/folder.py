"""The pool's private folder, where the ranks of a process group find each other."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "ddp_kit-"


class PrivateFolder:
    """A folder that only this user can open, locked as long as its process lives.

    The lock ends with the process, however it ends. So a folder that can be locked is left
    over from a killed one, and the next pool removes it. Process ids would tell less: another
    process, or another container with the same temporary folder, may have the same one.
    """

    def __init__(self) -> None:
        while True:
            self.path = tempfile.mkdtemp(prefix=PREFIX)
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.path.isdir(self.path):
                return
            os.close(self._lock)  # it was taken for a left-over one before it was locked

    def remove(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def sweep() -> None:
    """Remove the folders of this user that no living process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # not a folder, or another pool was quicker
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass  # its pool lives
        finally:
            os.close(lock)
