"""How a `%%ranks` cell runs in a rank, and the names that it leaves there for the next one.

The names are in a module that is `__main__` while a cell runs. They are gone with the process.
"""

from __future__ import annotations

import ast
import builtins
import pickle
import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.pool.rank.displayed import display, show_figures
from ddp_kit.pool.wire import pickling


@dataclass
class Session:
    """The names of earlier cells, and the state of their random number generators."""

    main: types.ModuleType
    world: dist.ProcessGroup | None = None  # the group of all ranks in the last cell
    random: tuple | None = None


_session: Session | None = None  # None: no cell has run in this process


@dataclass(frozen=True)
class SealedValue:
    """A value that the notebook may be unable to rebuild, and a text to use instead."""

    pickled: bytes | None
    text: str

    def open(self) -> Any:
        """Return the value, or its text. In the notebook's process."""
        try:
            return pickle.loads(self.pickled) if self.pickled is not None else self.text
        except Exception:  # whatever the value's own classes raise
            return self.text


@dataclass(frozen=True)
class Cell:
    """A worker that runs a cell's body with the names of earlier cells.

    source: the body after as many empty lines as there are above it in the notebook's cell.
    file: the cell's name in tracebacks. only: the ranks that run it; None: all.
    quiet: the last expression is not shown. had: ranks that have names from earlier cells.
    """

    keeps_groups: ClassVar[bool] = True  # later cells may use what dist.new_group returned

    source: str
    file: str
    only: tuple[int, ...] | None = None
    quiet: bool = False
    had: frozenset[int] = frozenset()

    def __call__(self, rank: int, world_size: int) -> Any:
        if self.only is not None and rank not in self.only:
            return None
        session = _open(rank, world_size, self.had)
        with _as_main(session):
            value = self._run(vars(session.main))
            if value is not None and not self.quiet:
                display(value)
            show_figures(besides=value)
        return _seal(value)

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
    """A worker that assigns values from the notebook to names."""

    values: dict[str, Any]
    had: frozenset[int] = frozenset()
    keeps_groups: ClassVar[bool] = True

    def __call__(self, rank: int, world_size: int) -> None:
        """Assign this rank's copies of the values, and the classes that came with them."""
        came = vars(sys.modules["__main__"]).items()
        classes = {name: value for name, value in came if isinstance(value, type)}
        names = vars(_open(rank, world_size, self.had).main)
        names.update(classes | names | self.values)


@dataclass(frozen=True)
class Pull:
    """A worker that returns the values of those names that exist."""

    names: tuple[str, ...]
    keeps_groups: ClassVar[bool] = True

    def __call__(self, rank: int, world_size: int) -> dict[str, Any]:
        """Return the values of this rank. Raise TypeError for one that cannot be sent."""
        held = vars(_session.main) if _session else {}
        found = {name: held[name] for name in self.names if name in held}
        for name, value in found.items():
            if pickling.find_culprit(value):
                raise TypeError(
                    f"{name} is a {type(value).__name__}, which cannot be sent to the notebook; "
                    "pull tensors, numbers, strings, or lists and dicts of them"
                )
        return found


@dataclass(frozen=True)
class Names:
    """A worker that returns the names that the cells of this rank have assigned."""

    keeps_groups: ClassVar[bool] = True

    def __call__(self, rank: int, world_size: int) -> list[str]:
        given = {"torch", "dist", "kit", "display", "rank", "world_size"}
        held = vars(_session.main) if _session else {}
        return sorted(n for n in held if not n.startswith("__") and n not in given)


@dataclass(frozen=True)
class Reset:
    """A worker that forgets all names of cells, and destroys the groups that they created."""

    def __call__(self, rank: int, world_size: int) -> None:
        """Forget the names of this rank, and leave the group, which the pool forms again."""
        global _session
        _session = None
        if dist.is_initialized():
            dist.destroy_process_group()


def _open(rank: int, world_size: int, had: frozenset[int]) -> Session:
    """Return the session of this process; print a line if an earlier one is gone."""
    global _session
    if _session is None:
        if rank in had:
            print("this rank was restarted; the names of earlier cells are gone")
        _session = Session(types.ModuleType("__main__"))
    if _session.world not in (None, dist.group.WORLD) and _holds_group(vars(_session.main)):
        print("the process group was formed again; groups and DDP models of earlier cells are void")
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
    """Be `__main__` until the end of the run, and continue the previous cell's random numbers."""
    sys.modules["__main__"] = session.main
    if session.random is not None:
        _set_random(session.random)
    try:
        yield
    finally:
        session.random = _random()


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


def _seal(value: Any) -> Any:
    """Return a value as it travels: sealed, unless it is plain data."""
    if value is None or type(value) in (bool, int, float, str, torch.Tensor):
        return value
    pickled = None
    with suppress(Exception):  # it cannot be pickled
        pickled = pickling.pickle_whole(value)
    return SealedValue(pickled, repr(value))
