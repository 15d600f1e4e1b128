"""A store that records every request of PyTorch's, for lesson 06."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


class ForwardingStore(dist.Store):
    """A store that passes all calls on to another one."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self.store.set(key, value)

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        """Wait until all keys have been written."""
        self.store.wait(keys, *timeout)

    def get(self, key: str) -> bytes:
        """Wait until a value has been written, and read it."""
        return self.store.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        return self.store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have been written."""
        return self.store.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Replace a value if it is the expected one."""
        return self.store.compare_set(key, expected, desired)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return whether the store has more than set, get and wait."""
        return self.store.has_extended_api()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `wait` and `get` may take."""
        self.store.set_timeout(timeout)


class RecordingStore(ForwardingStore):
    """A store that also records the calls that read, write or wait.

    notes: (call, key, bytes), in the order of the calls; values: what was written, by key.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store)
        self.notes: list[tuple[str, str, int]] = []
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self.notes.append(("set", key, len(value)))
        self.values[key] = bytes(value)
        super().set(key, value)

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        """Wait until all keys have been written."""
        self.notes.extend(("wait", key, 0) for key in keys)
        super().wait(keys, *timeout)

    def get(self, key: str) -> bytes:
        """Wait until a value has been written, and read it."""
        value = super().get(key)
        self.notes.append(("get", key, len(value)))
        return value

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        self.notes.append(("add", key, 0))
        return super().add(key, amount)


def ranks_in(keys: Sequence[str]) -> list[int]:
    """Return the ranks at the end of keys such as "0//cpu//0/1"."""
    return [int(key.rsplit("/", 1)[1]) for key in keys]
