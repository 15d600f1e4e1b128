"""What `%%ranks` keeps in a rank, and how a cell runs there. Everything here runs in a rank.

The names of a cell live in a module of the rank's own, which is `__main__` while a cell runs. The
process holds it, so it is gone with the process.
"""

from __future__ import annotations

import ast
import builtins
import functools
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_kit.pool import values

FIGURES = "module://ddp_kit.pool.figures"  # what pyplot draws with in a cell
_ATTRIBUTES = 300  # names inside one value that are told for completion

# How IPython shows a value: text, HTML, PNG or what else there is, by MIME type; and metadata.
Bundle = tuple[dict[str, Any], dict[str, Any]]


@dataclass
class Session:
    """The names of earlier cells, and the state of random numbers that they have left."""

    main: types.ModuleType
    random: tuple | None = None
    shown: list[Bundle] = field(default_factory=list)  # by the cell that runs now


_session: Session | None = None  # None: no cell has run in this process


@dataclass(frozen=True)
class Shown:
    """To the notebook: the value of a cell's last expression, and all that the cell displayed."""

    value: Any
    bundles: list[Bundle]
    names: dict[str, list[str]]  # of rank 0: each name, and the names inside its value


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
    had: tuple[int, ...] = ()

    def __call__(self, rank: int, world_size: int) -> Shown | None:
        """Run the cell on this rank."""
        if self.only is not None and rank not in self.only:
            return None
        session = _open(rank, world_size, self.had)
        with _as_main(session):
            value = self._run(vars(session.main))
            if value is not None and not self.quiet:
                display(value)
            show_figures(besides=value)
        names = _names(vars(session.main)) if rank == 0 else {}
        return Shown(_sendable(value), session.shown, names)

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
    had: tuple[int, ...] = ()
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
            if not _can_be_sent(value):
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
    """A worker that forgets all names of cells."""

    def __call__(self, rank: int, world_size: int) -> None:
        """Forget the names of this rank."""
        global _session
        _session = None


def _open(rank: int, world_size: int, had: tuple[int, ...]) -> Session:
    """Return the session of this process; say so if one that should be there is gone."""
    global _session
    if _session is None:
        if rank in had:
            print("this rank started afresh; the names of earlier cells are gone")
        _session = Session(types.ModuleType("__main__"))
    given = {"torch": torch, "dist": dist, "kit": sys.modules["ddp_kit"], "display": display}
    for name, value in given.items():
        vars(_session.main).setdefault(name, value)
    vars(_session.main).update(rank=rank, world_size=world_size, __builtins__=builtins)
    return _session


@contextmanager
def _as_main(session: Session) -> Iterator[None]:
    """Be `__main__`, go on with the random numbers of the cell before, and collect figures."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = session.main
    session.shown = []
    if session.random is not None:
        _set_random(session.random)
    os.environ["MPLBACKEND"] = FIGURES
    if "matplotlib" in sys.modules:
        sys.modules["matplotlib"].use(FIGURES)
    try:
        yield
    finally:
        session.random = _random()
        sys.modules["__main__"] = before


def _random() -> tuple:
    numpy = sys.modules.get("numpy.random")
    return torch.get_rng_state(), random.getstate(), numpy and numpy.get_state()


def _set_random(state: tuple) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        sys.modules["numpy.random"].set_state(state[2])


def display(*values: Any) -> None:
    """Show values below the prints of this rank, as a cell of the notebook would."""
    assert _session is not None, "only a cell can call it"
    _session.shown += filter(any, map(_formatter(), values))


def show_figures(besides: Any = None) -> None:
    """Show what pyplot has drawn, besides what was shown already, and close it."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None or _session is None:
        return
    for figure in map(pyplot.figure, pyplot.get_fignums()):
        if figure is not besides:
            display(figure)
    pyplot.close("all")


@functools.cache
def _formatter() -> Callable[[Any], Bundle]:
    """Return what tells how IPython shows a value: its text, and HTML, PNG or what there is."""
    from IPython.core.formatters import DisplayFormatter
    from IPython.core.pylabtools import print_figure

    formatter = DisplayFormatter()
    draw = functools.partial(print_figure, fmt="png", base64=True)
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", draw)
    return formatter.format


def _sendable(value: Any) -> Any:
    """Return a value, or what stands for it in text if it cannot travel to the notebook."""
    return value if _can_be_sent(value) else repr(value)


def _can_be_sent(value: Any) -> bool:
    if value is None or isinstance(value, (bool, int, float, str, torch.Tensor)):
        return True
    try:
        if values.holds_module(value):
            return False
        values.pack(value).close()
    except Exception:
        return False
    return True


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
