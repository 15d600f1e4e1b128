"""What `%%ranks` keeps in a rank, and how a cell runs there. Everything here runs in a rank.

The names of a cell live in a module of the rank's own, which is `__main__` while a cell runs. The
process holds it, so it is gone with the process.
"""

from __future__ import annotations

import ast
import builtins
import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.pool.shown import Shown, can_be_sent, collecting, display, seal, show_figures

_ATTRIBUTES = 2000  # names inside one value that are told for completion


@dataclass
class Session:
    """The names of earlier cells, and the state of random numbers that they have left."""

    main: types.ModuleType
    world: dist.ProcessGroup | None = None  # the group of all ranks, as the last cell had it
    random: tuple | None = None


_session: Session | None = None  # None: no cell has run in this process


@dataclass(frozen=True)
class Cell:
    """A worker that runs a cell's body among the names that earlier cells have left.

    source: the body behind as many empty lines as stand above it in the notebook's cell.
    file: what the cell is called in tracebacks. only: the ranks that run it; None: all.
    quiet: the last expression is not shown. had: ranks that have names from earlier cells.
    """

    keeps_groups: ClassVar[bool] = True  # what it makes with dist.new_group is for later cells

    source: str
    file: str
    only: tuple[int, ...] | None = None
    quiet: bool = False
    had: frozenset[int] = frozenset()

    def __call__(self, rank: int, world_size: int) -> Shown | None:
        """Run the cell on this rank."""
        if self.only is not None and rank not in self.only:
            return None
        session = _open(rank, world_size, self.had)
        with _as_main(session), collecting() as bundles:
            value = self._run(vars(session.main))
            if value is not None and not self.quiet:
                display(value)
            show_figures(besides=value)
        names = _names(vars(session.main)) if rank == 0 else {}
        return Shown(seal(value), list(bundles), names)

    def _run(self, names: dict[str, Any]) -> Any:
        tree = ast.parse(self.source, self.file)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, self.file, "exec", dont_inherit=True), names)
        if last is None:
            return None
        expression = ast.Expression(last.value)
        return eval(compile(expression, self.file, "eval", dont_inherit=True), names)


@dataclass(frozen=True)
class Push:
    """A worker that gives names to values from the notebook."""

    values: dict[str, Any]
    only: tuple[int, ...] | None = None
    had: frozenset[int] = frozenset()
    keeps_groups: ClassVar[bool] = True

    def __call__(self, rank: int, world_size: int) -> None:
        """Give this rank its copy of the values."""
        if self.only is None or rank in self.only:
            vars(_open(rank, world_size, self.had).main).update(self.values)


@dataclass(frozen=True)
class Pull:
    """A worker that returns the values of some names, and leaves out those that are not there."""

    names: tuple[str, ...]
    only: tuple[int, ...] | None = None
    keeps_groups: ClassVar[bool] = True

    def __call__(self, rank: int, world_size: int) -> dict[str, Any]:
        """Return the values of this rank; raise TypeError for one that cannot be sent."""
        if self.only is not None and rank not in self.only:
            return {}
        held = vars(_session.main) if _session else {}
        found = {name: held[name] for name in self.names if name in held}
        for name, value in found.items():
            if not can_be_sent(value):
                raise TypeError(
                    f"{name} is a {type(value).__name__}, which cannot be sent to the notebook; "
                    "pull tensors, numbers, strings, or lists and dicts of them"
                )
        return found


@dataclass(frozen=True)
class Names:
    """A worker that returns which names the cells of this rank have made."""

    keeps_groups: ClassVar[bool] = True

    def __call__(self, rank: int, world_size: int) -> list[str]:
        """Return the names of this rank, sorted."""
        return sorted(_own_names(vars(_session.main))) if _session else []


@dataclass(frozen=True)
class Reset:
    """A worker that forgets all names of cells, and the groups that they have made."""

    def __call__(self, rank: int, world_size: int) -> None:
        """Forget the names of this rank, and leave the group: the pool forms it anew."""
        global _session
        _session = None
        if dist.is_initialized():
            dist.destroy_process_group()


def _open(rank: int, world_size: int, had: frozenset[int]) -> Session:
    """Return the session of this process; say so if one that should be there is gone."""
    global _session
    if _session is None:
        if rank in had:
            print("this rank started afresh; the names of earlier cells are gone")
        _session = Session(types.ModuleType("__main__"))
    if _session.world not in (None, dist.group.WORLD) and _holds_group(vars(_session.main)):
        print("the process group was formed anew; groups and DDP models of earlier cells are over")
    _session.world = dist.group.WORLD
    given = {"torch": torch, "dist": dist, "kit": sys.modules["ddp_kit"], "display": display}
    for name, value in given.items():
        vars(_session.main).setdefault(name, value)
    vars(_session.main).update(rank=rank, world_size=world_size, __builtins__=builtins)
    return _session


def _holds_group(names: dict[str, Any]) -> bool:
    kinds = (dist.ProcessGroup, DistributedDataParallel)
    return any(isinstance(value, kinds) for value in names.values())


@contextmanager
def _as_main(session: Session) -> Iterator[None]:
    """Be `__main__`, go on with the random numbers of the cell before, and leave no trace of it."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = session.main
    if session.random is not None:
        _set_random(session.random)
    try:
        yield
    finally:
        session.random = _random()
        sys.modules["__main__"] = before


def _random() -> tuple:
    numpy = sys.modules.get("numpy.random")
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), random.getstate(), numpy and numpy.get_state(), gpus


def _set_random(state: tuple) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy.random"].set_state(state[2])
    if state[3] is not None:
        torch.cuda.set_rng_state_all(state[3])


def _own_names(held: dict[str, Any]) -> dict[str, Any]:
    given = {"torch", "dist", "kit", "display", "rank", "world_size"}
    return {n: value for n, value in held.items() if not n.startswith("__") and n not in given}


def _names(held: dict[str, Any]) -> dict[str, list[str]]:
    """Return every name, and the names inside its value; a module's are known to the notebook."""
    return {
        name: [] if isinstance(value, types.ModuleType) else _inside(value)
        for name, value in held.items()
        if not name.startswith("__")
    }


def _inside(value: Any) -> list[str]:
    try:
        return [name for name in dir(value) if not name.startswith("_")][:_ATTRIBUTES]
    except Exception:  # the learner's own __dir__
        return []
