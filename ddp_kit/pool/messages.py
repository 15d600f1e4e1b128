"""What the pool and a rank say to each other through the control pipe."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_kit.errors import RankFailure
from ddp_kit.trace import Send


@dataclass(frozen=True)
class Form:
    """To a rank: leave your process group and join this one."""

    rank: int
    world_size: int
    backend: str
    store: str  # the file that the ranks of this group meet in


@dataclass(frozen=True)
class Formed:
    """From a rank: I am in the group."""


@dataclass(frozen=True)
class Run:
    """To a rank: call this worker."""

    payload: bytes  # cloudpickle of (worker, args)
    cells: dict[str, str]  # cells this rank has not seen: file name → source
    path: list[str]  # the notebook's sys.path
    cwd: str  # the notebook's working directory


@dataclass(frozen=True)
class Returned:
    """From a rank: the worker returned."""

    value: bytes  # cloudpickle of what it returned
    sends: tuple[Send, ...]
    group_intact: bool  # the process group is as it was before the run


@dataclass(frozen=True)
class Raised:
    """From a rank: forming the group, or the worker, raised."""

    failure: RankFailure
