"""The operations of a group, which its engine moves on.

An operation is a generator that does what it can and then yields the ranks that must act before it
can go on: a tuple if all of them must, or a set if whatever one of them does may bring it on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ddp_kit.backends.group.work import Operation

Needs = tuple[int, ...] | frozenset[int]
Steps = Iterator[Needs]


class SharedOperation(Operation):
    """One operation on shared memory.

    engine: the `engine.Engine` of the group. steps: moves it on. timeout: seconds from now.
    """

    def __init__(
        self, engine: Any, name: str, steps: Steps, timeout: float, outputs: Sequence = ()
    ) -> None:
        super().__init__(name, outputs)
        self._engine = engine
        self.steps = steps
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout
        self.needs: Needs = ()  # the ranks that must act before it can go on
        self.waiting = 0  # threads

    def poll(self) -> bool:
        """Return whether it is done. The group's thread moves it on, so a signal cannot end it."""
        if self.done:
            self.complete_future()
        else:
            time.sleep(0)  # lets that thread have the GIL
        return self.done

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is done. Raises RuntimeError if it failed, or after `timeout` seconds.

        After `timeout` it goes on, and one may wait again; after the group's timeout it has
        failed.
        """
        try:
            if not self.done:
                self._engine.wait(self, timeout)
        finally:
            if self.done:
                self.complete_future()
        if self.error is not None:
            raise self.error


class Send(SharedOperation):
    """A send, which ends when the message was received."""


class Receive(SharedOperation):
    """A receive; `messages` fills its buffer. source: a group rank; None: any."""

    def __init__(
        self,
        engine: Any,
        buffer: torch.Tensor,
        source: int | None,
        tag: int,
        timeout: float,
        finish: Callable[[], None],
        outputs: Sequence,
    ) -> None:
        super().__init__(engine, "recv", iter(()), timeout, outputs)
        self.buffer, self.wanted, self.tag, self.finish = buffer, source, tag, finish
