"""A quick look at all that ranks have called: is there anything to look at closely?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ddp_kit.trace import Snapshot
from ddp_kit.trace.board import VOID
from ddp_kit.verdict.pieces import PIECEWISE


def plainly_agree(snapshots: Iterable[Snapshot]) -> bool:
    """Tell that no two ranks differ in anything; False: `mismatch` must find out what it means.

    It makes no events, and takes a tenth of the time.
    """
    numbers: dict[Any, int] = {}  # to compare, and to hash, numbers instead of shapes
    met: dict[tuple, int] = {}
    for snapshot in snapshots:
        known: dict[int, tuple] = {}
        rank = snapshot.rank
        for what, _, peer, bits, tag, sequence, *_ in snapshot.log.kept():
            if bits & VOID or not what:
                continue
            if what not in known:
                kind, group, alike = _gist(snapshot.call(what))
                number = numbers.setdefault(group, len(numbers))
                known[what] = kind, number, numbers.setdefault(alike, len(numbers))
            kind, group, alike = known[what]
            if kind == "collective":
                key: tuple = group, sequence
            else:
                key = group, sequence, tag, *((rank, peer) if kind == "send" else (peer, rank))
            if met.setdefault(key, alike) != alike:
                return False
    return True


def _gist(call: dict[str, Any]) -> tuple:
    """Return the kind of a call, its group, and what its partners must have in common."""
    kind, group = call["kind"], call["group"]
    if kind != "collective":
        return kind, group, (call["nbytes"], call["dtype"], call["device"])
    tensors = call["inputs"], call["outputs"]
    names = ("method", "root", "dtype", "reduce_op", "splits", "device")
    alike = (*tensors, *(call[name] for name in names))
    if call["splits"] or (call["method"] in PIECEWISE and len({*tensors[0], *tensors[1]}) > 1):
        alike = (*alike, object())  # equal calls may be wrong here
    return kind, group, alike
