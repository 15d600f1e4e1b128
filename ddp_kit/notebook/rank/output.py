"""The value of a cell's last expression, on its way from a rank to the notebook.

Everything here runs in a rank, except `SealedValue.open`.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ddp_kit.pool.wire import payload


@dataclass(frozen=True)
class SealedValue:
    """A value that the notebook may be unable to rebuild, and a text to use instead."""

    pickled: bytes | None
    text: str

    def open(self) -> Any:
        """Return the value, or its text."""
        try:
            return pickle.loads(self.pickled) if self.pickled is not None else self.text
        except Exception:  # whatever the value's own classes raise
            return self.text


@dataclass(frozen=True)
class CellOutput:
    """To the notebook: the value of a cell's last expression, and the names of cells."""

    value: Any  # a SealedValue, or plain data
    names: dict[str, list[str]]  # of rank 0: each name with the names inside its value


def seal(value: Any) -> Any:
    """Return a value as it travels: sealed, unless it is plain data."""
    if value is None or type(value) in (bool, int, float, str, torch.Tensor):
        return value
    pickled = None
    with suppress(Exception):  # it cannot be pickled
        if not payload.holds_module(value):
            pickled = payload.pickle_whole(value)
    return SealedValue(pickled, _text(value))


def _text(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # the learner's own __repr__
        return f"(a value of type {type(value).__name__}, whose repr failed)"


def can_be_sent(value: Any) -> bool:
    """Return whether a value can be sent to the notebook."""
    try:
        if payload.holds_module(value):
            return False
        payload.pack(value).close()
    except Exception:
        return False
    return True
