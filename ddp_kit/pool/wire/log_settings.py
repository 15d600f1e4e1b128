"""How the notebook has configured logging, as far as it prints, and the same in a rank."""

from __future__ import annotations

import logging
import pickle
import sys
from contextlib import suppress
from typing import NamedTuple, TextIO

from ddp_kit.pool.wire import payload


class LogHandler(NamedTuple):
    """A handler that prints."""

    level: int
    formatter: bytes | None  # pickled; None: it prints the message alone


class LogSettings(NamedTuple):
    """What is printed of the records of each logger."""

    level: int  # of the root logger
    handlers: tuple[LogHandler, ...]  # of the root logger
    levels: dict[str, int]  # of the other loggers that have one


def current_log_settings() -> LogSettings:
    """Return the settings of this process."""
    root = logging.getLogger()
    printing = [handler for handler in root.handlers if _prints(handler)]
    handlers = tuple(LogHandler(each.level, _pickle(each.formatter)) for each in printing)
    loggers = root.manager.loggerDict.items()
    levels = {name: at.level for name, at in loggers if isinstance(at, logging.Logger) and at.level}
    return LogSettings(root.level, handlers, levels)


def _prints(handler: logging.Handler) -> bool:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    stream = getattr(handler, "stream", None)  # a subclass may have none
    return isinstance(handler, logging.StreamHandler) and stream is not None and stream in streams


def _pickle(formatter: logging.Formatter | None) -> bytes | None:
    with suppress(Exception):  # a formatter of the learner's own may be impossible to pickle
        return payload.pickle_whole(formatter) if formatter is not None else None
    return None


class PrintingHandler(logging.StreamHandler):
    """A handler of the notebook, in a rank. It prints to what `sys.stderr` is at the moment."""

    def __init__(self, handler: LogHandler) -> None:
        logging.Handler.__init__(self, handler.level)
        with suppress(Exception):  # its class may be nowhere but in the notebook
            self.setFormatter(pickle.loads(handler.formatter) if handler.formatter else None)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The stream to which records are written."""
        return sys.stderr
