"""What the pool and a rank say to each other through the control pipe."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_kit.failures import RankFailure, Wait
from ddp_kit.pool.modules import Stamp
from ddp_kit.pool.values import Parcel


@dataclass(frozen=True)
class Form:
    """To a rank: leave your process group and join this one."""

    rank: int
    world_size: int
    backend: str
    store: str | None  # the file that the ranks of this group meet in; None: form no group


@dataclass(frozen=True)
class Surroundings:
    """What the notebook's process has around it, and a rank should have too."""

    path: tuple[str, ...]  # sys.path
    folder: str  # the working directory
    environment: dict[str, str]


@dataclass(frozen=True)
class Run:
    """To a rank: call this worker."""

    parcel: Parcel  # (worker, args)
    cells: dict[str, str]  # cells this rank has not seen: file name → source
    surroundings: Surroundings | None  # None: as in the run before
    number: int  # which run of the pool this is


@dataclass(frozen=True)
class Left:
    """What the process of a rank is left with after it did what it was told."""

    modules: dict[str, Stamp]  # the learner's files that it imported meanwhile
    group_intact: bool = True  # the process group is as it was, and nothing is under way in it
    thread: str | None = None  # a thread that still runs the worker's code


@dataclass(frozen=True)
class Formed:
    """From a rank: I am in the group."""

    left: Left


@dataclass(frozen=True)
class Returned:
    """From a rank: the worker returned."""

    parcel: Parcel  # what it returned
    left: Left


@dataclass(frozen=True)
class Raised:
    """From a rank: forming the group, or the worker, raised."""

    failure: RankFailure
    left: Left
    inside: Wait | None = None  # the wait that it came out of
