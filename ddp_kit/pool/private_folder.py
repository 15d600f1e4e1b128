"""A pool's private temporary folder: the stores of its groups, sockets and logs."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from ddp_kit.errors import PoolError

NEW, PREFIX = "new-ddp_kit-pool-", "ddp_kit-pool-"
STORE = "group-"  # the first part of every name that the kit puts there


class PrivateFolder:
    """A folder that only this user can open, made when it is first used.

    It is locked as long as its process lives.
    The lock ends with the process, however it ends. A folder that can be locked is therefore left
    over from a killed process, and the next pool removes it. Process ids are less reliable: another
    process, or another container with the same temporary folder, may have the same one.
    """

    def __init__(self) -> None:
        self._lock: int | None = None

    @cached_property
    def path(self) -> str:
        """Its path. Raises PoolError if it cannot be made."""
        try:
            made = tempfile.mkdtemp(prefix=NEW)
        except OSError as error:
            raise PoolError(
                f"cannot create a temporary folder ({error.strerror}); set TMPDIR to a folder "
                "with free space"
            ) from error
        self._lock = os.open(made, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Once it is locked it gets the name of those that are swept.
        return shutil.move(made, made.replace(NEW, PREFIX))

    def file(self, name: object) -> str:
        """Return the path for a store, a socket, logs or a program, which the kit removes."""
        return os.path.join(self.path, f"{STORE}{name}")

    def remove(self) -> None:
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)


def sweep() -> None:
    """Remove the folders of this user that no living process has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # not a folder, or another pool was faster
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)
        except BlockingIOError:
            pass  # its pool is alive
        finally:
            os.close(lock)


def _remove(folder: str | Path) -> None:
    """Remove a folder with stores. It stays if it contains files that the kit did not create."""
    for store in Path(folder).glob(f"{STORE}*"):
        if store.is_dir() and not store.is_symlink():
            shutil.rmtree(store, ignore_errors=True)
        else:
            store.unlink(missing_ok=True)
    with suppress(OSError):
        os.rmdir(folder)
