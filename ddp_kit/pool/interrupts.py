"""Deferring a KeyboardInterrupt while something must complete, and allowing one elsewhere."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ddp_kit.errors import PoolError


def check_main_thread() -> None:
    """Raise PoolError in any other thread: it gets no interrupt, and a rank would end with it."""
    if threading.current_thread() is not threading.main_thread():
        raise PoolError(
            "ranks can be started and run from the main thread only; call this from a cell, "
            f"not from the thread {threading.current_thread().name!r}"
        )


@contextmanager
def holding_interrupt() -> Iterator[None]:
    """Defer a KeyboardInterrupt to the end of this block.

    Processes that are started here inherit SIGINT blocked: the notebook's ■ sends it to the whole
    process group, and only the pool may act on it. Raises PoolError outside the main thread,
    because a rank would die with the thread that started it.
    """
    check_main_thread()
    came: list[bool] = []
    # The handler first: from here on nothing is raised. The mask alone does not suffice, because it
    # applies to this thread, and another thread may take the signal.
    before = signal.signal(signal.SIGINT, lambda *_: came.append(True))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)  # last, so that nothing is raised before it is done
        if came:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt in this block, even if the kernel ignores it.

    Between two cells ipykernel ignores SIGINT, so ■ would not reach a run that begins there.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def show_interrupt(interrupt: KeyboardInterrupt, positions: list[str]) -> None:
    """Make IPython show where the ranks were, instead of where in the pool the wait was."""
    if hasattr(interrupt, "_render_traceback_"):
        return  # it knows already
    text = (
        "KeyboardInterrupt: the run was stopped; ranks that had not returned were killed, without "
        "their except and finally clauses"
    )
    interrupt._render_traceback_ = lambda: [text, *positions]  # type: ignore[attr-defined]
