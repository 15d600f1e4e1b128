"""Sleep until another process changes a word of shared memory: Linux's futex, through ctypes.

Which store does another core see first? Python has no word for that. `shm` relies on this:

* A rank writes data, then a counter that says how much, and then calls `advance` on its bell. A
  reader looks at the bell, then at the counter, then at the data, and sleeps while the bell is what
  it was. `advance` is one system call, FUTEX_WAKE_OP, in which the kernel adds 1 with an atomic
  instruction: a full barrier on every processor, so nobody sleeps past what came before it.
* Between data and counter, a writer and a reader call `fence`. On x86 that does nothing, because
  x86 shows no other core two stores, and does no two loads, in another order than the program's
  (total store order). The C library may copy much data with stores that x86 does not keep in
  order; it ends such a copy with a barrier of its own.
* ARM and others may reorder both. There `fence` is the same system call, on a word of its own.
  Nobody has run this on ARM yet.
* `memoryview` reads and writes a word of 4 or 8 bytes, at a multiple of its size, with one
  instruction, so nobody sees half of it. No word has two writers at a time.

https://man7.org/linux/man-pages/man2/futex.2.html
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
from collections.abc import Sequence

_MACHINE = platform.machine()
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX = _NUMBERS.get(_MACHINE)
_FUTEX_WAITV = 449  # on every machine, since Linux 5.16
_WAIT, _WAKE_OP = 0, 5
_ADD_1 = 1 << 28 | 1 << 12 | 0xFFF  # add 1; and wake nobody on the second word: it is never -1
_EVERYBODY = 0x7FFFFFFF
_MONOTONIC = 1
_SIZE_U32 = 2  # of a word that FUTEX_WAITV waits for
_MOST = 128  # words that it takes
_SHORT = 0.001  # seconds: the longest sleep where several words are to be watched and cannot be

is_supported = sys.platform == "linux" and _FUTEX is not None

_c = ctypes.CDLL(None, use_errno=True)
_syscall = _c.syscall
_syscall.restype = ctypes.c_long


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Waiter(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


def advance(address: ctypes.c_void_p) -> None:
    """Add 1 to the word of 4 bytes at an address, and wake all who sleep until it changes."""
    _syscall(_FUTEX, address, _WAKE_OP, _EVERYBODY, None, address, _ADD_1)


def sleep(address: ctypes.c_void_p, seen: int, seconds: float) -> None:
    """Sleep until the word at an address is no longer `seen`, a signal comes, or time is up."""
    limit = _Time(int(seconds), int(seconds % 1 * 1e9))
    _syscall(_FUTEX, address, _WAIT, ctypes.c_uint(seen), ctypes.byref(limit), None, 0)


def sleep_for_any(words: Sequence[tuple[ctypes.c_void_p, int]], seconds: float) -> None:
    """Do `sleep` for several words and what was seen of each."""
    global _has_waitv
    if len(words) == 1:
        sleep(*words[0], seconds)
        return
    if _has_waitv and len(words) <= _MOST:
        waiters = (_Waiter * len(words))(
            *(_Waiter(seen, address.value or 0, _SIZE_U32, 0) for address, seen in words)
        )
        now = _Time()
        _c.clock_gettime(_MONOTONIC, ctypes.byref(now))
        end = now.seconds + now.nanoseconds * 1e-9 + seconds
        limit = _Time(int(end), int(end % 1 * 1e9))
        count = len(words)
        got = _syscall(_FUTEX_WAITV, waiters, count, 0, ctypes.byref(limit), _MONOTONIC)
        if got >= 0 or ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
            return
        _has_waitv = False  # an older Linux, or a sandbox that refuses it
    sleep(*words[0], min(seconds, _SHORT))


_has_waitv = True
_own = ctypes.c_uint32()
_own_address = ctypes.c_void_p(ctypes.addressof(_own))


def fence() -> None:
    """Let what comes after this call happen after what came before it; x86 does that anyway."""
    if _MACHINE != "x86_64":
        advance(_own_address)
