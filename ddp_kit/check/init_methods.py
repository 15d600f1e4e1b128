"""Graders of lesson 06: ranks from a list of hosts, and what can be done with a store."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

from ddp_kit.check.compared import alone, compared
from ddp_kit.check.grader import (
    SIZES,
    STORE_LIMIT,
    EndlessError,
    by_size,
    ended,
    name_counts,
    open_store,
    shared_folder,
)
from ddp_kit.error_text import count
from ddp_kit.errors import RankError

# Each list as the exercise gives it: hosts in their order, with their number of ranks.
HOST_LISTS = (
    [("alpha", 2), ("beta", 2)],
    [("beta", 1), ("alpha", 3)],
    [("gamma", 2), ("alpha", 1), ("beta", 2)],
)
# Ranks that never come, by world size.
ABSENT = {2: ([], [1]), 3: ([], [2]), 1: ([],), 4: ([], [1, 3]), 5: ([], [4])}
SECOND, NO_LONGER = "a second barrier", "no longer than it must"
SECONDS = 3.0
WHERE = "on 1, 2, 3, 4 and 5 ranks"


@compared(
    "6.1",
    "place_of(hosts, host, local_rank)",
    where="for 4 and 5 ranks on two and three hosts",
    cases=[(sum(ranks for _, ranks in hosts), *hosts) for hosts in HOST_LISTS],
    part=lambda case: f"on {count(len(case) - 1, 'host')}",
    call=lambda n, *hosts: f"place_of({list(hosts)}, host, local_rank)",
    spare=None,
)
def _place_of(rank: int, n: int, place_of: Callable, *hosts: tuple[str, int]) -> Any:
    places = [(host, local) for host, ranks in hosts for local in range(ranks)]
    found = place_of(list(hosts), *places[rank])
    return tuple(found) if isinstance(found, list) else found


class ScriptedStore:
    """A store in one process. later: what the others do, once, when something is awaited.

    `wait` and `get` await keys, and so does who asks again and finds the same.

    between: what another process does, once, between the first and the second call.
    """

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.later: Callable[[], None] | None = None
        self.between: Callable[[], None] | None = None
        self._calls = 0
        self._asked: tuple = ()  # what was asked for last, and what there was

    def _call(self) -> None:
        self._calls += 1
        if self._calls == 2 and self.between is not None:
            self.between()

    def set(self, key: str, value: str | bytes) -> None:
        self._call()
        self._write(key, value)

    def _write(self, key: str, value: str | bytes) -> None:
        self.held[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = self.held[key]
        self._ask(key, value)
        return value

    def wait(self, keys: list[str], *limit: timedelta) -> None:
        """Return when these keys are written. Raise RuntimeError if they never are."""
        self._call()
        if not self._has(keys):
            self.come()
        if missing := [key for key in keys if key not in self.held]:
            raise RuntimeError(f"all wait, and nobody writes {' and '.join(missing)}")

    def come(self) -> None:
        """Let the others do what they do later, once."""
        later, self.later = self.later, None
        if later is not None:
            later()

    def check(self, keys: list[str]) -> bool:
        self._call()
        found = self._has(keys)
        if not found:
            self._ask(*keys)
        return found

    def _has(self, keys: list[str]) -> bool:
        return all(key in self.held for key in keys)

    def _ask(self, *asked: Any) -> None:
        if asked == self._asked:
            self.come()
        self._asked = asked

    def ask_anew(self) -> None:
        """Take what is asked next for a first question: another process asks."""
        self._asked = ()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it has a value, or "" if it has none, and return what it has."""
        self._call()
        if self.held.get(key, b"") == expected.encode():
            self._write(key, desired)
        return self.held.get(key, expected.encode())

    def add(self, key: str, amount: int) -> int:
        self._call()
        number = int(self.held.get(key, b"0")) + amount
        self._write(key, str(number))
        if not amount:
            self._ask(key, number)
        return number


def come_by_turns(store: ScriptedStore, n: int, come_in: Callable[[], Any]) -> list[list[Any]]:
    """Let n processes come one after the other, each while those before it wait.

    Return what `come_in` has returned, of those that have gone on, when 1, 2 and so on have come.
    """
    returned: list[Any] = []
    gone_on: list[list[Any]] = []

    def come() -> None:
        store.later = others_come
        store.ask_anew()
        returned.append(come_in())
        store.ask_anew()

    def others_come() -> None:
        gone_on.append(list(returned))
        if len(gone_on) < n:
            come()

    come()
    while len(gone_on) < n:  # nobody has waited
        others_come()
    return [*gone_on, returned]


@compared(
    "6.2",
    "barrier(store, world_size, name)",
    "two barriers one after the other",
    on_failure="key never written",
    where=WHERE,
    cases=[(1, n, part) for part in ("", SECOND) for n in SIZES],
    part=lambda case: case[2] or by_size(SIZES)(case[1]),
    call=lambda _, n, part: f"barrier(store, {n}, name)",
    spare=None,
)
def _barrier(rank: int, _: int, barrier: Callable, n: int, part: str) -> dict[str, list[int]]:
    store, found = ScriptedStore(), {}
    for name in ("first", "second")[: 2 if part else 1]:
        gone_on = come_by_turns(store, n, partial(barrier, store, n, name))
        ranks = name_counts(range(1, n + 1))
        found[f"how many have left the {name} barrier when {ranks} have come"] = list(
            map(len, gone_on[:-1])
        )
    return found


class _Roll(ScriptedStore):
    """A store in which time goes by for those who wait.

    seconds: so much, of its clock. waited: so much of that in `wait`.
    """

    seconds, waited, limit = 0.0, 0.0, STORE_LIMIT

    def set_timeout(self, limit: timedelta) -> None:
        self.limit = limit

    def wait(self, keys: list[str], *limit: timedelta) -> None:
        try:
            super().wait(keys)
        except RuntimeError:
            waited = (*limit, self.limit)[0].total_seconds()
            self.seconds, self.waited = self.seconds + waited, self.waited + waited
            raise

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.come()

    def now(self) -> float:
        self.seconds += 0.01
        return self.seconds

    def now_ns(self) -> int:
        return int(1e9 * self.now())


@compared(
    "6.3",
    "who_is_missing(store, world_size, seconds)",
    "with and without missing ones",
    on_failure={RankError: "error not caught"},
    where=WHERE,
    cases=[
        (1, n, part, *absent) for part in ("", NO_LONGER) for n in SIZES for absent in ABSENT[n]
    ],
    part=lambda case: case[2] or by_size(SIZES)(case[1]),
    call=lambda _, n, part, *absent: f"who_is_missing(store, {n}, seconds), where {_who(absent)}",
    spare=None,
)
def _who_is_missing(rank: int, _: int, answer: Callable, n: int, part: str, *absent: int) -> dict:
    store = _Roll()
    store.set("here/0", "")
    store.later = lambda: [store.set(f"here/{r}", "") for r in range(1, n) if r not in absent]
    names, begun = ("monotonic", "perf_counter", "time"), time.perf_counter()
    clocks = dict.fromkeys(names, store.now) | {f"{name}_ns": store.now_ns for name in names}
    with patch.multiple(time, sleep=store.sleep, **clocks):
        found = answer(store, n, SECONDS)
    if (took := time.perf_counter() - begun) > 1:  # it has looked at another clock
        store.seconds = store.waited + took
    if part:  # of a single rank, each way takes as long
        limit = SECONDS * max(1, len(absent)) if len(absent) != 1 else math.inf
        return {f"whether it takes less than {limit:g} s": store.seconds < limit}
    return {"what is returned": found}


def _who(absent: Sequence[int]) -> str:
    return f"{count(len(absent), 'rank')} never came" if absent else "all came"


@alone("6.a", "join(store, run, world_size)", "for two starts")
def _join(join: Callable) -> dict:
    store = ScriptedStore()
    comes = [("run 1", 3)] * 5 + [("run 2", 2)] * 3
    found = {
        f"process {number + 1} of {run}, with world size {size}": ended(join, store, run, size)
        for number, (run, size) in enumerate(comes)
    }
    store, both = ScriptedStore(), []
    store.between = lambda: both.append(ended(join, store, "run 1", 2))
    both.append(ended(join, store, "run 1", 2))
    if len(both) == 1:  # a single call: nothing can come in between
        store.between()
    return found | {"two processes at the same time": sorted(both, key=str)}


@alone("6.b", "exchange(store, rank, world_size, name, value)", "for two exchanges")
def _exchange(exchange: Callable) -> dict:
    found = {}
    for me, n in ((1, 3), (0, 2)):
        kept = ScriptedStore()
        for name in ("first", "second"):

            def others(kept: Any = kept, me: int = me, n: int = n, name: str = name) -> None:
                if f"{name}/{me}" in kept.held:  # they wait for this rank as it does for them
                    for other in set(range(n)) - {me}:
                        kept.set(f"{name}/{other}", f"{name} value of {other}")

            kept.later = others
            returned = ended(exchange, kept, me, n, name, f"{name} value of {me}")
            found[f"the {name} exchange on rank {me} of {n}"] = returned
    return found


BEGIN = 1000.0  # what the clock shows at first; sums with tenths are rounded


class _Service:
    """A clock, and a service that answers from some second on; `tried` has the time of each try."""

    def __init__(self, answers: float, error: type[Exception]) -> None:
        self.time, self._tries, self._at_once, self._answers = BEGIN, 0, 0, BEGIN + answers
        self.tried: list[float] = []
        self._error = error

    def now(self) -> float:
        return self.time

    def pause(self, seconds: float) -> None:
        self.time, self._at_once = self.time + seconds, 0

    def connect(self) -> str:
        self._tries, self._at_once = self._tries + 1, self._at_once + 1
        if (
            self._tries > 100 or self._at_once > 2
        ):  # rounding may need a second one; or it does not use `pause`
            raise EndlessError
        if (tried := round(self.time - BEGIN, 3)) not in self.tried:
            self.tried.append(tried)
        if self.time < self._answers:
            raise self._error
        return f"connected after {self.time - BEGIN:.1f} s"


@alone("6.c", "keep_trying(connect, limit, now, pause)", "whether somebody answers or not")
def _keep_trying(keep_trying: Callable) -> dict:
    found = {}
    for answers, error in (
        *((seconds, ConnectionRefusedError) for seconds in (0.0, 0.5, 3.9, 100.0)),
        (0.5, PermissionError),
    ):
        service = _Service(answers, error)
        how = ended(
            keep_trying, service.connect, 4.0, service.now, service.pause, errors=(Exception,)
        )
        what = f"the service answers after {answers:g} s"
        if error is PermissionError:
            what = "connect() raises a PermissionError"
        found |= {f"the end if {what}": how, f"the tries if {what}": service.tried}
    return found


class _InOrder:
    """A store in which a rank's first `add` of 1 comes when the rank before has made its own."""

    def __init__(self, store: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._store, self._before, self._after = store, before, after
        self._adds, self._has_come = 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, amount: int) -> int:
        self._adds += 1
        if self._adds > 100:
            raise RuntimeError("add was called 100 times")
        is_first, self._has_come = amount > 0 and not self._has_come, self._has_come or amount > 0
        if is_first:
            self._before()
        number = self._store.add(key, amount)
        if is_first:
            self._after()
        return number


@compared("6.4", "meet(store, most, last_call)", kind="function")
def _meet(rank: int, n: int, meet: Callable) -> dict:
    cases = {"all come in time": (n, n), "one is too many": (n - 1, n), "one is late": (n, n - 1)}
    found = {}
    for name, case in cases.items():
        with shared_folder(rank) as folder:
            came = _come(rank, meet, open_store(folder, n), *case)
            found[f"{name}: the generation, the rank and the world size"] = came
    return found


def _come(rank: int, meet: Callable, store: Any, most: int, in_time: int) -> Any:
    """Return what an answer returns if so many ranks come in time, one after the other."""

    def come() -> None:
        if rank:
            store.wait([f"came {rank - 1}" if rank < in_time else "begun"])

    def last_call(generation: int) -> None:
        if generation == 0:
            store.wait([f"came {in_time - 1}"])

    watched = _InOrder(store, come, lambda: store.set(f"came {rank}", ""))
    found = ended(meet, watched, most, last_call)
    store.set("begun", "")
    return found
