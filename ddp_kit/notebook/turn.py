"""The newest wish of a control, carried out on the main thread when no cell runs there.

A front end's message comes on whichever thread the kernel reads it: on the main thread between
two cells, or on a thread of its own while a cell runs. Ranks start on the main thread only.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from ddp_kit.errors import PoolError

PAUSE = 0.05  # seconds without a newer wish before one is carried out: a slider sends many
PATIENCE = 0.25  # seconds after which a wish that still waits is told about


class Turn:
    """Hands one wish at a time to the main thread's event loop.

    carry_out: called there with the newest wish; one that it replaces is forgotten.
    on_wait: called where a wish has to wait, on the thread that asked.

    Raises PoolError where there is no such loop: controls need a notebook.
    """

    def __init__(self, carry_out: Callable[[Any], None], on_wait: Callable[[], None]) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        if self._loop is None or threading.current_thread() is not threading.main_thread():
            raise PoolError("controls need a notebook: call interact() in one of its cells")
        self._carry_out, self._on_wait = carry_out, on_wait
        self._changed = threading.Condition()
        self._wish: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, wish: Any) -> None:
        """Have this wish carried out, in place of one that has not begun. From any thread."""
        with self._changed:
            waiting, self._wish = self._wish is not None, wish
            self._loop.call_soon_threadsafe(self._wait_for_newer)
            if waiting or threading.current_thread() is threading.main_thread():
                return  # it was told already; or the loop goes on when this has returned
            if not self._changed.wait_for(lambda: self._wish is not wish, PATIENCE):
                self._on_wait()  # with the lock held: what is said when it begins comes later

    def forget(self) -> None:
        """Forget the wish that waits, if there is one.

        One that the front end has sent and the kernel has not read yet is carried out.
        """
        with self._changed:
            self._wish = None
            self._changed.notify_all()

    def _wait_for_newer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(PAUSE, self._take)

    def _take(self) -> None:
        with self._changed:
            wish, self._wish = self._wish, None
            self._changed.notify_all()
        if wish is not None:
            self._carry_out(wish)
